"""Where the rows of each group lie, worked out on the device: nothing here waits for it.

    codes    [M, K']      the rows as they are, one group after the other
    codes_t  [K', C]      the transposed matrix, each group begun at a multiple of 128 columns; what fills up is zero

FP8 products whose groups lie along the contracted dimension (the weight gradient, over tokens) want every group to
begin at 16 bytes; of 128 columns they take none but whole steps. A group without rows gets 128 columns of zeros, so
that no product is empty. C is what any sizes of so many groups fit into.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.layout import ALIGNMENT

# Columns of codes_t: what a group's part of them is a multiple of.
GROUP_COLUMNS = 128


class Groups(NamedTuple):
    """Rows of E groups.

    Attributes:
        ends: [E] int32, the row after the last of each.
        ends_t: [E] int32, the column of codes_t after the last of each.
        group: [M] int64, of each row.
        position: [M] int64, the column of codes_t of each row.
        source: [C] int32, the row of each column of codes_t; -1 for what fills up.
        owner: [C / 16] int32, the group of each 16 columns of codes_t; -1 beyond the last.
    """

    ends: Tensor
    ends_t: Tensor
    group: Tensor
    position: Tensor
    source: Tensor
    owner: Tensor


def capacity(rows: int, num_groups: int) -> int:
    """C, columns of codes_t."""
    return -(-rows // GROUP_COLUMNS) * GROUP_COLUMNS + GROUP_COLUMNS * num_groups


def groups_of(splits: Tensor, rows: int) -> Groups:
    """The groups of sizes [E] that sum to `rows`; on a GPU told to check that, and not waited for.

    Raises:
        ValueError: on a CPU, sizes that sum to something else, or below 0.
    """
    num_groups, device = splits.shape[0], splits.device
    sizes = splits.to(torch.int64)
    ends = sizes.cumsum(0)
    _check(sizes, ends, rows)
    columns = ((sizes + (GROUP_COLUMNS - 1)) // GROUP_COLUMNS * GROUP_COLUMNS).clamp(min=GROUP_COLUMNS)
    ends_t = columns.cumsum(0)
    index = torch.arange(rows, device=device)
    group = torch.searchsorted(ends, index, right=True).clamp(max=num_groups - 1)
    shift = (ends_t - columns) - (ends - sizes)
    position = index + shift[group]
    whole = capacity(rows, num_groups)
    source = torch.full((whole,), -1, dtype=torch.int32, device=device)
    source = source.scatter(0, position, index.to(torch.int32))
    tiles = torch.arange(0, whole, ALIGNMENT, device=device)
    owner = torch.searchsorted(ends_t, tiles, right=True)
    owner = torch.where(owner < num_groups, owner, -1).to(torch.int32)
    return Groups(ends.to(torch.int32), ends_t.to(torch.int32), group, position, source, owner)


def _check(sizes: Tensor, ends: Tensor, rows: int) -> None:
    if sizes.is_cuda or torch.compiler.is_compiling():
        fits = (ends[-1] == rows) & (sizes >= 0).all()
        torch._assert_async(fits, "m_splits must be 0 or more and sum to the number of tokens")
    elif int(ends[-1]) != rows or bool((sizes < 0).any()):
        raise ValueError(f"m_splits {sizes.tolist()} must be 0 or more and sum to the number of tokens, {rows}")
