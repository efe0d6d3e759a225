"""The cross-entropies on a CUDA device: against float64 and their emulation, and their time and memory against torch's.

    python benchmarks/check_cross_entropy.py --out build/check_cross_entropy.jsonl
    python benchmarks/check_cross_entropy.py --only sweep --out build/sweep_cross_entropy.jsonl

Each check is recorded as one JSON line, as by `check_kernels.py`; exit status 1 if any failed, 2 if there is no CUDA
device. Time is the GPU's, by replays of CUDA graphs that take turns, medians; it is that of the loss and of the
gradients of hidden states and weight. Memory is the peak of what an eager step allocates beyond its inputs, gradients
included.

    kernel      within the bounds of the tests, every dtype and rule; what is not finite; more than 2^31 logits
    head        gradients as close to float32 as emulated, less 0.5 dB; in one graph by Inductor
    speed       the kernel against copy; octavo.LMHead against F.linear and F.cross_entropy, M = 8192, K = 4096
    sweep       the kernel and the head with other constants than their own
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
from torch import Tensor, nn

import octavo
from octavo.kernels.cross_entropy import (
    LossRule,
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_reference,
    cross_entropy_with_gradient,
)
from octavo.kernels.cross_entropy import triton_kernel as kernels
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from benchmarks.check_kernels import Checks, environment
from benchmarks.kernel_speed import Case, graph_seconds, interleaved, with_constants
from tests.kernels.test_cross_entropy import DTYPES, RULES, assert_close, assert_special, inputs, special_rows
from tests.measures import sqnr_db
from tests.modules.test_lm_head import EMULATED, measured

BF16 = torch.bfloat16
TOKENS, FEATURES = 8192, 4096
VOCABULARIES = (32000, 128256)
Result = dict[str, Any]
Step = Callable[[], Any]


def bounded(shape: tuple[int, int], dtype: torch.dtype, rule: LossRule) -> Result:
    """Loss and gradient beside the logits, with a factor a row, and over them."""
    torch.manual_seed(0)
    logits, targets = inputs(shape, dtype, rule, "cuda")
    wide = torch.full((shape[0], shape[1] + 15 - (shape[1] - 1) % 16), float("nan"), dtype=dtype, device="cuda")
    view = wide[:, : shape[1]].copy_(logits)
    loss, lse = cross_entropy(view, targets, rule)
    factor = torch.randn(shape[0], device="cuda")
    beside = cross_entropy_gradient(view, targets, lse, factor, rule)
    assert_close((loss, lse, beside), logits, targets, rule, factor)
    assert torch.equal(view, logits)
    both = cross_entropy_with_gradient(view, targets, rule)
    assert_close((*both, view), logits, targets, rule)
    assert bool(wide[:, shape[1] :].isnan().all())
    return {"ok": torch.equal(both[0], loss) and torch.equal(both[1], lse)}


def not_finite(dtype: torch.dtype) -> Result:
    """Rows that hold inf and NaN, targets that are no classes."""
    logits, targets = special_rows(dtype, "cuda")
    loss, lse = cross_entropy(logits, targets)
    assert_special(loss, lse, cross_entropy_gradient(logits, targets, lse), logits, targets)
    over = logits.clone()
    assert_special(*cross_entropy_with_gradient(over, targets), over, logits, targets)
    return {"ok": True}


def large() -> Result:
    """More than 2^31 logits; the last rows against the reference."""
    rows, columns = 17000, 128256
    logits = torch.empty(rows, columns, dtype=BF16, device="cuda").normal_()
    targets = torch.randint(0, columns, (rows,), device="cuda")
    last, last_targets = logits[-64:].clone(), targets[-64:]
    loss, lse = cross_entropy_with_gradient(logits, targets)
    expected, _ = cross_entropy_reference(last, last_targets, LossRule())
    torch.testing.assert_close(loss[-64:], expected)
    assert_close((loss[-64:], lse[-64:], logits[-64:]), last, last_targets, LossRule())
    return {"ok": True, "elements": logits.numel()}


def check_kernel(checks: Checks) -> None:
    """Short rows and long ones, whole blocks and not."""
    for number, shape in enumerate(((5, 1), (7, 33), (40, 300), (200, 8192), (64, 32000), (33, 50257), (16, 128256))):
        for rule in RULES:
            dtype = DTYPES[number % 3]
            call = functools.partial(bounded, shape, dtype, rule)
            checks.run("cross_entropy", call, shape=list(shape), dtype=str(dtype), rule=str(rule))
    for dtype in DTYPES:
        checks.run("cross_entropy not finite", functools.partial(not_finite, dtype), dtype=str(dtype))
    checks.run("cross_entropy more than 2^31", large)
    torch.cuda.empty_cache()


def close(recipe: str) -> Result:
    """SQNR of the gradients, native and as emulated."""
    found = measured(recipe, "cuda")
    least = min(a - b for a, b in zip(found, EMULATED[recipe], strict=True))
    return {"ok": least > -0.5, "dh_db": round(found[0], 2), "dw_db": round(found[1], 2)}


def compiled(recipe: str) -> Result:
    """One graph by Inductor, the eager step to rounding."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    heads = [octavo.LMHead(256, 1000, device="cuda", dtype=BF16, recipe=RECIPES[recipe], chunk_tokens=200)]
    heads.append(octavo.LMHead(256, 1000, device="cuda", dtype=BF16, recipe=RECIPES[recipe], chunk_tokens=200))
    heads[1].load_state_dict(heads[0].state_dict())
    calls = (heads[0], torch.compile(heads[1], fullgraph=True))
    worst = float("inf")
    for _ in range(3):
        hidden, targets = (
            torch.randn(512, 256, device="cuda", dtype=BF16),
            torch.randint(0, 1000, (512,), device="cuda"),
        )
        outcomes = []
        for head, call in zip(heads, calls, strict=True):
            leaf = hidden.clone().requires_grad_()
            loss = call(leaf, targets)
            outcomes.append((loss.detach(), *torch.autograd.grad(loss, (leaf, head.weight))))
            octavo.update_scales(head)
        worst = min(worst, *(sqnr_db(a, b) for a, b in zip(*outcomes, strict=True)))
    # bf16 rounds to 2^-9; a code of FP8 may be the neighbouring one here and there.
    return {"ok": worst > 35, "worst_db": round(worst, 1) if worst != float("inf") else "equal"}


