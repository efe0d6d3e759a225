"""The layout that Hopper's block-scaled products ask for, and that of MX after its example.

Of an operand [M, K], K-major, with 128 of K a block:

    codes            [M', K']            M' a multiple of 16, K' of 128, what is added zero
    scale, 1x128     [K' / 128, M']      one a row and block of K
    scale, 128x128   [ceil(M / 128), B]  B = K' / 128 rounded up to a multiple of 4

MX has blocks of 32 of K in the place of 128, and powers of two in E8M0:

    codes            [M', K'']           K'' a multiple of 32
    scale, MX        [K'' / 32, M']      as of 1x128; no product reads it as it is, it is decoded first

Scales are filled up with ones. cuBLASLt reads the first kind as a matrix [M', K' / 128] whose columns are contiguous,
and the second with its K padded, so that every row of it begins at a multiple of 16 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import E8M0, decode
from octavo.kernels.layout import padded
from octavo.scaling import BLOCK_128X128, MX, PRODUCT_BLOCKS, Granularity

BLOCK = 128
MX_BLOCK = 32
# Entries of a 128x128 scale along K, so that a row of float32 is a multiple of 16 bytes.
SCALES_OF_K = 4


def whole_blocks(extent: int, block: int = BLOCK) -> int:
    """`extent` rounded up to a multiple of a block."""
    return (extent + block - 1) // block * block


def block_of(granularity: Granularity) -> int:
    """How many neighbours along K share a scale: 32 of MX, else 128."""
    return MX_BLOCK if granularity is MX else BLOCK


def block_under(scale: Tensor) -> int:
    """The same of a scale in this layout: only those of MX are E8M0."""
    return MX_BLOCK if scale.dtype == E8M0.dtype else BLOCK


def scale_dtype(granularity: Granularity) -> torch.dtype:
    """E8M0 of MX, else float32."""
    return E8M0.dtype if granularity is MX else torch.float32


def scale_shape(rows: int, columns: int, granularity: Granularity) -> tuple[int, int]:
    """Shape of the scale of an operand [rows, columns]; see the module."""
    block = block_of(granularity)
    of_k = (columns + block - 1) // block
    if granularity is not BLOCK_128X128:
        return of_k, padded(rows)
    return (rows + BLOCK - 1) // BLOCK, (of_k + SCALES_OF_K - 1) // SCALES_OF_K * SCALES_OF_K


def lay_out(codes: Tensor, scale: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and their scale by block, [M, blocks] or [blocks, blocks], in this layout.

    Raises:
        ValueError: the granularity is another one than 1x128, 128x128 and MX.
    """
    check_granularity(granularity)
    rows, columns = codes.shape
    laid_codes = _filled(codes.view(torch.uint8), padded(rows), whole_blocks(columns, block_of(granularity)), 0)
    # [M, blocks] stands on its side.
    laid = scale if granularity is BLOCK_128X128 else scale.t()
    extents = scale_shape(rows, columns, granularity)
    if granularity is MX:
        # The code of one is that of the exponent 0.
        laid = _filled(laid.view(torch.uint8), *extents, E8M0.bias).view(E8M0.dtype)
    else:
        laid = _filled(laid, *extents, 1.0)
    return laid_codes.view(codes.dtype), laid


def _filled(matrix: Tensor, tall: int, wide: int, value: float) -> Tensor:
    """[rows, columns] as [tall, wide], contiguous."""
    fill = (0, wide - matrix.shape[1], 0, tall - matrix.shape[0])
    return torch.nn.functional.pad(matrix, fill, value=value).contiguous()


def has_blocks(scale: Tensor, rows: int) -> bool:
    """True if `scale`, of an operand of so many rows, is one by block rather than [] or [rows, 1]."""
    return scale.dim() == 2 and (scale.shape[1] != 1 or scale.shape[0] != rows)


def is_by_row(scale: Tensor, codes: Tensor) -> bool:
    """True of a scale of 1x128 or MX.

    One of 128x128 never has such a shape, since the number of rows is a multiple of 16.
    """
    block = block_under(scale)
    return scale.shape[1] == codes.shape[0] and scale.shape[0] == (codes.shape[1] + block - 1) // block


def expanded(scale: Tensor, codes: Tensor) -> Tensor:
    """A scale by block as one of every code, float32, of the shape of the codes [M', K']."""
    rows, columns = codes.shape
    block, values = block_under(scale), decode(scale)
    of_k = (columns + block - 1) // block
    by_row = values.t() if is_by_row(scale, codes) else values[:, :of_k].repeat_interleave(BLOCK, dim=0)[:rows]
    return by_row.repeat_interleave(block, dim=1)[:, :columns]


def check_granularity(granularity: Granularity) -> None:
    """Raise ValueError unless blocks are 1x128, 128x128 or MX."""
    if granularity not in PRODUCT_BLOCKS:
        raise ValueError(f"granularity is {granularity}: block-scaled products take 1x128, 128x128 or mx")
