"""Speed of the kernels against copy, for `check_kernels.py`: CUDA-graph replays, taking turns, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from octavo.formats import E4M3, E5M2
from octavo.kernels.amax import amax
from octavo.kernels.cast_transpose import cast_transpose, triton_kernel
from octavo.kernels.scale_from_amax import scale_from_amax
from octavo.scaling import COLUMN, ROW

SHAPE = (16384, 8192)
Result = dict[str, Any]


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


def interleaved(cases: dict[str, tuple[Callable[[], Any], float]], rounds: int = 12) -> dict[str, float]:
    """Median TB/s of each case (a call and the bytes it must move), the cases taking turns."""
    measures = {name: graph_seconds(call) for name, (call, _) in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, measure in measures.items():
            samples[name].append(measure())
    return {name: cases[name][1] / statistics.median(samples[name][2:]) / 1e12 for name in cases}


def time_kernels(checks: Checks, device: str) -> None:
    """Speed on normal data, in TB/s of the bytes that must move and as a part of copy's."""
    x = torch.randn(SHAPE, device=device).to(torch.bfloat16)
    x32, flipped, target = x.float(), x.t().contiguous().t(), torch.empty_like(x)
    scalar, n = torch.tensor(1.7, device=device), x.numel()
    by_row, by_column = (torch.rand(shape, device=device) + 0.5 for shape in ((SHAPE[0], 1), (1, SHAPE[1])))
    cases: dict[str, tuple[Callable[[], Any], float]] = {
        "copy": (lambda: target.copy_(x), 4 * n),
        "copy again": (lambda: target.copy_(x), 4 * n),
        "cast_transpose bf16": (lambda: cast_transpose(x, E4M3, scalar, scalar), 4 * n),
        "cast_transpose bf16 gradient": (lambda: cast_transpose(x, E5M2, scalar, scalar, inf_to_nan=True), 4 * n),
        "cast_transpose bf16 by row": (lambda: cast_transpose(x, E4M3, by_row, by_column), 4 * n),
        "cast_transpose bf16 flipped": (lambda: cast_transpose(flipped, E4M3, scalar, scalar), 4 * n),
        "cast_transpose bf16 odd": (lambda: cast_transpose(x[1:, :-8], E4M3, scalar, scalar), 4 * n),
        "cast_transpose fp32": (lambda: cast_transpose(x32, E4M3, scalar, scalar), 6 * n),
        "cast bf16 codes only": (lambda: cast_transpose(x, E4M3, scalar, None), 3 * n),
        "cast bf16 transposed only": (lambda: cast_transpose(x, E4M3, None, scalar), 3 * n),
        "amax tensor": (lambda: amax(x), 2 * n),
        "amax row": (lambda: amax(x, ROW), 2 * n),
        "amax column": (lambda: amax(x, COLUMN), 2 * n),
    }
    results: dict[str, float] = {}
    for name, case in cases.items():

        def timed(name: str = name, case: Any = case) -> Result:
            pair = {"copy": cases["copy"], name: case}
            measured = interleaved(pair)
            results[name] = measured[name]
            return {"tb_per_s": round(measured[name], 3), "of_copy": round(measured[name] / measured["copy"], 3)}

        checks.run("speed", timed, shape=list(SHAPE), kernel=name)


def time_host(checks: Checks, device: str) -> None:
    """Host time of a call on a small matrix, in microseconds."""
    x = torch.randn(256, 1024, device=device, dtype=torch.bfloat16)
    scalar = torch.tensor(1.7, device=device)
    largest = amax(x)
    calls: dict[str, Callable[[], Any]] = {
        "cast_transpose": lambda: cast_transpose(x, E4M3, scalar, scalar),
        "amax": lambda: amax(x),
        "scale_from_amax": lambda: scale_from_amax(largest, E4M3),
        "torch.empty": lambda: torch.empty((256, 1024), dtype=torch.float8_e4m3fn, device=device),
    }
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
    """cast_transpose with other blocks than its own."""
    x = torch.randn(SHAPE, device=device).to(torch.bfloat16)
    scalar, target = torch.tensor(1.7, device=device), torch.empty_like(x)
    for rows, columns, warps in (
        (64, 64, 2), (64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 64, 8), (64, 128, 8), (128, 128, 4), (128, 128, 8),
        (128, 128, 16), (256, 64, 8), (64, 256, 8), (32, 256, 4), (256, 128, 8), (32, 128, 4),
    ):  # fmt: skip

        def timed(rows: int = rows, columns: int = columns, warps: int = warps) -> Result:
            names = ("_BLOCK_ROWS", "_BLOCK_COLUMNS", "_WARPS")
            before = {name: getattr(triton_kernel, name) for name in names}
            try:
                for name, value in zip(names, (rows, columns, warps), strict=True):
                    setattr(triton_kernel, name, value)
                n = x.numel()
                cases: dict[str, tuple[Callable[[], Any], float]] = {
                    "copy": (lambda: target.copy_(x), 4 * n),
                    "cast": (lambda: cast_transpose(x, E4M3, scalar, scalar), 4 * n),
                }
                measured = interleaved(cases)
            finally:
                for name, value in before.items():
                    setattr(triton_kernel, name, value)
            return {"tb_per_s": round(measured["cast"], 3), "of_copy": round(measured["cast"] / measured["copy"], 3)}

        checks.run("sweep", timed, block=[rows, columns], warps=warps)
