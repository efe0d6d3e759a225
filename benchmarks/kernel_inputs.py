"""Matrices, and what to scale them by, for `check_kernels.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tests.formats.edge_values import random_bits
from torch import Tensor

from octavo.kernels.amax import amax_reference
from octavo.kernels.cast_transpose import ScaleRule
from octavo.scaling import COLUMN, ROW, TENSOR

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = ((1, 1), (1, 333), (257, 1), (7, 13), (16, 16), (128, 128), (200, 130), (8192, 48), (24, 9000), (1024, 1000))
# Rows whose common alignment is 8, 4 and 2 elements; in words of two elements 4, 2 and 1.
NARROWLY_ALIGNED = ((1, 334), (520, 1272), (520, 1276), (521, 1278), (8200, 2044))
TEN_MILLION = (3163, 3163)
RULES = (ScaleRule(), ScaleRule(power_of_two=True), ScaleRule((1e-3).hex()), ScaleRule((1e-3).hex(), True))
SCALE_KINDS = (
    "shared", "two scalars", "codes only", "transposed only", "row and column", "row and scalar", "scalar and column",
    "nothing",
)  # fmt: skip
AMAX_KINDS = (
    "one amax", "one partial amax", "256 partial amaxes", "37 partial amaxes", "partial amaxes, transposed only",
    "amax by row and column", "amax by row and partial", "partial and amax by column",
)  # fmt: skip


def layouts(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in memory orders that callers have."""
    rows, columns = x.shape
    yield "contiguous", x
    yield "transposed", x.t().contiguous().t()
    wide = x.new_zeros(rows, 2 * columns)
    wide[:, ::2] = x
    yield "strided", wide[:, ::2]
    wide_t = x.new_zeros(2 * columns, rows)
    wide_t[::2] = x.t()
    yield "strided and transposed", wide_t[::2].t()
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    yield "offset", flat[1:].view(rows, columns)
    # An address and a stride that are aligned where the columns may not be.
    yield "padded", torch.cat([x, x.new_ones(rows, 32 - columns % 16)], dim=1)[:, :columns]
    wider = x.new_zeros(rows, columns + 1)
    wider[:, 1:] = x
    yield "without the first column", wider[:, 1:]


def sources(x: Tensor, kind: str) -> tuple[Tensor | None, Tensor | None]:
    """(rowwise, columnwise) of a kind: scales that are no powers of two, or the amaxes of x."""
    if kind in SCALE_KINDS:
        scalar, other = torch.tensor(0.6, device=x.device), torch.tensor(3.7, device=x.device)
        by_row = torch.rand(x.shape[0], 1, device=x.device) * 3 + 0.1
        by_column = torch.rand(1, x.shape[1], device=x.device) * 3 + 0.1
        return {
            "shared": (scalar, scalar),
            "two scalars": (scalar, other),
            "codes only": (scalar, None),
            "transposed only": (None, scalar),
            "row and column": (by_row, by_column),
            "row and scalar": (by_row, scalar),
            "scalar and column": (scalar, by_column),
            "nothing": (None, None),
        }[kind]
    whole = amax_reference(x, TENSOR)
    # The largest stands last, where a kernel that reads too few would miss it.
    many, few = (torch.cat([torch.zeros(n - 1, device=x.device), whole.reshape(1)]) for n in (256, 37))
    by_row, by_column = amax_reference(x, ROW), amax_reference(x, COLUMN)
    return {
        "one amax": (whole, whole),
        "one partial amax": (whole.reshape(1), whole.reshape(1)),
        "256 partial amaxes": (many, many),
        "37 partial amaxes": (few, few),
        "partial amaxes, transposed only": (None, many),
        "amax by row and column": (by_row, by_column),
        "amax by row and partial": (by_row, many),
        "partial and amax by column": (few, by_column),
    }[kind]


def distributions(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Tensor]]:
    """Ten million values of each kind."""
    yield "normal", torch.randn(TEN_MILLION, device=device).to(dtype)
    yield (
        "wide",
        (torch.randn(TEN_MILLION, device=device) * torch.randn(TEN_MILLION, device=device).mul(4).exp()).to(dtype),
    )
    yield "uniform", (torch.rand(TEN_MILLION, device=device) * 1000 - 500).to(dtype)
    yield "random bits", random_bits(TEN_MILLION, dtype, device)
