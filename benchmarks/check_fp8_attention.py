"""FP8 attention on a CUDA device: against its reference and float32, and its time against torch's attention.

    python benchmarks/check_fp8_attention.py --out build/check_fp8_attention.jsonl
    python benchmarks/check_fp8_attention.py --only sweep --out build/sweep_fp8_attention.jsonl

Each check is recorded as one JSON line, as by `check_kernels.py`; exit status 1 if any failed, 2 if there is no CUDA
device. Time is the GPU's, by replays of CUDA graphs that take turns, medians. TFLOP/s count 4 B H S^2 D forward and two
and a half times as many backward, half of them if causal, whoever computes.

    kernel      codes bit for bit, results and lse within the bounds of the tests; gradients of flash against the steps
    accuracy    SQNR of the result and the gradients against float32, N(0, 1) and outliers, beside bf16 and emulation;
                the bias of long sums of one sign
    cudnn       gradients by cuDNN of the same result and lse, where Octavo takes flash's: are they the same, how fast
    speed       forward, and forward with backward, against scaled_dot_product_attention by flash and by cuDNN
    sweep       the forward with other constants than its own, and that of `attention_ahead.py`
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import octavo
from octavo.functional.attention import Attention
from octavo.functional.attention_mask import mask_rules
from octavo.functional.attention_operands import as_fp8_operand
from octavo.functional.fp8_attention import fp8_attention
from octavo.kernels import fp8_attention as kernel
from octavo.kernels.fp8_attention import triton_kernel as kernels
from octavo.kernels.fp8_attention.cast_kernel import cast_tokens_triton
from benchmarks import attention_ahead
from benchmarks.check_kernels import Checks, environment
from benchmarks.kernel_speed import graph_seconds
from tests.functional.test_fp8_attention import MEASURED, decibels, drawn
from tests.kernels.test_fp8_attention import CASES, assert_agrees, operands, tensor_core_rounding
from tests.measures import relative_error, sqnr_db

BF16 = torch.bfloat16
DEVICE = "cuda"
REFERENCE = kernel.fp8_attention_reference
# B, H, S, D.
SHAPES = ((2, 32, 8192, 128), (4, 32, 2048, 128), (8, 12, 1024, 64))
EMULATED_SHAPE = (32, 16, 256, 80)
# Queries of a program, warps, stages.
VARIANTS = ((128, 8, 3), (128, 8, 2), (128, 8, 4), (64, 4, 3), (64, 4, 2))
AHEAD = ((128, 8, 3), (128, 8, 2), (64, 4, 2))
Result = dict[str, Any]
Call = Callable[[], Any]


def agrees(extents: tuple[int, int], features: int, causal: bool) -> Result:
    """The kernel and its reference, then flash's gradients and the reference's."""
    torch.manual_seed(0)
    q, k, v = operands(*extents, features, BF16, DEVICE)
    scale = features**-0.5
    out, lse, codes = kernel.fp8_attention(q, k, v, scale, causal)
    # Loud keys make scores, and their rounding, three times those of N(0, 1) data.
    error = assert_agrees((out, lse, codes), [q, k, v], causal, tensor_core_rounding(codes, extents), 0.015)
    dy = torch.randn_like(out)
    mine = kernel.fp8_attention_gradient(dy, codes, out, lse, extents[1], scale, causal)
    steps = kernel.attention_gradient_reference(dy, codes, out, lse, extents[1], scale, causal)
    # Of one key the gradients of queries and keys are zero but for rounding.
    pairs = list(zip(steps, mine, strict=True))[2 if extents[1] == 1 else 0 :]
    worst = max(relative_error(a, b) for a, b in pairs)
    return {"ok": worst < 2.0**-6, "relative_error": round(error, 5), "gradients": round(worst, 5)}


def check_kernel(checks: Checks) -> None:
    """Whole blocks and not, queries that look at nothing, more keys than a tensor core sums well."""
    for *extents, features, causal in (*CASES, (1000, 1500, 128, True), (500, 4096, 64, False)):
        call = functools.partial(agrees, tuple(extents), features, causal)
        checks.run("fp8_attention", call, extents=extents, features=features, causal=causal)


def outcome(attend: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor) -> list[Tensor]:
    """The result and the gradients."""
    given = [x.detach().requires_grad_() for x in leaves]
    out = attend(*given)
    return [out.detach(), *torch.autograd.grad(out, given, dy.to(out.dtype))]


def accuracy(kind: str, causal: bool, tokens: int) -> Result:
    """Decibels of o, dq, dk, dv against float32 on the same bf16 operands."""
    torch.manual_seed(0)
    leaves = [drawn(kind, 1, 4, tokens, 128, device=DEVICE) for _ in range(3)]
    dy = torch.randn_like(leaves[0])
    setup = Attention(mask_rules("causal" if causal else "no_mask"), 128**-0.5)
    plain = functools.partial(scaled_dot_product_attention, is_causal=causal)
    with sdpa_kernel([SDPBackend.MATH]):
        exact = outcome(plain, [x.float() for x in leaves], dy.float())
    ways = {
        "bf16": plain,
        "emulated": lambda q, k, v: plain(as_fp8_operand(q), as_fp8_operand(k), as_fp8_operand(v)),
        "fp8": lambda q, k, v: fp8_attention(q, k, v, setup),
    }
    found = {
        f"{name}_db": [round(sqnr_db(a, b), 1) for a, b in zip(exact, outcome(way, leaves, dy), strict=True)]
        for name, way in ways.items()
    }
    # Rounded probabilities cost 1 dB of the result, and hardly anything of the gradients.
    worst = min(a - b for a, b in zip(found["fp8_db"], found["emulated_db"], strict=True))
    return found | {"ok": worst > -1.5}


def as_the_page_says(kind: str, causal: bool) -> Result:
    """What the tests measure on a CPU."""
    found = decibels(kind, causal, DEVICE)
    worst = min(a - b for a, b in zip(found, MEASURED[kind, causal], strict=True))
    return {"ok": worst > -0.5, "db": [round(each, 1) for each in found]}


def bias(tokens: int) -> Result:
    """Of values of one sign: how far the result is from the reference's on average."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, n, 128, device=DEVICE).to(BF16) for n in (128, tokens))
    v = torch.rand(1, 1, tokens, 128, device=DEVICE).to(BF16)
    out, expected = (attend(q, k, v, 128**-0.5, False)[0].double() for attend in (kernel.fp8_attention, REFERENCE))
    relative = float(((out - expected) / expected).mean())
    # A sum of 8192 keys in the tensor core would lose more than 6 %, of 128 at a time some 0.05 %.
    return {"ok": abs(relative) < 2e-3, "relative": relative}


