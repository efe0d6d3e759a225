"""Column sums, amaxes and updates of histories against their references; a part of `check_kernels.py`."""

from __future__ import annotations

import torch
from benchmarks.comparing import Result, compare, differing
from benchmarks.kernel_inputs import DTYPES, NARROWLY_ALIGNED, SHAPES, TEN_MILLION, layouts, sources
from benchmarks.kernel_speed import Checks
from tests.formats.edge_values import random_bits
from torch import Tensor

from octavo.formats import E5M2
from octavo.kernels.amax import amax, amax_by_row_and_column, amax_reference, partial_amax
from octavo.kernels.cast_transpose import cast_transpose, cast_transpose_reference, launch
from octavo.kernels.delayed_update import delayed_update, delayed_update_reference
from octavo.scaling import COLUMN, ROW, TENSOR


def check_sums(checks: Checks, device: str) -> None:
    """Column sums: of small integers exactly, of normal data within the bound of `sum_bound`; codes as without them."""
    for dtype in (*DTYPES, torch.float64):
        for shape in (*SHAPES, *NARROWLY_ALIGNED, (4096, 200), (8192, 4104), (0, 32)):

            def sums(dtype: torch.dtype = dtype, shape: tuple[int, int] = shape) -> Result:
                mismatches, worst = 0, 0.0
                for order, x in layouts(torch.randint(-8, 9, shape, device=device).to(dtype)):
                    found = cast_transpose(x, E5M2, *sources(x, "shared"), inf_to_nan=True, column_sum=True)
                    expected = cast_transpose_reference(x, E5M2, *sources(x, "shared"), None, None, True, True)
                    mismatches += compare(found[:4], expected[:4])["mismatches"]
                    mismatches += differing(found.column_sum, x.double().sum(0).float())
                    if not x.numel() or order not in ("contiguous", "transposed"):
                        continue
                    x = x + torch.randn_like(x)
                    total = cast_transpose(x, E5M2, *sources(x, "shared"), inf_to_nan=True, column_sum=True).column_sum
                    assert total is not None
                    # float64 is rounded to float32 first.
                    x = x.float()
                    error = (total.double() - x.double().sum(0)).abs()
                    bound = sum_bound(x, order == "transposed")
                    worst = max(worst, float((error / bound.clamp(min=1e-300)).max()))
                return {"mismatches": mismatches, "worst": round(worst, 4), "ok": mismatches == 0 and worst <= 1}

            checks.run("column sums", sums, shape=list(shape), dtype=str(dtype))

    def not_finite() -> Result:
        x = torch.ones(300, 130, device=device, dtype=torch.bfloat16)
        x[7, 3], x[9, 4], x[10, 4], x[299, 129] = float("inf"), float("inf"), -float("inf"), float("nan")
        total = cast_transpose(x, E5M2, *sources(x, "shared"), inf_to_nan=True, column_sum=True).column_sum
        expected = x.float().sum(0)
        return {"mismatches": int((total.nan_to_num(-1.0) != expected.nan_to_num(-1.0)).sum())}  # type: ignore[union-attr]

    checks.run("column sums not finite", not_finite, shape=[300, 130])


def sum_bound(x: Tensor, flipped: bool) -> Tensor:
    """How far float32 sums [K] of x [M, K] may be from the exact ones.

    A sum through which every term passes at most d additions, each rounded by a factor 1 ± 2^-24, is off by at most
    d 2^-24 / (1 - d 2^-24) of the sum of magnitudes. In a block of rows, in whatever order, d is below its height, then
    there is one addition a block. Of a matrix stored by columns torch takes the sums, with d below M.
    """
    blocks = -(-x.shape[0] // launch._BLOCK[0])
    depth = x.shape[0] if flipped else min(x.shape[0], launch._BLOCK_LARGE[0] + blocks)
    unit = depth * 2.0**-24
    return x.double().abs().sum(0) * unit / (1 - unit)


def check_amaxes(checks: Checks, device: str) -> None:
    """Every entry of the room `amax`, in every shape and memory order, of every dtype."""
    for dtype in DTYPES:

        def amaxes(dtype: torch.dtype = dtype) -> Result:
            mismatches = 0
            for shape in (*SHAPES, *NARROWLY_ALIGNED, (64, 17), (3, 200_000), (200_000, 3), (0, 32), (32, 0)):
                values = random_bits(shape, dtype, device)
                for x in (values, values.double()) if dtype == torch.float32 else (values,):
                    mismatches += sum(amax_mismatches(view) for _, view in layouts(x))
            for value in (float("nan"), float("inf"), -0.0):
                x = torch.full((300, 130), value, dtype=dtype, device=device)
                mismatches += amax_mismatches(x)
                # Some rows and columns of nothing else, and others of the smallest magnitude, which is subnormal.
                x[3::5] = random_bits((60, 130), dtype, device)
                x[:, ::7] = value
                x[4::5, 1::7] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                mismatches += amax_mismatches(x) + amax_mismatches(x[:, :129]) + amax_mismatches(x[:, 2:])
            return {"mismatches": mismatches}

        checks.run("amax shapes", amaxes, dtype=str(dtype))
        x = random_bits(TEN_MILLION, dtype, device)
        checks.run(
            "amax 10 million", lambda x=x: {"mismatches": amax_mismatches(x)}, shape=list(x.shape), dtype=str(dtype)
        )


def amax_mismatches(x: Tensor) -> int:
    """Of the whole and its parts, by row, by column, and both in one read."""
    whole, by_row, by_column = (amax_reference(x, granularity) for granularity in (TENSOR, ROW, COLUMN))
    found = [amax(x), partial_amax(x).amax(), amax(x, ROW), amax(x, COLUMN), *amax_by_row_and_column(x)]
    return int(compare(found, (whole, whole, by_row, by_column, by_row, by_column))["mismatches"])


def check_updates(checks: Checks, device: str) -> None:
    """delayed_update of many operands: windows of several lengths, newest amaxes of every kind, NaN in the past."""
    for length in (1, 2, 16, 1000, 1024, 16384):

        def updates(length: int = length) -> Result:
            history = torch.rand(200, length, device=device) * 10
            history[5, length // 2], history[6, -1] = float("nan"), float("inf")
            scale, last = torch.rand(200, device=device) + 0.1, torch.rand(200, device=device) * 10
            last[:4] = torch.tensor([0.0, float("inf"), float("nan"), 1e-40], device=device)
            mismatches = 0
            for algorithm in ("max", "most_recent"):
                for margin, maxima, first in (
                    (0, (448.0, 448.0), 200),
                    (3, (57344.0, 448.0), 3),
                    (0, (448.0, 57344.0), 0),
                ):
                    arguments = (history, scale, last, maxima, first, margin, algorithm)
                    found, expected = delayed_update(*arguments), delayed_update_reference(*arguments)
                    mismatches += sum(differing(a.contiguous(), b) for a, b in zip(found, expected, strict=True))
            return {"mismatches": mismatches}

        checks.run("delayed update", updates, length=length)
