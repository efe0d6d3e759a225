"""grouped_cast in Triton: each program takes a block of columns of codes_t, that is, of rows wherever they lie.

    code = convert(fp32(x) * m)     one multiplication rounded to nearest; the instruction saturates and keeps NaN

A block is 64 places of codes_t by 128 columns of x. Places are filled by rows of one group for 16 at a time, so that a
multiplier of a group and column is read for 16 places together, and an amax of them is one atomic. As in
`octavo.kernels.cast_transpose.triton_kernel` even places and odd ones are read apart and written as words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.codes import CODE_DTYPES, INTERPRETED, pairs_of_codes, scaled
from octavo.kernels.grouped_cast.layout import Groups
from octavo.kernels.layout import ALIGNMENT, padded
from octavo.kernels.tile import with_contiguous_rows

PLACES = 64
COLUMNS = 128
WARPS = 8


@triton.jit
def grouped_cast_kernel(
    x,
    codes,
    codes_t,
    by_row,
    by_column,
    source,
    owner,
    places,
    columns,
    padded_columns,
    stride_row,
    stride_group,
    stride_column,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_PLACES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """codes [M, padded_columns], codes_t [padded_columns, places]; x has contiguous rows.

    by_row [M]; by_column [E, columns] with its two strides, of which that of columns is 0 for one a group.
    """
    PAIRS: tl.constexpr = BLOCK_PLACES // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row_0 = tl.load(source + 2 * pair, mask=2 * pair < places, other=-1).to(tl.int64)
    row_1 = tl.load(source + 2 * pair + 1, mask=2 * pair + 1 < places, other=-1).to(tl.int64)
    # 2. Its values, even places and odd ones.
    wide = (column < columns)[None, :]
    inside_0 = (row_0 >= 0)[:, None] & wide
    inside_1 = (row_1 >= 0)[:, None] & wide
    values_0 = tl.load(x + row_0[:, None] * stride_row + column[None, :], mask=inside_0, other=0.0).to(tl.float32)
    values_1 = tl.load(x + row_1[:, None] * stride_row + column[None, :], mask=inside_1, other=0.0).to(tl.float32)
    # 3. The codes, where the rows lie.
    if HAS_CODES:
        m_0 = tl.load(by_row + row_0, mask=row_0 >= 0, other=1.0)[:, None]
        m_1 = tl.load(by_row + row_1, mask=row_1 >= 0, other=1.0)[:, None]
        within = (column < padded_columns)[None, :]
        code_0 = scaled(values_0, m_0, inside_0, INF_TO_NAN).to(CODE)
        code_1 = scaled(values_1, m_1, inside_1, INF_TO_NAN).to(CODE)
        tl.store(codes + row_0[:, None] * padded_columns + column[None, :], code_0, mask=(row_0 >= 0)[:, None] & within)
        tl.store(codes + row_1[:, None] * padded_columns + column[None, :], code_1, mask=(row_1 >= 0)[:, None] & within)
    # 4. The other layout, two codes a word; both of a pair belong to one group.
    if HAS_CODES_T:
        group = tl.load(owner + pair // 8, mask=2 * pair < places, other=-1).to(tl.int64)
        where = by_column + group[:, None] * stride_group + column[None, :] * stride_column
        m_t = tl.load(where, mask=(group >= 0)[:, None] & wide, other=1.0)
        scaled_0 = scaled(values_0, m_t, inside_0, INF_TO_NAN)
        scaled_1 = scaled(values_1, m_t, inside_1, INF_TO_NAN)
        words = pairs_of_codes(scaled_1, scaled_0, CODE, INTERPRETED)
        # The extent of codes_t in words; a multiple of 8, which the compiler needs to see to store 16 bytes at once.
        width_t = places // 16 * 8
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + column[:, None] * width_t + pair[None, :]
        tl.store(target_t, tl.trans(words), mask=(column < padded_columns)[:, None] & (pair < width_t)[None, :])


@triton.jit
def column_amax_kernel(
    x, largest, source, owner, places, columns, stride_row, BLOCK_TILES: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """largest [E, columns], zero before: of 16 places at a time, which belong to one group."""
    column = tl.program_id(1).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    for number in tl.static_range(BLOCK_TILES):
        # 1. A tile's rows and group.
        tile = tl.program_id(0).to(tl.int64) * BLOCK_TILES + number
        place = tile * 16 + tl.arange(0, 16)
        row = tl.load(source + place, mask=place < places, other=-1).to(tl.int64)
        group = tl.load(owner + tile, mask=tile * 16 < places, other=-1).to(tl.int64)
        inside = (row >= 0)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * stride_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        # 2. What is not finite counts as 0; a comparison that NaN fails.
        magnitude = tl.abs(values)
        most = tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=0)
        # 3. Of numbers that are not negative the bits are in the order of the numbers.
        tl.atomic_max(largest + group * columns + column, most, mask=(column < columns) & (group >= 0), sem="relaxed")


def grouped_cast_triton(
    x: Tensor, groups: Groups, format: Format, by_row: Tensor | None, by_column: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor | None, Tensor | None]:
    """As `octavo.kernels.grouped_cast.grouped_cast`, for calls without `unsupported_reasons`."""
    x = with_contiguous_rows(x)
    (rows, columns), places = x.shape, groups.source.shape[0]
    wide = padded(columns)
    codes = codes_t = None
    strides = (0, 0)
    if by_row is not None:
        codes = torch.empty((rows, wide), dtype=format.dtype, device=x.device)
        by_row = by_row.contiguous()
    if by_column is not None:
        codes_t = torch.empty((wide, places), dtype=format.dtype, device=x.device)
        strides = by_column.stride(0), by_column.stride(1) if by_column.shape[1] > 1 else 0
    tensors = (x, codes, codes_t, by_row, by_column, groups.source, groups.owner)
    numbers = (places, columns, wide, x.stride(0), *strides)
    flags = (codes is not None, codes_t is not None, inf_to_nan, CODE_DTYPES[format.name], INTERPRETED)
    grid = (triton.cdiv(places, PLACES), triton.cdiv(wide, COLUMNS))
    _launch(grouped_cast_kernel, grid, tensors, numbers, (*flags, PLACES, COLUMNS))
    return codes, codes_t


def column_amax_triton(x: Tensor, groups: Groups) -> Tensor:
    """As `octavo.kernels.grouped_cast.column_amax`, on a device that runs the kernels."""
    x = with_contiguous_rows(x)
    columns, places = x.shape[1], groups.source.shape[0]
    largest = torch.zeros((groups.ends.shape[0], columns), dtype=torch.float32, device=x.device)
    tiles = PLACES // ALIGNMENT
    grid = (triton.cdiv(places, PLACES), triton.cdiv(columns, COLUMNS))
    tensors = (x, largest, groups.source, groups.owner)
    _launch(column_amax_kernel, grid, tensors, (places, columns, x.stride(0)), (tiles, COLUMNS))
    return largest


def _launch(kernel: Any, grid: tuple[int, int], tensors: Any, numbers: tuple[int, ...], constants: Any) -> None:
    kernel[grid](*tensors, *numbers, *constants, num_warps=WARPS)