def check_head(checks: Checks) -> None:
    """Every recipe."""
    for recipe in EMULATED:
        checks.run("LMHead as emulated", functools.partial(close, recipe), recipe=recipe)
    for recipe in RECIPES:
        checks.run("LMHead compiled", functools.partial(compiled, recipe), recipe=recipe)


RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    "current": CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=16),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}


def step_of(call: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> Step:
    """The loss and its gradients."""
    return lambda: torch.autograd.grad(call(hidden, targets), (hidden, weight))


def head_step(recipe: str, hidden: Tensor, weight: nn.Parameter, targets: Tensor, **options: Any) -> Step:
    """That of an LMHead; with delayed scaling its scales are known."""
    head = octavo.LMHead(FEATURES, weight.shape[0], device="meta", dtype=BF16, recipe=RECIPES[recipe], **options)
    head.weight = weight
    head.delayed_state.move(weight.device)
    step = step_of(head, hidden, weight, targets)
    for _ in range(2):
        step()
        octavo.update_scales(head)
    return step


def rivals(vocabulary: int) -> dict[str, Callable[[], Step]]:
    """What is timed, by name, made when its turn comes."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, device="cuda", dtype=BF16).requires_grad_()
    weight = nn.Parameter(torch.randn(vocabulary, FEATURES, device="cuda", dtype=BF16) / 64)
    targets = torch.randint(0, vocabulary, (TOKENS,), device="cuda")

    def plain(h: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(h, weight), t)

    def in_float32(h: Tensor, t: Tensor) -> Tensor:
        return nn.functional.cross_entropy(nn.functional.linear(h, weight).float(), t)

    def kernel_alone(h: Tensor, t: Tensor) -> Tensor:
        return octavo.cross_entropy(nn.functional.linear(h, weight), t, overwrite_logits=True)

    cases = {
        "torch": lambda: step_of(plain, hidden, weight, targets),
        "torch float32 logits": lambda: step_of(in_float32, hidden, weight, targets),
        "torch float32 logits compiled": lambda: step_of(torch.compile(in_float32), hidden, weight, targets),
        "octavo.cross_entropy": lambda: step_of(kernel_alone, hidden, weight, targets),
    }
    for recipe in RECIPES:
        cases[f"LMHead {recipe}"] = functools.partial(head_step, recipe, hidden, weight, targets)
    for recipe in ("bf16", "current"):
        cases[f"LMHead {recipe} recompute"] = functools.partial(
            head_step, recipe, hidden, weight, targets, recompute=True
        )
    return cases


def peak_bytes(step: Step) -> int:
    """What a step allocates at its peak, beyond what there was."""
    step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def against(baseline: Callable[[], float], make: Callable[[], Step], vocabulary: int) -> Result:
    """Milliseconds and peak of a case, and how many times as fast it is as what is given."""
    step = make()
    peak = peak_bytes(step)
    replay = graph_seconds(step, repeats=1)
    samples = [(baseline(), replay()) for _ in range(8)][2:]
    theirs, ours = (statistics.median(column) for column in zip(*samples, strict=True))
    return {
        "ms": round(1e3 * ours, 2),
        "torch_ms": round(1e3 * theirs, 2),
        "times_as_fast": round(theirs / ours, 3),
        "peak_gib": round(peak / 2**30, 3),
        "of_logits": round(peak / (2 * TOKENS * vocabulary), 2),
    }


def kernel_cases(rows: int, columns: int) -> dict[str, Case]:
    """The kernel by itself and copy, with the bytes that must move; what is written over stays finite."""
    logits = torch.randn(rows, columns, device="cuda", dtype=BF16)
    targets, target = torch.randint(0, columns, (rows,), device="cuda"), torch.empty_like(logits)
    n, (_, lse) = logits.numel(), cross_entropy(logits, targets)
    over = logits.clone()
    return {
        "copy": (lambda: target.copy_(logits), 4 * n),
        "loss": (lambda: cross_entropy(logits, targets), 2 * n),
        "with gradient": (lambda: cross_entropy_with_gradient(over, targets), 4 * n),
        "gradient": (lambda: cross_entropy_gradient(logits, targets, lse), 4 * n),
    }


def kernel_rates(rows: int, columns: int) -> Result:
    """TB/s, and as a part of copy's."""
    measured_rates = interleaved(kernel_cases(rows, columns))
    rates: Result = {name: round(rate, 3) for name, rate in measured_rates.items()}
    return rates | {f"{name} of_copy": round(rate / measured_rates["copy"], 3) for name, rate in measured_rates.items()}


def check_speed(checks: Checks) -> None:
    """The kernel on a chunk of each vocabulary, then whole steps against torch's."""
    for vocabulary in (*VOCABULARIES, 50257):
        call = functools.partial(kernel_rates, 2048, vocabulary)
        checks.run("speed of cross_entropy", call, shape=[2048, vocabulary])
    for vocabulary in VOCABULARIES:
        cases = rivals(vocabulary)
        baseline = graph_seconds(cases["torch"](), repeats=1)
        for name, make in cases.items():
            call = functools.partial(against, baseline, make, vocabulary)
            checks.run("speed", call, shape=[TOKENS, FEATURES, vocabulary], case=name)
            torch.cuda.empty_cache()


def check_sweep(checks: Checks) -> None:
    """The kernel's blocks, and the tokens of a chunk."""
    for vocabulary in VOCABULARIES:
        for block, a_thread in (
            (4096, 8),
            (4096, 16),
            (4096, 32),
            (8192, 8),
            (8192, 16),
            (8192, 32),
            (16384, 16),
            (16384, 32),
        ):
            values = {"_BLOCK": block, "_A_THREAD": a_thread}
            cases = kernel_cases(2048, vocabulary)
            checks.run("sweep", with_constants(kernels, values, cases), shape=[2048, vocabulary], **values)
        hidden = torch.randn(TOKENS, FEATURES, device="cuda", dtype=BF16).requires_grad_()
        weight = nn.Parameter(torch.randn(vocabulary, FEATURES, device="cuda", dtype=BF16) / 64)
        targets = torch.randint(0, vocabulary, (TOKENS,), device="cuda")
        baseline = graph_seconds(head_step("bf16", hidden, weight, targets), repeats=1)
        for recipe in ("bf16", "current"):
            for chunk in (512, 1024, 2048, 4096, 8192):
                make = functools.partial(head_step, recipe, hidden, weight, targets, chunk_tokens=chunk)
                call = functools.partial(against, baseline, make, vocabulary)
                checks.run("sweep of chunks", call, vocabulary=vocabulary, recipe=recipe, chunk=chunk)


PARTS: dict[str, Callable[[Checks], None]] = {
    "kernel": check_kernel,
    "head": check_head,
    "speed": check_speed,
    "sweep": check_sweep,
}


def main(arguments: list[str] | None = None) -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/check_cross_entropy.jsonl"), help="the JSON lines")
    parser.add_argument("--seconds", type=float, default=280.0, help="start no check after this long (default 280)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="(default: all but sweep)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: this check compares kernels on a GPU with their references", file=sys.stderr)
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
