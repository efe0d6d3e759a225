"""GroupedLinear on a CUDA device: its kernels, against one Linear an expert, against the emulation; and its time.

    python benchmarks/check_grouped.py --out build/check_grouped.jsonl

One JSON line a check (hardware, versions, commit). Exit status 1 if a check failed, 2 without a CUDA device. Times are
of 8 experts, 32768 tokens, 2048 -> 7168, forward and backward, as CUDA-graph replays that take turns, against bf16
through `torch._grouped_mm`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
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

import octavo
from benchmarks.check_kernels import Checks, environment
from benchmarks.comparing import differing
from benchmarks.kernel_speed import graph_seconds
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.grouped_cast import column_amax_reference, grouped_cast_reference, groups_of
from octavo.recipes import Accumulate, BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

BF16 = torch.bfloat16
K, N = 1024, 2048
# Odd sizes, and an empty group in the middle and at the end.
SPLITS = [200, 0, 7, 305, 0]
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "current E4M3": CurrentScaling(format=octavo.E4M3),
    "delayed E4M3": DelayedScaling(format=octavo.E4M3, initialise_from_first_batch=True),
    "rowwise": RowwiseScaling(),
    "rowwise, high precision wgrad": RowwiseScaling(high_precision_wgrad=True),
    "block": BlockScaling(),
}
# By block there is no grouped product. E5M2, and outputs other than bf16, are multiplied in Triton.
ON_DEVICE = [name for name in RECIPES if name != "block"]
# Tokens, in, out, experts of the times.
SPEED = (32768, 2048, 7168, 8)
# Also timed: what precise sums cost.
FAST = {"delayed, fast sums": DelayedScaling(accumulate=Accumulate(dgrad="fast", wgrad="fast"))}
Result = dict[str, Any]


def check_kernels(format: Format, columns: int) -> Result:
    """The Triton kernels against their references, bit for bit."""
    mismatches = 0
    for sizes in (SPLITS, [0, 0, 1], [3000, 17, 0, 4096]):
        rows, splits = sum(sizes), torch.tensor(sizes, device="cuda")
        x, groups = torch.randn(rows, columns, device="cuda").to(BF16), groups_of(splits, rows)
        by_row = torch.exp2(torch.randn(rows, 1, device="cuda"))
        for by_column in (torch.rand(len(sizes), columns, device="cuda") + 0.5, torch.rand(len(sizes), 1).cuda() + 0.5):
            found = octavo.kernels.grouped_cast.grouped_cast(x, groups, format, by_row, by_column)
            expected = grouped_cast_reference(x, groups, format, by_row, by_column)
            mismatches += sum(differing(a, b) for a, b in zip(found, expected, strict=True))
        found_amax = octavo.kernels.grouped_cast.column_amax(x, groups)
        mismatches += differing(found_amax, column_amax_reference(x, groups))
    return {"ok": mismatches == 0, "mismatches": mismatches}


def made(dtype: torch.dtype, bias: bool = True) -> tuple[octavo.GroupedLinear, Tensor, Tensor]:
    """(layer, x, dy) on the CPU."""
    torch.manual_seed(0)
    layer = octavo.GroupedLinear(len(SPLITS), K, N, bias, dtype=dtype)
    with torch.no_grad():
        for weight in layer.weights:
            weight.normal_()
    return layer, torch.randn(sum(SPLITS), K).to(dtype), torch.randn(sum(SPLITS), N).to(dtype)


def run(layer: octavo.GroupedLinear, x: Tensor, dy: Tensor, recipe: Recipe, sizes: Any) -> list[Tensor]:
    """[y, dx, gradients of the parameters]."""
    x = x.detach().requires_grad_()
    with octavo.autocast(recipe=recipe):
        y = layer(x, sizes)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]


def check_against_linears(recipe: Recipe, dtype: torch.dtype) -> Result:
    """Sizes in a list: to the bit one octavo.Linear an expert."""
    layer, x, dy = made(dtype)
    layer, x, dy = layer.cuda(), x.cuda(), dy.cuda()
    linears = torch.nn.ModuleList()
    for weight, bias in zip(layer.weights, layer.biases, strict=True):
        linear = octavo.Linear(K, N, device="cuda", dtype=dtype)
        linear.weight.data.copy_(weight)
        linear.bias.data.copy_(bias)
        linears.append(linear)
    mismatches = 0
    for _ in range(2):
        found = run(layer, x, dy, recipe, SPLITS)
        xx = x.clone().requires_grad_()
        with octavo.autocast(recipe=recipe):
            y = torch.cat([one(part) for one, part in zip(linears, xx.split(SPLITS), strict=True)])
        # In the order of `layer.parameters()`.
        parameters = [p for one in linears for p in (one.weight, one.bias)]
        expected = [y.detach(), *torch.autograd.grad(y, [xx, *parameters], dy)]
        mismatches += sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return {"ok": mismatches == 0, "mismatches": mismatches}


def check_against_emulation(recipe: Recipe, on_device: bool) -> Result:
    """The device against the CPU's emulation of the same numbers, in bf16.

    Codes are the same bits on both, so they differ by accumulation and output rounding alone. For zero-mean data a
    Hopper accumulator is off by sqrt(11 d / 32) * 2^-13 of the result in the root mean square, d the depth of the sum
    (`product_bound` of check_products.py derives it); outputs are rounded from there by eps / sqrt(3) each at most,
    a grouped product with a bias twice.
    """
    layer, x, dy = made(BF16)
    emulated = run(copy.deepcopy(layer), x, dy, recipe, SPLITS)
    sizes = torch.tensor(SPLITS, device="cuda") if on_device else SPLITS
    native = [t.float().cpu() for t in run(layer.cuda(), x.cuda(), dy.cuda(), recipe, sizes)]
    names = ["y", "dx"] + [f"{kind}{e}" for e in range(len(SPLITS)) for kind in ("dw", "db")]
    eps, worst, ok = torch.finfo(BF16).eps, {"y": 0.0, "dx": 0.0, "dw": 0.0, "db": 0.0}, True
    for name, one, other in zip(names, emulated, native, strict=True):
        kind = name[:2] if name != "y" else "y"
        depth = {"y": K, "dx": N, "dw": max(SPLITS), "db": 0}[kind]
        norm = one.float().norm().item()
        apart = (other - one.float()).norm().item() / norm if norm else float(other.norm())
        bound = math.sqrt(11 * depth / 32) * 2.0**-13 + 3 * eps / math.sqrt(3)
        worst[kind] = max(worst[kind], apart)
        ok &= math.isfinite(apart) and apart <= bound
    return {"ok": ok, **{f"{kind}_apart": value for kind, value in worst.items()}}


def check_no_wait(recipe: Recipe | None) -> Result:
    """A training step with sizes on the device asks nothing of it."""
    layer = octavo.GroupedLinear(len(SPLITS), K, N, device="cuda", dtype=BF16)
    x = torch.randn(sum(SPLITS), K, device="cuda", dtype=BF16, requires_grad=True)
    # Until an expert has had a token, a recipe that measures the first batch waits for one.
    even, sizes = (torch.tensor(values, device="cuda") for values in ([100, 100, 100, 100, 112], SPLITS))

    def step(sizes: Tensor) -> None:
        with octavo.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, sizes)
        y.sum().backward()

    for _ in range(3):
        step(even)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(sizes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def check_high_precision() -> Result:
    """bf16 through torch._grouped_mm against one nn.Linear an expert: rounding apart, twice with a bias."""
    layer, x, dy = made(BF16)
    layer, x, dy = layer.cuda(), x.cuda(), dy.cuda()
    outs = []
    for sizes in (SPLITS, torch.tensor(SPLITS, device="cuda")):
        xx = x.clone().requires_grad_()
        y = layer(xx, sizes)
        outs.append([y.detach(), *torch.autograd.grad(y, [xx, *layer.parameters()], dy)])
    worst = 0.0
    for one, other in zip(*outs, strict=True):
        norm = one.float().norm().item()
        worst = max(worst, (one.float() - other.float()).norm().item() / norm if norm else float(other.float().norm()))
    return {"ok": worst <= 3 * torch.finfo(BF16).eps / math.sqrt(3), "worst": worst}


def bf16_call(x: Tensor, dy: Tensor, weights: list[Tensor], ends: Tensor) -> Callable[[], Any]:
    """Forward and backward of torch._grouped_mm on weights that lie in one tensor already."""
    w = torch.stack(weights).requires_grad_()
    return lambda: torch.autograd.grad(torch._grouped_mm(x, w.transpose(-2, -1), offs=ends), [x, w], dy)


def time_grouped(uneven: bool) -> Result:
    """GPU time of forward and backward, bias off; ms, and speed against bf16."""
    tokens, num_in, num_out, experts = SPEED
    sizes = [tokens // experts] * experts
    if uneven:
        # From a quarter of the mean to twice it, none a multiple of 16.
        sizes = [1021, 2043, 3067, 3579, 4603, 5127, 5631]
        sizes.append(tokens - sum(sizes))
    x = torch.randn(tokens, num_in, device="cuda", dtype=BF16, requires_grad=True)
    dy = torch.randn(tokens, num_out, device="cuda", dtype=BF16)
    on_device = torch.tensor(sizes, device="cuda", dtype=torch.int32)
    layer = octavo.GroupedLinear(experts, num_in, num_out, False, device="cuda", dtype=BF16)
    layers = []
    calls = {"bf16": bf16_call(x, dy, [w.detach() for w in layer.weights], on_device.cumsum(0).to(torch.int32))}
    names = ("delayed", "current", "rowwise", "block", *FAST)
    for name in (*names, "rowwise, on device", "delayed E4M3, on device", "delayed, on device"):
        given = on_device if name.endswith("on device") else sizes
        one = copy.deepcopy(layer)
        one.recipe = (RECIPES | FAST)[name.removesuffix(", on device")]
        layers.append(one)  # a captured graph does not keep them

        def call(one: octavo.GroupedLinear = one, given: Any = given) -> None:
            torch.autograd.grad(one(x, given), [x, *one.parameters()], dy)

        for _ in range(3):
            call()
            # Until the first update delayed scaling measures its scales, as current scaling does.
            octavo.update_scales(one)
        calls[name] = call
    calls["bf16 again"] = calls["bf16"]
    measures = {name: graph_seconds(call, repeats=2) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(12):
        for name, measure in measures.items():
            samples[name].append(measure())
    seconds = {name: statistics.median(values[2:]) for name, values in samples.items()}
    result: Result = {f"{name} ms": round(value * 1e3, 3) for name, value in seconds.items()}
    result |= {f"{name} speed": round(seconds["bf16"] / value, 3) for name, value in seconds.items() if name != "bf16"}
    return {"ok": True, **result}


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_grouped.jsonl"))
    parser.add_argument("--seconds", type=float, default=120, help="start no check after this long (default 120)")
    parser.add_argument("--only", choices=("checks", "times"), help="default: both")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check")
        return 2
    checks = Checks(environment(options.commit), options.seconds)
    if options.only != "times":
        for format in (E4M3, E5M2):
            for columns in (144, 2048, 77):
                checks.run(
                    "grouped cast",
                    functools.partial(check_kernels, format, columns),
                    format=format.name,
                    columns=columns,
                )
        for name, recipe in RECIPES.items():
            for dtype in (BF16, torch.float32):
                checks.run(
                    "linears", functools.partial(check_against_linears, recipe, dtype), recipe=name, dtype=str(dtype)
                )
            checks.run("emulation", functools.partial(check_against_emulation, recipe, False), recipe=name)
        for name in ON_DEVICE:
            checks.run(
                "emulation", functools.partial(check_against_emulation, RECIPES[name], True), recipe=name, on="device"
            )
            checks.run("no wait", functools.partial(check_no_wait, RECIPES[name]), recipe=name)
        checks.run("high precision", check_high_precision)
        checks.run("no wait", functools.partial(check_no_wait, None), recipe="none")
    if options.only != "checks":
        for uneven in (False, True):
            checks.run("grouped time", functools.partial(time_grouped, uneven), shape=SPEED, uneven=uneven)
    checks.write(options.out)
    print(f"{len(checks.records)} checks, {checks.failed} failed; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