def check_accuracy(checks: Checks) -> None:
    """The tests' own figures, then longer rows."""
    for kind, causal in MEASURED:
        checks.run("SQNR of the page", functools.partial(as_the_page_says, kind, causal), data=kind, causal=causal)
    for kind, causal in MEASURED:
        checks.run("SQNR", functools.partial(accuracy, kind, causal, 4096), data=kind, causal=causal, tokens=4096)
    checks.run("bias", functools.partial(bias, 8192), keys=8192)


def cudnn_beside_flash(shape: tuple[int, int, int, int], causal: bool) -> Result:
    """How far their gradients are from each other, and milliseconds; both with what decodes the operands.

    As many queries as keys: cuDNN aligns a causal mask at the top left. What it takes besides, and the shape of lse, is
    what its own forward gives, which differs between versions of torch.
    """
    q, k, v, dy = (x.detach() for x in tensors(shape))
    scale, tokens, aten = shape[3] ** -0.5, shape[2], torch.ops.aten
    out, lse, codes = kernel.fp8_attention(q, k, v, scale, causal)
    _, like, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    lse_of_cudnn = lse.reshape(like.shape)

    def by_cudnn() -> tuple[Tensor, Tensor, Tensor]:
        operands = kernel.decoded(codes, tokens, tokens, BF16)
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            dy, *operands, out, lse_of_cudnn, seed, offset, None, None, None, tokens, tokens, 0.0, causal, scale=scale
        )
        return dq, dk, dv

    calls: dict[str, Call] = {
        "flash": lambda: kernel.fp8_attention_gradient(dy, codes, out, lse, tokens, scale, causal),
        "cudnn": by_cudnn,
    }
    pairs = zip(calls["flash"](), calls["cudnn"](), strict=True)
    worst = max(float((a - b).float().norm() / a.float().norm()) for a, b in pairs)
    seconds = seconds_of(calls)
    return {"ok": worst < 2.0**-6, "relative_error": worst} | {
        f"{name} ms": round(1e3 * each, 4) for name, each in seconds.items()
    }


