"""Linear in FP8 on a CUDA device: against float32, against the CPU's emulation, compiled, checkpointed; and its time.

    python benchmarks/check_linear.py --out build/check_linear.jsonl

One JSON line a check (hardware, versions, commit). Exit status 1 if a check failed, 2 without a CUDA device.
"""

from __future__ import annotations

import argparse
import copy
import functools
import math
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
import torch.utils.checkpoint
from torch import Tensor

import octavo
from benchmarks.check_kernels import Checks, environment
from benchmarks.kernel_speed import graph_seconds
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from tests.measures import sqnr_db

SHAPE = (512, 1024, 2048)  # M, K, N
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16, initialise_from_first_batch=True),
    "delayed E4M3": DelayedScaling(format=octavo.E4M3, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "current E4M3": CurrentScaling(format=octavo.E4M3),
    "rowwise": RowwiseScaling(),
    "rowwise high-precision wgrad": RowwiseScaling(high_precision_wgrad=True),
}
SPEED_SHAPES = ((8192, 768, 3072), (8192, 1280, 5120), (4096, 4096, 4096), (16384, 4096, 14336))
Result = dict[str, Any]


def run(layer: octavo.Linear, x: Tensor, dy: Tensor, recipe: Recipe | None) -> tuple[Tensor, ...]:
    """(y, dx, dw, db) of one forward and backward."""
    x = x.detach().requires_grad_()
    with octavo.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, layer.weight, layer.bias], dy)


def check_accuracy(recipe: Recipe, dtype: torch.dtype) -> Result:
    """SQNR against float32; and how far the device is from the CPU's emulation of the same numbers.

    Codes are the same bits on both, so they differ by accumulation and output rounding alone. For zero-mean data a
    Hopper accumulator is off by sqrt(11 K / 32) * 2^-13 of the result in the root mean square (`product_bound` of
    check_kernels.py derives it), fast or not; two outputs rounded from there by eps / sqrt(3) each at most.
    """
    m, k, n = SHAPE
    torch.manual_seed(0)
    layer = octavo.Linear(k, n)
    torch.nn.init.normal_(layer.weight)
    x, dy = torch.randn(m, k), torch.randn(m, n)
    exact = run(layer, x, dy, None)
    layer, x, dy = layer.to(dtype), x.to(dtype), dy.to(dtype)
    emulated = run(copy.deepcopy(layer), x, dy, recipe)
    native = [t.float().cpu() for t in run(layer.cuda(), x.cuda(), dy.cuda(), recipe)]
    names, result = ("y", "dx", "dw", "db"), {}
    e5m2 = getattr(recipe, "format", None) is octavo.HYBRID
    limits = {"y": 28.0, "dx": 24.0 if e5m2 else 28.0, "dw": 24.0 if e5m2 else 28.0, "db": 40.0}
    ok = True
    depth = {"y": k, "dx": n, "dw": m, "db": 0}
    for name, true, on_cpu, on_gpu in zip(names, exact, emulated, native, strict=True):
        apart = ((on_gpu - on_cpu.float()).norm() / on_cpu.float().norm()).item()
        eps = torch.finfo(dtype).eps
        bound = math.sqrt(11 * depth[name] / 32) * 2.0**-13 + 2 * eps / math.sqrt(3)
        if name == "db":
            # Sums of M float32 in two orders. For zero-mean data the roundings of d additions in sequence are
            # independent, sqrt(d) of them in the root mean square: d is log2(M) in a tree; in the kernel at most 64
            # rows and then the M / 64 blocks, 72 here, and sqrt(72) is below log2(M) too. Then the output's.
            bound += 2 * math.log2(m) * 2.0**-24
        result[f"{name}_sqnr_db"] = round(sqnr_db(true, on_gpu), 2)
        result[f"{name}_cpu_gpu"], result[f"{name}_bound"] = apart, bound
        ok &= result[f"{name}_sqnr_db"] >= limits[name] and apart <= bound
    return {"ok": ok, **result}


