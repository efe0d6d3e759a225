"""Groups of rows filled up with zeros to a multiple: what a product of each group asks for, done outside of it.

    x [M, H], groups of m_0, m_1, ...  ->  [M', H], groups of m_0 rounded up, m_1 rounded up, ...

Sizes that only the device knows give a matrix of as many rows as could be needed, M + E (multiple - 1) rounded up; what
is left over belongs to the last group. Zeros change neither an amax nor a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def padded_splits(splits: Sequence[int], multiple: int) -> list[int]:
    """Each size rounded up to the multiple."""
    return [-(-size // multiple) * multiple for size in splits]


def pad_groups(x: Tensor, splits: Sequence[int], multiple: int) -> Tensor:
    """x [M, H] with each group filled up -> [sum of the padded sizes, H]."""
    parts: list[Tensor] = []
    for part, size, whole in zip(x.split(list(splits)), splits, padded_splits(splits, multiple), strict=True):
        parts.append(part)
        if whole != size:
            parts.append(x.new_zeros((whole - size, x.shape[1])))
    return torch.cat(parts)


def unpad_groups(x: Tensor, splits: Sequence[int], multiple: int) -> Tensor:
    """The other way: x [sum of the padded sizes, H] -> [M, H]."""
    sizes = []
    for size, whole in zip(splits, padded_splits(splits, multiple), strict=True):
        sizes += [size, whole - size]
    # One split, whose backward is one concatenation.
    return torch.cat(x.split(sizes)[::2])


def pad_groups_on_device(x: Tensor, splits: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
    """As `pad_groups` for sizes [E] on the device -> (x [M', H], the padded sizes [E])."""
    rows = capacity(x.shape[0], splits.shape[0], multiple)
    whole = _padded_on_device(splits, multiple, rows)
    result: Tensor = _Spread.apply(x, _positions(splits, whole, x.shape[0]), rows)
    return result, whole


def unpad_groups_on_device(x: Tensor, splits: Tensor, multiple: int, rows: int) -> Tensor:
    """The other way: x [M', H] -> [rows, H], `rows` being the sum of the sizes."""
    positions = _positions(splits, _padded_on_device(splits, multiple, x.shape[0]), rows)
    result: Tensor = _Collect.apply(x, positions)
    return result


def capacity(rows: int, groups: int, multiple: int) -> int:
    """Rows that any sizes of so many groups fit into once they are padded; a multiple itself."""
    return -(-(rows + groups * (multiple - 1)) // multiple) * multiple


def _padded_on_device(splits: Tensor, multiple: int, rows: int) -> Tensor:
    whole = torch.div(splits + (multiple - 1), multiple, rounding_mode="floor") * multiple
    left = rows - whole.sum()
    last = torch.arange(splits.shape[0], device=splits.device) == splits.shape[0] - 1
    return torch.where(last, whole + left, whole).to(splits.dtype)


def _positions(splits: Tensor, whole: Tensor, rows: int) -> Tensor:
    """[rows], where each row goes."""
    ends, index = splits.cumsum(0), torch.arange(rows, device=splits.device)
    group = torch.searchsorted(ends, index, right=True).clamp(max=splits.shape[0] - 1)
    shift = (whole.cumsum(0) - whole) - (ends - splits)
    return index + shift[group]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(positions)
        return x.new_zeros((rows, x.shape[1])).index_copy_(0, positions, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy.index_select(0, ctx.saved_tensors[0]), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.rows = x.shape[0]
        return x.index_select(0, positions)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = dy.new_zeros((ctx.rows, dy.shape[1])).index_copy_(0, ctx.saved_tensors[0], dy)
        return dx, None
