"""The gradients of a normalisation on a GPU against their reference; a part of `check_layers.py`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from benchmarks.kernel_speed import Checks
from tests.kernels.test_norm_backward import assert_close, finite_rows

from octavo.kernels.norm_backward import norm_backward, norm_backward_reference
from octavo.kernels.norm_cast import Norm
from octavo.kernels.norm_cast.reference import statistics

BF16 = torch.bfloat16
Result = dict[str, Any]


def exact_gradients(device: str, kind: str, dtype: torch.dtype) -> Result:
    """Small whole numbers and powers of two: every sum is exact in any order, so all bits are the reference's.

    Of K = 1024 columns and 300 rows: sums below 2^17, means in multiples of 2^-10, their products below 2^11.
    """
    torch.manual_seed(0)
    rows, columns = 300, 1024
    x = torch.randint(-8, 9, (rows, columns), device=device).to(dtype)
    dy = torch.randint(-4, 5, (rows, columns), device=device).to(dtype)
    weight = torch.randint(1, 4, (columns,), device=device).to(dtype)
    rstd = torch.exp2(torch.randint(-1, 2, (rows,), device=device).float())
    mean = torch.zeros(rows, device=device) if kind == "layer" else None
    found = norm_backward(dy, x, Norm(kind), weight, mean, rstd)
    expected = norm_backward_reference(dy, x, Norm(kind), weight, mean, rstd, (True, True, True))
    mismatches = [int((a != b).sum()) for a, b in zip(found, expected, strict=True)]  # type: ignore[union-attr]
    return {"ok": not any(mismatches), "mismatches": sum(mismatches)}


def bounded_gradients(device: str, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Result:
    """Within the bounds of the tests, and the same again; how many elements of dx are the reference's neighbours."""
    torch.manual_seed(0)
    x, dy = finite_rows(shape, dtype, device), torch.randn(shape, device=device).to(dtype)
    weight, norm = torch.rand(shape[1], device=device) + 0.5, Norm(kind)
    given = statistics(x, norm)
    found = norm_backward(dy, x, norm, weight, *given)
    assert_close(found, dy, x, norm, weight)
    again = norm_backward(dy, x, norm, weight, *given)
    expected = norm_backward_reference(dy, x, norm, weight, *given, (True, True, True))
    pairs = zip(found, again, strict=True)
    other = float((found[0] != expected[0]).float().mean())  # type: ignore[union-attr]
    return {"ok": all(torch.equal(a, b) for a, b in pairs), "dx_other_than_reference": other}  # type: ignore[arg-type]


def check_norm_backward(checks: Checks, device: str) -> None:
    """Both kinds and dtypes; narrow rows and wide ones, odd ones, one row, more rows than programs."""
    for kind in ("layer", "rms"):
        for dtype in (BF16, torch.float32):
            checks.run(
                "norm_backward exact",
                functools.partial(exact_gradients, device, kind, dtype),
                kind=kind,
                dtype=str(dtype),
            )
        for number, shape in enumerate(((1, 37), (17, 31), (5000, 1280), (4500, 4096), (300, 8192), (130, 9001))):
            dtype = (BF16, torch.float32)[number % 2]
            call = functools.partial(bounded_gradients, device, kind, shape, dtype)
            checks.run("norm_backward", call, kind=kind, shape=list(shape), dtype=str(dtype))