def check_compiled(recipe: Recipe) -> Result:
    """Two layers, compiled as one graph by Inductor, against eager; ten token counts, recompiles counted."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = torch.nn.Sequential(octavo.Linear(256, 512), torch.nn.GELU(), octavo.Linear(512, 256)).cuda().bfloat16()
    twin = copy.deepcopy(eager)
    graphs = []
    compiled = torch.compile(twin, fullgraph=True, backend=_counting(graphs))
    worst = 0.0
    for step in range(10):
        x = torch.randn(64 + 24 * step, 256, device="cuda", dtype=torch.bfloat16)
        outs = []
        for model in (eager, compiled):
            xx = x.clone().requires_grad_()
            with octavo.autocast(recipe=recipe):
                y = model(xx)
            (dx,) = torch.autograd.grad(y.float().square().mean(), [xx])
            outs.append((y.float(), dx.float()))
        for a, b in zip(*outs, strict=True):
            worst = max(worst, ((a - b).norm() / a.norm()).item())
    # GELU's bf16 output is rounded once in both, but Inductor computes it in float32: one rounding, eps of bf16, and
    # what that moves across a rounding of the next cast, at most half of E4M3's step for few of the elements.
    return {
        "ok": worst <= 2 * torch.finfo(torch.bfloat16).eps and len(graphs) <= 3,
        "worst": worst,
        "graphs": len(graphs),
    }


def _counting(graphs: list[int]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return compile_fx(graph, inputs)

    return backend


def checkpoints() -> dict[str, Callable[..., Any]]:
    """Both of octavo.checkpoint's ways, and torch's that works without it."""
    return {
        "octavo": functools.partial(octavo.checkpoint, use_reentrant=False),
        "octavo, reentrant": functools.partial(octavo.checkpoint, use_reentrant=True),
        "torch": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    }


def check_checkpoint(recipe: Recipe, how: str) -> Result:
    """Three steps with and without a checkpoint: the same bits."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(octavo.Linear(256, 512), torch.nn.GELU(), octavo.Linear(512, 256)).cuda()
    kept = copy.deepcopy(plain)
    call = functools.partial(checkpoints()[how], kept)
    mismatches = 0
    for step in range(3):
        x = torch.randn(128, 256, device="cuda") * (step + 1)
        outs = []
        for model, forward in ((plain, plain), (kept, call)):
            xx = x.clone().requires_grad_()
            with octavo.autocast(recipe=recipe):
                y = forward(xx)
            y.square().sum().backward()
            outs.append((y.detach(), xx.grad, *[p.grad for p in model.parameters()]))
        mismatches += sum(not torch.equal(a, b) for a, b in zip(*outs, strict=True))
    return {"mismatches": mismatches, "ok": mismatches == 0}


def check_no_sync(recipe: Recipe) -> Result:
    """A training step asks nothing of the device."""
    model = torch.nn.Sequential(octavo.Linear(256, 512), octavo.Linear(512, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, 256, device="cuda", requires_grad=True)

    def step() -> None:
        with octavo.autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"ok": True}


def time_linear(m: int, k: int, n: int) -> Result:
    """GPU time (graph replay) and host time of forward and backward, bias off, in bf16 and in each recipe."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    measures, result = {}, {}
    names: dict[str, Recipe | None] = {"bf16": None} | {r: RECIPES[r] for r in ("delayed", "current", "rowwise")}
    layers = []  # a captured graph does not keep them
    for name, recipe in names.items():
        layer = octavo.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16, recipe=recipe)
        layers.append(layer)

        def call(layer: octavo.Linear = layer) -> None:
            torch.autograd.grad(layer(x), [x, layer.weight], dy)

        for _ in range(3):
            call()
            # Until the first update delayed scaling measures its scales, as current scaling does.
            octavo.update_scales(layer)
        # The layer alone: the update at the end of a step is not part of either time. The host's first: a layer that a
        # graph was captured of takes copies of its scales ever after.
        result[f"{name}_host_us"] = _host(call)
        measures[name] = graph_seconds(call, repeats=3)
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(10):
        for name, measure in measures.items():
            samples[name].append(measure())
    for name, seconds in samples.items():
        result[f"{name}_gpu_ms"] = round(statistics.median(seconds) * 1e3, 4)
    for name in ("delayed", "current", "rowwise"):
        result[f"{name}_speedup"] = round(result["bf16_gpu_ms"] / result[f"{name}_gpu_ms"], 3)
    return {"ok": True, **result}


def _host(call: Callable[[], None], repeats: int = 30) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return round(spent / repeats * 1e6, 1)


def main() -> int:
    """Run all checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_linear.jsonl"))
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check")
        return 2
    checks = Checks(environment(options.commit), options.seconds)
    for name, recipe in RECIPES.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            checks.run("accuracy", functools.partial(check_accuracy, recipe, dtype), recipe=name, dtype=str(dtype))
        for how in checkpoints():
            checks.run("checkpoint", functools.partial(check_checkpoint, recipe, how), recipe=name, how=how)
        checks.run("no synchronisation", functools.partial(check_no_sync, recipe), recipe=name)
    for shape in SPEED_SHAPES:
        checks.run("linear time", functools.partial(time_linear, *shape), shape=shape)
    for name, recipe in RECIPES.items():
        checks.run("compiled", functools.partial(check_compiled, recipe), recipe=name)
    checks.write(options.out)
    print(f"{len(checks.records)} checks, {checks.failed} failed; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
