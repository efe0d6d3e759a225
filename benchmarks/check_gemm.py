"""Can a product in Triton that needs no transposed codes beat cast + transpose + `torch._scaled_mm` on Hopper?

    python benchmarks/check_gemm.py --out build/check_gemm.jsonl

First every variant of `gemm_variants.py` is compiled, run and compared with float64, in processes of their own. Then,
alone on the card, those that were right take turns with `torch._scaled_mm`, and the cast that writes codes in both
layouts with the one that writes only those that are needed: CUDA-graph replays, medians. A variant "saves" what the
transposed codes cost in the cast, minus what its product takes longer than `torch._scaled_mm` of the same precision.

One JSON line a result (hardware, versions, commit). Exit status 1 if a variant was wrong, 2 without a CUDA device; one
that does not compile is a finding, not a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, I001, T201

import torch
from torch import Tensor

from benchmarks.check_kernels import Checks, environment
from benchmarks.gemm_variants import SMALL, VARIANTS, Operands, Variant, output, try_all
from benchmarks.kernel_speed import graph_seconds
from octavo.formats import E4M3, E5M2
from octavo.kernels.cast_transpose import cast_transpose

SHAPES = ((8192, 768, 3072), (8192, 1280, 1280), (8192, 1280, 5120), (4096, 4096, 4096), (16384, 4096, 14336))
ROUNDS, REPEATS = 8, 4
# Together larger than the L2 cache.
WEIGHTS = 6
Result = dict[str, Any]


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of each call, taking turns."""
    measures = {name: graph_seconds(call, REPEATS) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: statistics.median(seconds[1:]) for name, seconds in samples.items()}


def scaled_mm_call(o: Operands, product: str, fast: bool) -> Callable[[], Any]:
    """`torch._scaled_mm` of the codes that lie as it needs them."""
    a, b = o.of(product)
    return lambda: torch._scaled_mm(a, b.t(), o.scale, o.scale, out_dtype=torch.bfloat16, use_fast_accum=fast)


def time_casts(o: Operands, m: int, k: int, n: int) -> Result:
    """What the transposed codes cost in the cast of w and of dy, in ms; x, whose transposed codes wgrad keeps, too."""
    gathered = torch.zeros((), device="cuda")
    calls: dict[str, Callable[[], Any]] = {}
    for name, shape, format in (("x", (m, k), E4M3), ("w", (n, k), E4M3), ("dy", (m, n), E5M2)):
        values = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for layouts, columnwise in (("both", o.scale), ("codes", None)):

            def call(x: Tensor = values, format: Any = format, columnwise: Tensor | None = columnwise) -> None:
                cast_transpose(x, format, o.scale, columnwise, gathered=gathered)

            calls[f"{name}_{layouts}"] = call
    found = medians(calls)
    result: Result = {f"{name}_ms": round(seconds * 1e3, 4) for name, seconds in found.items()}
    return result | {
        f"{x}_saved_ms": round((found[f"{x}_both"] - found[f"{x}_codes"]) * 1e3, 4) for x in ("x", "w", "dy")
    }


