"""Whether two implementations agree, bit for bit or code for code; for tests and for the check on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def bits(x: Tensor) -> Tensor:
    """A tensor's bits; every NaN of a wide dtype as the same one."""
    if x.dtype.itemsize > 1:
        x = torch.where(x.isnan(), torch.full_like(x, float("nan")), x)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    return x.contiguous().view(width)


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    """The same tensors, bit for bit, each without gaps."""
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), place
        if a is not None and b is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype), place
            assert a.is_contiguous()
            assert torch.equal(bits(a), bits(b.to(a.device))), place


def steps_between(found: Tensor, expected: Tensor) -> Tensor:
    """How many codes lie between those of two tensors, float8 of one format; NaN is next to itself alone."""
    a, b = (codes.contiguous().view(torch.uint8).int() for codes in (found, expected))
    nan = found.float().isnan() | expected.float().isnan()
    # Sign and magnitude in order: -0 and 0 are the same.
    a, b = (torch.where(code >= 128, 128 - code, code) for code in (a, b))
    steps = (a - b).abs()
    return torch.where(nan, torch.where(found.float().isnan() & expected.float().isnan(), 0, 255), steps)
