"""Inputs on which casts differ if they differ at all; for tests and for the check on a GPU."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import Format, decode


def every_value(dtype: torch.dtype) -> Tensor:
    """All 65,536 values of a 16-bit dtype, NaNs of every payload and sign included, as [256, 256]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)


def finite_grid(format: Format) -> Tensor:
    """The distinct non-negative finite values of `format`, ascending, float64."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(format.dtype)
    values = decode(codes, torch.float64)
    return values[values.isfinite() & (values >= 0)].unique()


def around_every_tie(format: Format) -> Tensor:
    """float32: grid points of `format`, midpoints, the overflow tie, each with its two neighbours, both signs."""
    grid = finite_grid(format)
    midpoints = (grid[1:] + grid[:-1]) / 2
    centres = torch.cat([grid, midpoints, grid.new_tensor([format.overflow_threshold])]).float()
    infinity = torch.full_like(centres, math.inf)
    points = torch.cat([centres, torch.nextafter(centres, infinity), torch.nextafter(centres, -infinity)])
    return torch.cat([points, -points])


def special_float32() -> Tensor:
    """float32 that casts get wrong: NaN of both signs and several payloads, infinities, zeros, subnormals, extremes."""
    patterns = [
        0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF,  # NaN
        0x7F800000, 0xFF800000,  # infinities
        0x00000000, 0x80000000,  # zeros
        0x00000001, 0x80000001, 0x007FFFFF, 0x00400000,  # subnormals
        0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000,  # least normal, greatest, one
    ]  # fmt: skip
    return torch.tensor([p - 2**32 if p >= 2**31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


def edge_matrix(format: Format, dtype: torch.dtype) -> Tensor:
    """All of the above that `dtype` can hold, as a matrix."""
    if dtype in (torch.bfloat16, torch.float16):
        return every_value(dtype)
    values = torch.cat([around_every_tie(format), special_float32()]).to(dtype)
    missing = -values.numel() % 64
    return torch.cat([values, values.new_ones(missing)]).reshape(-1, 64)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Values of uniformly random bit patterns: every exponent, one NaN in 128 of bf16."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    low, high = torch.iinfo(width).min, torch.iinfo(width).max + 1
    return torch.randint(low, high, shape, dtype=torch.int64, device=device).to(width).view(dtype)