def check_cudnn(checks: Checks) -> None:
    """Each shape, causal and not."""
    for shape in SHAPES:
        for causal in (True, False):
            call = functools.partial(cudnn_beside_flash, shape, causal)
            checks.run("gradients by cuDNN", call, shape=list(shape), causal=causal)
            torch.cuda.empty_cache()


def tensors(shape: tuple[int, int, int, int]) -> list[Tensor]:
    """q, k, v and dy [B, H, S, D] of the shape, which lie as [B, S, H, D]."""
    batch, heads, tokens, features = shape
    made = [torch.randn(batch, tokens, heads, features, device=DEVICE).to(BF16).transpose(1, 2) for _ in range(4)]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def by_torch(backend: SDPBackend, causal: bool) -> Callable[..., Tensor]:
    """Torch's attention by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def no_gradient(call: Call) -> Call:
    """The same without autograd."""

    def without() -> Any:
        with torch.no_grad():
            return call()

    return without


def cases(shape: tuple[int, int, int, int], causal: bool) -> dict[str, Call]:
    """What is timed, by name."""
    q, k, v, dy = tensors(shape)
    setup = Attention(mask_rules("causal" if causal else "no_mask"), shape[3] ** -0.5)
    ways: dict[str, Callable[..., Tensor]] = {
        "fp8": lambda q, k, v: fp8_attention(q, k, v, setup),
        "flash": by_torch(SDPBackend.FLASH_ATTENTION, causal),
        "cudnn": by_torch(SDPBackend.CUDNN_ATTENTION, causal),
    }
    with torch.no_grad():
        codes = kernel.fp8_attention(q, k, v, setup.scale, causal)[2]
    extents = (shape[2], shape[2])
    found: dict[str, Call] = {
        "fp8 casts alone": no_gradient(lambda: [cast_tokens_triton(x, x is v) for x in (q, k, v)]),
        "fp8 without casts": lambda: kernels.attend_triton(codes, extents, setup.scale, causal, BF16),
    }
    for name, way in ways.items():
        found[name] = no_gradient(functools.partial(way, q, k, v))
        found[f"{name} with backward"] = lambda way=way: torch.autograd.grad(way(q, k, v), (q, k, v), dy)
    return found


def seconds_of(calls: dict[str, Call], rounds: int = 7) -> dict[str, float]:
    """Median seconds of each, taking turns."""
    measures = {name: graph_seconds(call, repeats=2) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: statistics.median(each[2:]) for name, each in samples.items()}


def speed(shape: tuple[int, int, int, int], causal: bool) -> Result:
    """Milliseconds and TFLOP/s of each, and how many times as fast FP8 is."""
    batch, heads, tokens, features = shape
    forward = 4 * batch * heads * tokens**2 * features * (0.5 if causal else 1)
    seconds = seconds_of(cases(shape, causal))
    result: Result = {}
    for name, each in seconds.items():
        result[f"{name} ms"] = round(1e3 * each, 4)
        if name != "fp8 casts alone":
            result[f"{name} tflops"] = round(forward * (3.5 if "backward" in name else 1) / each / 1e12, 1)
    for rival in ("flash", "cudnn"):
        for what in ("", " with backward"):
            result[f"times {rival}{what}"] = round(seconds[rival + what] / seconds["fp8" + what], 3)
    return result | {"ok": True}


def emulated_speed(causal: bool) -> Result:
    """Heads of 80 features, whose operands are cast and decoded again: what that costs beside plain attention."""
    batch, heads, tokens, features = EMULATED_SHAPE
    made = [torch.randn(batch, tokens, heads, features, device=DEVICE).to(BF16) for _ in range(3)]
    kind = "causal" if causal else "no_mask"
    layers = {
        name: octavo.DotProductAttention(
            heads, features, qkv_format="bshd", attn_mask_type=kind, fp8_attention=name == "emulated"
        )
        for name in ("emulated", "bf16")
    }
    seconds = seconds_of({name: functools.partial(layer, *made) for name, layer in layers.items()})
    way = layers["emulated"].way(made[0], made[1], made[2])
    return {"ok": "FP8 operands emulated (heads of 80" in way, "way": way} | {
        f"{name} ms": round(1e3 * each, 4) for name, each in seconds.items()
    }


def check_speed(checks: Checks) -> None:
    """Each shape, causal and not."""
    for shape in SHAPES:
        for causal in (True, False):
            checks.run("speed", functools.partial(speed, shape, causal), shape=list(shape), causal=causal)
            torch.cuda.empty_cache()
    for causal in (True, False):
        call = functools.partial(emulated_speed, causal)
        checks.run("speed of emulation", call, shape=list(EMULATED_SHAPE), causal=causal)


def varied(shape: tuple[int, int, int, int], causal: bool) -> Result:
    """TFLOP/s of the forward without casts by queries, warps and stages."""
    q, k, v, _ = (x.detach() for x in tensors(shape))
    scale, extents = shape[3] ** -0.5, (shape[2], shape[2])
    codes = kernel.fp8_attention(q, k, v, scale, causal)[2]
    own = kernels._QUERIES, kernels._WARPS, kernels._STAGES
    expected = kernels.attend_triton(codes, extents, scale, causal, BF16)[0].detach()

    def attend(variant: tuple[int, int, int]) -> Tensor:
        kernels._QUERIES, kernels._WARPS, kernels._STAGES = variant
        try:
            return kernels.attend_triton(codes, extents, scale, causal, BF16)[0]
        finally:
            kernels._QUERIES, kernels._WARPS, kernels._STAGES = own

    def ahead(variant: tuple[int, int, int]) -> Tensor:
        attention_ahead.CHOICE = variant
        return attention_ahead.attend_ahead(codes, extents, scale, causal, BF16)[0]

    found: dict[str, Call] = {str(variant): functools.partial(attend, variant) for variant in VARIANTS}
    found |= {f"ahead {variant}": functools.partial(ahead, variant) for variant in AHEAD}
    # The same steps in the same order: no more than another code of a probability here and there.
    worst = max(float((call() - expected).float().norm() / expected.float().norm()) for call in found.values())
    flops = 4 * shape[0] * shape[1] * shape[2] ** 2 * shape[3] * (0.5 if causal else 1)
    rates = {name: round(flops / each / 1e12, 1) for name, each in seconds_of(found).items()}
    return {"ok": worst < 0.005, "own": str(own), "relative_error": worst} | rates


def check_sweep(checks: Checks) -> None:
    """Each shape, causal and not."""
    for shape in SHAPES:
        for causal in (True, False):
            checks.run("sweep", functools.partial(varied, shape, causal), shape=list(shape), causal=causal)


PARTS: dict[str, Callable[[Checks], None]] = {
    "kernel": check_kernel,
    "accuracy": check_accuracy,
    "speed": check_speed,
    "cudnn": check_cudnn,
    "sweep": check_sweep,
}


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/check_fp8_attention.jsonl"), help="the JSON lines")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no check after this long (default 240)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="(default: all but sweep)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: this check compares a kernel on a GPU with its reference", file=sys.stderr)
        return 2
    checks = Checks(environment(options.commit), options.seconds)
    print("  ".join(f"{key} {value}" for key, value in checks.environment.items()), flush=True)
    for name in options.only:
        PARTS[name](checks)
        checks.write(options.out)
    skipped = sum(record["ok"] is None for record in checks.records)
    print(f"{len(checks.records)} checks, {checks.failed} failed, {skipped} skipped for want of time")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
