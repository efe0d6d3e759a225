"""Which elements of a matrix share a scale.

A granularity is the extent of one block, [rows, columns] of the matrix, None meaning "all of them". A tensor of more
than two dimensions is seen as the matrix [product of the leading ones, last one].

    tensor   (None, None)   one scale                       scale [1, 1]
    row      (1, None)      one per token or output channel scale [M, 1]
    column   (None, 1)                                      scale [1, K]
    (1, 128), (128, 1), (128, 128)                          scale [ceil(M / rows), ceil(K / columns)]
    mx       (1, 32)        powers of two (E8M0)            scale [M, ceil(K / 32)]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Granularity:
    """Extent of the blocks that share a scale; None stands for the whole extent of the matrix."""

    name: str
    rows: int | None
    columns: int | None

    def extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of one block in a matrix of `shape`, at least 1 each."""
        rows = max(shape[0], 1) if self.rows is None else self.rows
        columns = max(shape[1], 1) if self.columns is None else self.columns
        return rows, columns

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scale of a matrix of `shape`; a partial block at the edge counts as one."""
        rows, columns = self.extent(shape)
        tall = 1 if self.rows is None else -(-shape[0] // rows)
        wide = 1 if self.columns is None else -(-shape[1] // columns)
        return tall, wide

    @property
    def transposed(self) -> Granularity:
        """The same blocks seen in the transposed matrix."""
        return next(g for g in GRANULARITIES if (g.rows, g.columns) == (self.columns, self.rows))

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and unpickled granularities are the granularity itself, so that `is` holds.
        return granularity_named, (self.name,)

    def __repr__(self) -> str:
        return self.name


TENSOR = Granularity("tensor", None, None)
ROW = Granularity("row", 1, None)
COLUMN = Granularity("column", None, 1)
BLOCK_1X128 = Granularity("1x128", 1, 128)
BLOCK_128X1 = Granularity("128x1", 128, 1)
BLOCK_128X128 = Granularity("128x128", 128, 128)
MX = Granularity("mx", 1, 32)
MX_TRANSPOSED = Granularity("mx_transposed", 32, 1)

GRANULARITIES: tuple[Granularity, ...] = (
    TENSOR,
    ROW,
    COLUMN,
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    MX,
    MX_TRANSPOSED,
)

# Of the operands of products by block.
PRODUCT_BLOCKS: tuple[Granularity, ...] = (BLOCK_1X128, BLOCK_128X128, MX)


def granularity_named(granularity: str | tuple[int, int] | Granularity) -> Granularity:
    """ "tensor", "row", "column", "mx" or the extent of a block, such as (1, 128), as a `Granularity`."""
    if isinstance(granularity, Granularity):
        return granularity
    for known in GRANULARITIES:
        extent = (known.rows, known.columns)
        if granularity == known.name or (known not in (MX, MX_TRANSPOSED) and granularity == extent):
            return known
    names = "'tensor', 'row', 'column', 'mx', (1, 128), (128, 1), (128, 128)"
    raise ValueError(f"unknown granularity {granularity!r}: expected one of {names}")


def as_matrix(x: Tensor) -> Tensor:
    """x as [M, K]: leading dimensions joined; a vector is one row."""
    if x.dim() == 2:
        return x
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.dim() else 1)


def blocks(x: Tensor, granularity: Granularity) -> Tensor:
    """A matrix [M, K] as [tall, rows, wide, columns], filled up with zeros where an edge block is partial."""
    rows, columns = granularity.extent((x.shape[0], x.shape[1]))
    tall, wide = granularity.scale_shape((x.shape[0], x.shape[1]))
    pad_rows, pad_columns = tall * rows - x.shape[0], wide * columns - x.shape[1]
    if pad_rows or pad_columns:
        x = torch.nn.functional.pad(x, (0, pad_columns, 0, pad_rows))
    return x.reshape(tall, rows, wide, columns)


def expand_scale(scale: Tensor, granularity: Granularity, shape: tuple[int, int]) -> Tensor:
    """A scale [tall, wide] as something that broadcasts against a matrix of `shape`."""
    if granularity.rows not in (None, 1):
        scale = scale.repeat_interleave(granularity.rows, dim=0)[: shape[0]]
    if granularity.columns not in (None, 1):
        scale = scale.repeat_interleave(granularity.columns, dim=1)[:, : shape[1]]
    return scale
