"""The layout that Hopper's block-scaled products ask for.

Of an operand [M, K], K-major, with 128 of K a block:

    codes            [M', K']            M' a multiple of 16, K' of 128, what is added zero
    scale, 1x128     [K' / 128, M']      one a row and block of K
    scale, 128x128   [ceil(M / 128), B]  B = K' / 128 rounded up to a multiple of 4

Scales are filled up with ones. cuBLASLt reads the first kind as a matrix [M', K' / 128] whose columns are contiguous,
and the second with its K padded, so that every row of it begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.layout import padded
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity

BLOCK = 128
# Entries of a 128x128 scale along K, so that a row of float32 is a multiple of 16 bytes.
SCALES_OF_K = 4


def whole_blocks(extent: int) -> int:
    """`extent` rounded up to a multiple of 128."""
    return (extent + BLOCK - 1) // BLOCK * BLOCK


def scale_shape(rows: int, columns: int, granularity: Granularity) -> tuple[int, int]:
    """Shape of the scale of an operand [rows, columns]; see the module."""
    of_k = (columns + BLOCK - 1) // BLOCK
    if granularity is BLOCK_1X128:
        return of_k, padded(rows)
    return (rows + BLOCK - 1) // BLOCK, (of_k + SCALES_OF_K - 1) // SCALES_OF_K * SCALES_OF_K


def lay_out(codes: Tensor, scale: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and their scale by block, [M, blocks] or [blocks, blocks], in this layout.

    Raises:
        ValueError: the granularity is neither 1x128 nor 128x128.
    """
    check_granularity(granularity)
    rows, columns = codes.shape
    fill = (0, whole_blocks(columns) - columns, 0, padded(rows) - rows)
    laid_codes = torch.nn.functional.pad(codes.view(torch.uint8), fill).contiguous().view(codes.dtype)
    # [M, blocks] stands on its side.
    laid = scale.t() if granularity is BLOCK_1X128 else scale
    tall, wide = scale_shape(rows, columns, granularity)
    laid = torch.nn.functional.pad(laid, (0, wide - laid.shape[1], 0, tall - laid.shape[0]), value=1.0).contiguous()
    return laid_codes, laid


def has_blocks(scale: Tensor, rows: int) -> bool:
    """True if `scale`, of an operand of so many rows, is one by block rather than [] or [rows, 1]."""
    return scale.dim() == 2 and (scale.shape[1] != 1 or scale.shape[0] != rows)


def is_by_row(scale: Tensor, codes: Tensor) -> bool:
    """True of a scale of 1x128. One of 128x128 never has such a shape, since the number of rows is a multiple of 16."""
    return scale.shape[1] == codes.shape[0] and scale.shape[0] == (codes.shape[1] + BLOCK - 1) // BLOCK


def expanded(scale: Tensor, codes: Tensor) -> Tensor:
    """A scale by block as one of every code, of the shape of the codes [M', K']."""
    rows, columns = codes.shape
    of_k = (columns + BLOCK - 1) // BLOCK
    by_row = scale.t() if is_by_row(scale, codes) else scale[:, :of_k].repeat_interleave(BLOCK, dim=0)[:rows]
    return by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]


def check_granularity(granularity: Granularity) -> None:
    """Raise ValueError unless blocks are 1x128 or 128x128."""
    if granularity not in (BLOCK_1X128, BLOCK_128X128):
        raise ValueError(f"granularity is {granularity}: block-scaled products take 1x128 or 128x128")
