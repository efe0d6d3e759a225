"""Matrices in the shapes and memory orders that callers have; for tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SHAPES = [(1, 1), (1, 33), (33, 1), (5, 7), (16, 16), (17, 31), (130, 64), (0, 5), (5, 0), (0, 0)]


def memory_orders(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The values of a matrix x, stored in every way that a view can be."""
    rows, columns = x.shape
    yield "contiguous", x.contiguous()
    yield "transposed", x.t().contiguous().t()
    wide = x.new_zeros(rows, 2 * columns)
    wide[:, ::2] = x
    yield "every second column", wide[:, ::2]
    tall = x.new_zeros(2 * rows, columns)
    tall[::2] = x
    yield "every second row", tall[::2]
    both = x.new_zeros(3 * columns, 2 * rows)
    both[::3, ::2] = x.t()
    yield "both, transposed", both[::3, ::2].t()
    flat = x.new_zeros(x.numel() + 1)
    flat[1:] = x.flatten()
    yield "storage offset", flat[1:].view(rows, columns)


def with_specials(x: Tensor) -> Tensor:
    """x with some of its elements replaced by zeros, infinities and NaN."""
    x = x.clone()
    draw = torch.rand(x.shape, device=x.device)
    x[draw < 0.05] = 0.0
    x[draw > 0.9] = -0.0
    x[draw > 0.93] = float("inf")
    x[draw > 0.95] = -float("inf")
    x[draw > 0.97] = float("nan")
    return x