def time_product(operands: list[Operands], product: str, variants: list[Variant], saved: dict[str, float]) -> Result:
    """Every variant of a product against `torch._scaled_mm`; of each kind and precision the fastest is told.

    Args:
        operands: taken one after the other, so that what one leaves in the L2 cache does not serve the next.
        saved: ms that the cast saves if this kind of variant runs: by kind, "" for those not named.
    """
    as_in = "fprop" if product == "small" else product
    rows, columns = operands[0].of(as_in)
    out = output(operands[0], product)

    def all_of(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
        return lambda: [call() for call in calls]

    calls = {v.name: all_of([lambda v=v, o=o: v.call(o, out) for o in operands]) for v in variants}
    for how in ("fast", "promoted"):
        calls[f"scaled_mm {how}"] = all_of([scaled_mm_call(o, as_in, how == "fast") for o in operands])
    found = {name: seconds * 1e3 / len(operands) for name, seconds in medians(calls).items()}
    result: Result = {"ms": {name: round(ms, 4) for name, ms in found.items()}, "best": {}}
    flops = 2 * rows.shape[0] * rows.shape[1] * columns.shape[0]
    result["scaled_mm_tflops"] = {how: _tflops(flops, found[f"scaled_mm {how}"]) for how in ("fast", "promoted")}
    for variant in variants:
        how = "promoted" if variant.promoted else "fast"
        ms, beside = found[variant.name], found[f"scaled_mm {how}"]
        gain = saved.get(variant.kind, saved[""]) - (ms - beside)
        best = result["best"].get(f"{variant.kind} {how}")
        if best is None or ms < best["ms"]:
            blocks = "x".join(map(str, variant.blocks))
            figures = {"ms": round(ms, 4), "tflops": _tflops(flops, ms), "ratio": round(beside / ms, 3)}
            result["best"][f"{variant.kind} {how}"] = figures | {"saves_us": round(gain * 1e3, 1), "blocks": blocks}
    return result | {"ok": True}


def _tflops(flops: float, ms: float) -> int:
    return round(flops / ms / 1e9)


class Quiet(Checks):
    """Checks that say only what is asked of them: everything is in the record."""

    def last(self, name: str, check: Callable[[], Result], **about: Any) -> Result:
        """Runs a check -> its record."""
        with contextlib.redirect_stdout(io.StringIO()):
            self.run(name, check, **about)
        record: Result = self.records[-1]
        return record


def short(record: Result) -> str:
    """One line of a product's record: ms and TFLOP/s of `torch._scaled_mm`, then each kind's ratio to it and gain."""
    if "best" not in record:
        return str(record.get("skipped") or record.get("error"))[:150]
    library, ms = record["scaled_mm_tflops"], record["ms"]
    times = "/".join(f"{ms[f'scaled_mm {how}']:.4f}" for how in ("fast", "promoted"))
    parts = [f"lib {times} ms {library['fast']}/{library['promoted']} TF"]
    for kind, best in record["best"].items():
        kind = kind.replace("promoted", "p").replace("fast", "f")
        parts.append(f"{kind} {best['ratio']:.2f} {best['saves_us']:+.0f}")
    # Backward products are promoted: fast ones show what that costs.
    wanted = "promoted" if record["product"] in ("dgrad", "wgrad") else "fast"
    gains = [best["saves_us"] for kind, best in record["best"].items() if kind.endswith(wanted)]
    verdict = "SAVES" if max(gains, default=0.0) > 0 else "no gain"
    return " | ".join(parts) + f" | {verdict}"


def check_variants(checks: Quiet, found: dict[int, float | str]) -> list[Variant]:
    """What the processes found -> the variants that are right."""
    right = []
    for number, answer in found.items():
        variant = VARIANTS[number]
        wrong = isinstance(answer, float) and answer > 1
        result = {"ok": not wrong, "worst": answer} if isinstance(answer, float) else {"ok": None, "skipped": answer}
        checks.last("gemm variant", lambda result=result: dict(result), variant=variant.name)
        if isinstance(answer, float) and not wrong:
            right.append(variant)
        else:
            print(f"{'WRONG' if wrong else 'left out'} {variant.name}: {answer}"[:180])
    return right


def time_shape(checks: Quiet, shape: tuple[int, int, int], right: list[Variant]) -> None:
    """The three products of a Linear and its casts."""
    m, k, n = shape
    o = Operands.random(m, k, n)
    casts = checks.last("gemm casts", lambda: time_casts(o, m, k, n), shape=shape)
    if "w_saved_ms" not in casts:
        print(f"{m}x{k}x{n} {short(casts)}")
        return
    saved = {"w": casts["w_saved_ms"], "dy": casts["dy_saved_ms"], "x": casts["x_saved_ms"]}
    print(f"{m}x{k}x{n} transposed codes cost, us: " + " ".join(f"{name} {ms * 1e3:.1f}" for name, ms in saved.items()))
    # Triton's own wgrad takes both operands as they are; through registers only dy.
    gains = {
        "fprop": {"": 0.0},
        "dgrad": {"": saved["w"]},
        "wgrad": {"": saved["dy"] + saved["x"], "gluon": saved["dy"]},
    }
    for product, gain in gains.items():
        variants = [v for v in right if v.product == product]
        record = checks.last(
            "gemm", lambda p=product, v=variants, g=gain: time_product([o], p, v, g), product=product, shape=shape
        )
        print(f"  {product} {short(record)}", flush=True)


def time_small(checks: Quiet, right: list[Variant]) -> None:
    """Few rows, as a model that is served multiplies them: each weight comes from memory, not from the L2 cache."""
    variants = [v for v in right if v.product == "small"]
    for m in (1, 16, 64, 256):
        operands = [Operands.random(m, *SMALL) for _ in range(WEIGHTS)]
        call = functools.partial(time_product, operands, "small", variants, {"": 0.0})
        record = checks.last("gemm", call, product="small", shape=(m, *SMALL))
        print(f"M={m} {short(record)}", flush=True)


def main() -> int:
    """Run everything; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--seconds", type=float, default=70.0, help="start nothing after this long (default 70)")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    started = time.monotonic()
    # Asked through NVML: a process that has called CUDA itself cannot be forked.
    if torch.cuda.device_count() == 0:
        print("no CUDA device: this experiment times Triton's products on a GPU", file=sys.stderr)
        return 2
    found = try_all(options.seconds * 0.6)
    print(f"{len(found)} variants tried in {time.monotonic() - started:.0f} s")
    checks = Quiet(environment(options.commit), options.seconds - (time.monotonic() - started))
    right = check_variants(checks, found)
    print("lib = torch._scaled_mm; f fast, p promoted; each kind: speed over lib's, us saved with the cast counted")
    # The smallest and the largest first: they answer the question.
    for shape in (SHAPES[3], SHAPES[0], *SHAPES[1:3]):
        time_shape(checks, shape, right)
        checks.write(options.out)
    time_small(checks, right)
    time_shape(checks, SHAPES[4], right)
    checks.write(options.out)
    print(f"{len(checks.records)} records, {checks.failed} failed, {time.monotonic() - started:.0f} s; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
