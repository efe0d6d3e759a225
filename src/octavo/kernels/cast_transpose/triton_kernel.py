"""The kernel of cast_transpose: each program reads one block of x and writes its codes in both layouts.

    code = convert(fp32(x) * m)     one multiplication rounded to nearest; the instruction saturates and keeps NaN

Rows are taken in pairs: the codes of two neighbours in a column are one 16-bit word, so that what passes through
shared memory to the other layout is a matrix of words and not of single bytes. (With bytes the kernel ran at 87 % of
copy, with words at 91 %: `benchmarks/LOG.md`.)

With a rule, programs run from the last block to the first: the pass that measured the amax has left the end of x in
the L2 cache.

What pads the extents to multiples of 16 is written by the blocks at the edge.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.codes import largest_finite, multiplier_and_scale, pairs_of_codes, scaled


# What is not in the launcher's key must not make a variant: the number of rows, which is that of the tokens, extents
# beyond ALIGN, and where among others a scale or an amax lies.
@triton.jit(
    do_not_specialize=("rows", "columns", "stride_row"),
    do_not_specialize_on_alignment=("rowwise", "columnwise", "scale", "scale_t", "gathered", "sums"),
)
def cast_transpose_kernel(
    x,
    codes,
    codes_t,
    rowwise,
    columnwise,
    scale,
    scale_t,
    gathered,
    sums,
    rows,
    columns,
    stride_row,
    ALIGN: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    SHARED: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    PARTIALS_T: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of x [rows, columns], whose rows are contiguous; columns and stride_row come in units of ALIGN.

    -> codes [padded rows, padded columns] with scale, codes_t its transpose with scale_t, gathered [], and
    sums [blocks of rows, columns]. SHARED: both layouts hold the same codes. BY_ROW, BY_COLUMN: what is given is a
    vector; else PARTIALS, PARTIALS_T numbers whose largest counts. STORE_SCALE: a scale of the whole matrix is written
    too.
    """
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    columns = columns * ALIGN
    stride_row = stride_row * ALIGN
    padded_rows = (rows + 15) // 16 * 16
    padded_columns = (columns + 15) // 16 * 16
    tiles_wide = tl.cdiv(padded_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    if FROM_AMAX:
        program = tl.num_programs(0) - 1 - program
    tile_row, tile_column = program // tiles_wide, program % tiles_wide
    pair = tile_row.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = tile_column.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row_0, row_1 = 2 * pair, 2 * pair + 1
    inside_0 = (row_0 < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (row_1 < rows)[:, None] & (column < columns)[None, :]
    # 2. Its values, even rows and odd ones, each [PAIRS, BLOCK_COLUMNS].
    source = x + row_0[:, None] * stride_row + column[None, :]
    values_0 = tl.load(source, mask=inside_0, other=0.0).to(tl.float32)
    values_1 = tl.load(source + stride_row, mask=inside_1, other=0.0).to(tl.float32)
    # 3. Their amax, and their sums.
    if GATHER:
        magnitude = tl.maximum(tl.abs(values_0), tl.abs(values_1))
        largest = tl.max(tl.max(magnitude, axis=1), axis=0)
        if not (largest < float("inf")):
            largest = tl.maximum(largest_finite(tl.abs(values_0)), largest_finite(tl.abs(values_1)))
        tl.atomic_max(gathered, largest, sem="relaxed")
    if COLUMN_SUM:
        total = tl.sum(values_0 + values_1, axis=0)
        tl.store(sums + tile_row.to(tl.int64) * columns + column, total, mask=column < columns)
    # 4. The codes; padding is zero even if the multiplier is not a number.
    within = (column < padded_columns)[None, :] & (row_0 < padded_rows)[:, None]
    if HAS_CODES:
        m_0, used_0 = multiplier_and_scale(
            rowwise, row_0, rows, BY_ROW, FROM_AMAX, PARTIALS, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST
        )
        m_1, used_1 = m_0, used_0
        if BY_ROW:
            m_1, used_1 = multiplier_and_scale(
                rowwise, row_1, rows, BY_ROW, FROM_AMAX, PARTIALS, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST
            )
            if tile_column == 0:
                tl.store(scale + row_0, tl.where(row_0 < rows, used_0, 1.0), mask=row_0 < padded_rows)
                tl.store(scale + row_1, tl.where(row_1 < rows, used_1, 1.0), mask=row_1 < padded_rows)
            m_0, m_1 = m_0[:, None], m_1[:, None]
        elif STORE_SCALE:
            tl.store(scale, used_0, mask=program == 0)
        scaled_0, scaled_1 = (
            scaled(values_0, m_0, inside_0, INF_TO_NAN),
            scaled(values_1, m_1, inside_1, INF_TO_NAN),
        )
        target = codes + row_0[:, None] * padded_columns + column[None, :]
        tl.store(target, scaled_0.to(CODE), mask=within)
        tl.store(target + padded_columns, scaled_1.to(CODE), mask=within)
    # 5. The other layout, two codes a word.
    if HAS_CODES_T:
        if not SHARED:
            m_t, used_t = multiplier_and_scale(
                columnwise, column, columns, BY_COLUMN, FROM_AMAX, PARTIALS_T, EPSILON, POWER_OF_TWO, FORMAT_MAX,
                SMALLEST, LARGEST,
            )  # fmt: skip
            if BY_COLUMN:
                if tile_row == 0:
                    tl.store(scale_t + column, tl.where(column < columns, used_t, 1.0), mask=column < padded_columns)
                m_t = m_t[None, :]
            elif STORE_SCALE:
                tl.store(scale_t, used_t, mask=program == 0)
            scaled_0, scaled_1 = (
                scaled(values_0, m_t, inside_0, INF_TO_NAN),
                scaled(values_1, m_t, inside_1, INF_TO_NAN),
            )
        words = pairs_of_codes(scaled_1, scaled_0, CODE, INTERPRETED)
        # The extent of codes_t in words; divisions and masks as the compiler needs them to store 16 bytes at once.
        width_t = (rows + 15) // 16 * 8
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + column[:, None] * width_t + pair[None, :]
        tl.store(target_t, tl.trans(words), mask=(column < padded_columns)[:, None] & (pair < width_t)[None, :])
