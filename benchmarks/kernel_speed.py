"""Speed of the kernels against copy, for `check_kernels.py`: CUDA-graph replays, taking turns, medians."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels.amax import amax, amax_by_row_and_column, partial_amax
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose
from octavo.kernels.cast_transpose import launch as cast_kernels
from octavo.kernels.launcher import Launcher, Prepared
from octavo.scaling import COLUMN, ROW

SHAPE = (16384, 8192)
RULE = ScaleRule()
Result = dict[str, Any]
# A call and the bytes it must move.
Case = tuple[Callable[[], Any], float]


class Checks(Protocol):
    """What runs and records a check."""

    def run(self, name: str, check: Callable[[], Result], **about: Any) -> None:
        """One check and what it is about."""


def graph_seconds(call: Callable[[], Any], repeats: int = 10) -> Callable[[], float]:
    """A function that replays a CUDA graph of `repeats` calls and returns the seconds of one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()

    def measure() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats

    return measure


def interleaved(cases: dict[str, Case], rounds: int = 12) -> dict[str, float]:
    """Median TB/s of each case, the cases taking turns."""
    measures = {name: graph_seconds(call) for name, (call, _) in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: cases[name][1] / statistics.median(samples[name][2:]) / 1e12 for name in cases}


def time_kernels(checks: Checks, device: str) -> None:
    """Speed on normal data, in TB/s of the bytes that must move and as a part of copy's."""
    x = torch.randn(SHAPE, device=device).to(torch.bfloat16)
    n, target = x.numel(), torch.empty_like(x)
    cases: dict[str, Case] = {"copy": (lambda: target.copy_(x), 4 * n), "copy again": (lambda: target.copy_(x), 4 * n)}
    cases |= cast_cases(x) | recipe_cases(x) | amax_cases(x)
    for name, case in cases.items():

        def timed(name: str = name, case: Case = case) -> Result:
            measured = interleaved({"copy": cases["copy"], name: case})
            return {"tb_per_s": round(measured[name], 3), "of_copy": round(measured[name] / measured["copy"], 3)}

        checks.run("speed", timed, shape=list(SHAPE), kernel=name)


def recipe_cases(x: Tensor) -> dict[str, Case]:
    """One operand as each recipe casts it, all its passes; bytes of bf16 read once or twice and of both layouts."""
    scale, gathered, n = torch.tensor(0.6, device=x.device), torch.zeros((), device=x.device), x.numel()

    def delayed() -> None:
        cast_transpose(x, E4M3, scale, scale, gathered=gathered)

    def delayed_gradient() -> None:
        cast_transpose(x, E5M2, scale, scale, gathered=gathered, inf_to_nan=True, column_sum=True)

    def current() -> None:
        partial = partial_amax(x)
        cast_transpose(x, E4M3, partial, partial, rule=RULE)

    def current_gradient() -> None:
        partial = partial_amax(x)
        cast_transpose(x, E5M2, partial, partial, rule=RULE, inf_to_nan=True, column_sum=True)

    def row_wise() -> None:
        by_row, by_column = amax_by_row_and_column(x)
        cast_transpose(x, E4M3, by_row, by_column, rule=RULE)

    return {
        "delayed": (delayed, 4 * n),
        "delayed gradient with sums": (delayed_gradient, 4 * n),
        "current": (current, 6 * n),
        "current gradient with sums": (current_gradient, 6 * n),
        "row-wise": (row_wise, 6 * n),
    }


def cast_cases(x: Tensor) -> dict[str, Case]:
    """cast_transpose alone, scales given."""
    x32, flipped, n = x.float(), x.t().contiguous().t(), x.numel()
    # `odd` is x without its first row and last 8 columns; `misaligned` starts 2 bytes after a multiple of 16.
    odd, misaligned = x[1:, :-8], x[:, 1:]
    scale, other = torch.tensor(0.6, device=x.device), torch.tensor(3.7, device=x.device)
    by_row, by_column = (torch.rand(size, device=x.device) + 0.5 for size in ((x.shape[0], 1), (1, x.shape[1])))
    return {
        "cast_transpose": (lambda: cast_transpose(x, E4M3, scale, scale), 4 * n),
        "cast_transpose sums": (lambda: cast_transpose(x, E5M2, scale, scale, column_sum=True), 4 * n),
        "cast_transpose two scales": (lambda: cast_transpose(x, E4M3, scale, other), 4 * n),
        "cast_transpose by row": (lambda: cast_transpose(x, E4M3, by_row, by_column), 4 * n),
        "cast_transpose flipped": (lambda: cast_transpose(flipped, E4M3, scale, scale), 4 * n),
        "cast_transpose odd": (lambda: cast_transpose(odd, E4M3, scale, scale), 4 * odd.numel()),
        "cast_transpose misaligned": (lambda: cast_transpose(misaligned, E4M3, scale, scale), 4 * misaligned.numel()),
        "cast_transpose fp32": (lambda: cast_transpose(x32, E4M3, scale, scale), 6 * n),
        "cast codes only": (lambda: cast_transpose(x, E4M3, scale, None), 3 * n),
        "cast transposed only": (lambda: cast_transpose(x, E4M3, None, scale), 3 * n),
    }


def amax_cases(x: Tensor) -> dict[str, Case]:
    """The passes that only measure."""
    n = x.numel()
    return {
        "partial_amax": (lambda: partial_amax(x), 2 * n),
        "amax": (lambda: amax(x), 2 * n),
        "amax row": (lambda: amax(x, ROW), 2 * n),
        "amax column": (lambda: amax(x, COLUMN), 2 * n),
        "amax_by_row_and_column": (lambda: amax_by_row_and_column(x), 2 * n),
    }


def time_host(checks: Checks, device: str) -> None:
    """Host time of a call on a small matrix, in microseconds."""
    x = torch.randn(256, 1024, device=device, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {name: call for name, (call, _) in (recipe_cases(x) | amax_cases(x)).items()}
    scale = torch.tensor(0.6, device=device)
    calls["cast_transpose"] = lambda: cast_transpose(x, E4M3, scale, scale)
    calls["torch.empty"] = lambda: torch.empty((256, 1024), dtype=torch.float8_e4m3fn, device=device)
    for name, call in calls.items():

        def timed(call: Callable[[], Any] = call) -> Result:
            samples = []
            for _ in range(20):
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(50):
                    call()
                samples.append((time.perf_counter() - started) / 50)
            return {"host_us": round(statistics.median(samples) * 1e6, 1)}

        checks.run("host time", timed, shape=[256, 1024], kernel=name)


def sweep(checks: Checks, device: str) -> None:
    """The kernels with other constants than their own."""
    x = torch.randn(SHAPE, device=device).to(torch.bfloat16)
    target, n = torch.empty_like(x), x.numel()
    copy: Case = (lambda: target.copy_(x), 4 * n)
    recipes, parts = recipe_cases(x), amax_cases(x)
    small = torch.randn(1024, 4096, device=device).to(torch.bfloat16)
    small_recipes = recipe_cases(small)
    for rows, columns, warps in (
        (32, 64, 2), (32, 64, 4), (64, 32, 4), (64, 64, 2), (64, 64, 4), (64, 64, 8), (64, 128, 4), (64, 128, 8),
        (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 4), (128, 128, 8), (256, 32, 4), (256, 64, 8),
    ):  # fmt: skip
        block = (rows, columns)
        cast_values = {"_BLOCK": block, "_BLOCK_LARGE": block, "_BLOCK_OF_VECTORS": block, "WARPS": warps}
        cases = {"copy": copy, "cast": recipes["delayed"], "gradient": recipes["delayed gradient with sums"]}
        cases |= {"row-wise": recipes["row-wise"], "small": small_recipes["delayed"]}
        checks.run("sweep", with_constants(cast_kernels, cast_values, cases), kernel="cast_transpose", **cast_values)
    for block, most, warps in (
        (4096, 256, 4), (4096, 512, 4), (8192, 128, 8), (8192, 256, 4), (8192, 256, 8), (8192, 512, 8),
        (8192, 1024, 4), (8192, 1024, 8), (16384, 128, 8), (16384, 256, 8), (16384, 256, 16), (16384, 512, 8),
    ):  # fmt: skip
        amax_values = {"_BLOCK": block, "_MOST_PARTIALS": most, "WARPS": warps}
        cases = {"copy": copy, "partial_amax": parts["partial_amax"], "current": recipes["current"]}
        checks.run("sweep", with_constants(amax_kernels, amax_values, cases), kernel="partial_amax", **amax_values)
    for rows, columns, blocks, warps in (
        (32, 128, 8, 4), (32, 256, 4, 8), (32, 256, 8, 8), (32, 256, 16, 8), (32, 256, 32, 8), (32, 256, 16, 4),
        (64, 128, 8, 8), (64, 256, 8, 8), (16, 512, 16, 8), (128, 128, 1, 8), (128, 128, 4, 8),
    ):  # fmt: skip
        block_values = {"_BLOCK_ROWS": rows, "_BLOCK_COLUMNS": columns, "_BLOCKS": blocks, "_BLOCKS_LARGE": blocks}
        block_values["_WARPS_BY_ROW_AND_COLUMN"] = warps
        cases = {"copy": copy, "both": parts["amax_by_row_and_column"], "row-wise": recipes["row-wise"]}
        cases["small"] = small_recipes["row-wise"]
        name = "amax_by_row_and_column"
        checks.run("sweep", with_constants(amax_kernels, block_values, cases), kernel=name, **block_values)


def with_constants(module: ModuleType, values: dict[str, Any], cases: dict[str, Case]) -> Callable[[], Result]:
    """A check that measures `cases` while constants of a kernel's module have other values."""

    def timed() -> Result:
        before = {name: getattr(module, name) for name in values}
        try:
            for name, value in values.items():
                setattr(module, name, value)
            # Not all constants are in the launchers' keys: what was compiled with others must go.
            forget_variants(module)
            measured = interleaved(cases)
        finally:
            for name, value in before.items():
                setattr(module, name, value)
            forget_variants(module)
        rates: Result = {name: round(rate, 3) for name, rate in measured.items()}
        return rates | {f"{name}_of_copy": round(rate / measured["copy"], 3) for name, rate in measured.items()}

    return timed


def forget_variants(module: ModuleType) -> None:
    """Compiled variants that a module's launchers hold, and what its package has prepared."""
    package = sys.modules[str(module.__package__)]
    for value in (*vars(module).values(), *vars(package).values()):
        if isinstance(value, Launcher):
            value._variants.clear()
        elif isinstance(value, Prepared):
            value.clear()
