"""block_cast of bf16 and fp16 on a GPU, two elements of a row at a time; `triton_kernel` has the general form.

A word holds two neighbours of a row. Amaxes are of words, without a conversion (`octavo.kernels.amax.packed_kernel`),
and words are what stays in registers until both layouts are written: half of what float32 values would take. Each
layout takes the values out of them anew.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.amax.packed_kernel import float32_of, larger, largest_along, lower
from octavo.kernels.block_cast.tile_scales import multiplier_of, store_scales, store_square_scales
from octavo.kernels.codes import pairs_of_codes

# Of an eager launch: three programs of four warps on a multiprocessor in place of two. (On an H200 5 to 8 % faster.)
OPTIONS = {"maxnreg": 168}


@triton.jit
def _low(words, OFFSET: tl.constexpr):
    """The first of each two elements, float32."""
    if OFFSET == 0x0080:
        values = (words << 16).to(tl.float32, bitcast=True)
    else:
        values = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def _high(words, OFFSET: tl.constexpr):
    """The second of each two elements, float32."""
    if OFFSET == 0x0080:
        values = (words & -0x10000).to(tl.float32, bitcast=True)
    else:
        values = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return values


@triton.jit
def _nan_for_inf(words, numbers, INTERPRETED: tl.constexpr):
    """Words whose infinities are NaN; `numbers` as of `octavo.kernels.amax.packed_kernel`, negative of both."""
    if INTERPRETED:
        negative = ((numbers >> 15) & 0x00010001) * 0xFFFF
    else:
        # Each byte of a result is eight times a sign: that of byte 1, or of byte 3.
        negative = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, 0xBB99;", "=r,r", [numbers], dtype=tl.int32, is_pure=True, pack=1
        )
    return words | (negative & 0x7FFF7FFF)


@triton.jit
def cast_tile(
    program,
    x,
    codes,
    codes_t,
    scale,
    scale_t,
    sums,
    rows,
    words,
    stride_row,
    ALIGN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    SQUARE: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Tile number `program` of x, as `packed_block_cast_kernel`; tiles of a row of them follow one another."""
    PAIR: tl.constexpr = OFFSET << 16 | OFFSET
    words = words * ALIGN
    stride_row = stride_row * ALIGN
    columns = 2 * words
    # 1. Which tile; 64 bits, since an offset can exceed 2^31.
    tall, wide = (rows + 127) // 128, (words + 63) // 64
    tile_row, tile_column = (program // wide).to(tl.int64), (program % wide).to(tl.int64)
    pair = tile_row * 64 + tl.arange(0, 64)
    word = tile_column * 64 + tl.arange(0, 64)
    row_0, row_1 = 2 * pair, 2 * pair + 1
    # 2. Its words, even rows and odd ones, each [64, 64]; 0 outside.
    source_0 = x.to(tl.pointer_type(tl.int32)) + row_0[:, None] * stride_row + word[None, :]
    inside = (word < words)[None, :]
    words_0 = tl.load(source_0, mask=(row_0 < rows)[:, None] & inside, other=0)
    words_1 = tl.load(source_0 + stride_row, mask=(row_1 < rows)[:, None] & inside, other=0)
    # 3. Their sums, and their amaxes.
    if COLUMN_SUM:
        target = sums + tile_row * columns + 2 * word
        tl.store(target, tl.sum(_low(words_0, OFFSET) + _low(words_1, OFFSET), axis=0), mask=word < words)
        tl.store(target + 1, tl.sum(_high(words_0, OFFSET) + _high(words_1, OFFSET), axis=0), mask=word < words)
    numbers_0, numbers_1 = (words_0 & 0x7FFF7FFF) + PAIR, (words_1 & 0x7FFF7FFF) + PAIR
    if HAS_CODES_T or SQUARE:
        both = largest_along(larger(numbers_0, numbers_1), 0)
        amax_low, amax_high = float32_of(lower(both), OFFSET), float32_of(both >> 16, OFFSET)
    if HAS_CODES and not SQUARE:
        both_0, both_1 = largest_along(numbers_0, 1), largest_along(numbers_1, 1)
        amax_0 = float32_of(tl.maximum(lower(both_0), both_0 >> 16), OFFSET)
        amax_1 = float32_of(tl.maximum(lower(both_1), both_1 >> 16), OFFSET)
    if INF_TO_NAN:
        words_0 = _nan_for_inf(words_0, numbers_0, INTERPRETED)
        words_1 = _nan_for_inf(words_1, numbers_1, INTERPRETED)
    # 4. Multipliers and scales.
    padded_rows, padded_columns = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    if SQUARE:
        amax = tl.max(tl.maximum(amax_low, amax_high), axis=0)
        m_0, used = multiplier_of(amax, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
        m_1, m_low, m_high = m_0, m_0, m_0
        store_square_scales(scale, scale_t, tile_row, tile_column, tall, wide, used, HAS_CODES, HAS_CODES_T)
    else:
        if HAS_CODES:
            m_0, used_0 = multiplier_of(amax_0, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            m_1, used_1 = multiplier_of(amax_1, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            target = scale + tile_column * padded_rows
            store_scales(target, row_0, rows, padded_rows, used_0)
            store_scales(target, row_1, rows, padded_rows, used_1)
            m_0, m_1 = m_0[:, None], m_1[:, None]
        if HAS_CODES_T:
            m_low, used_low = multiplier_of(amax_low, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            m_high, used_high = multiplier_of(amax_high, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            target = scale_t + tile_row * padded_columns + 2 * word
            tl.store(target, tl.where(word < words, used_low, 1.0), mask=2 * word < padded_columns)
            tl.store(target + 1, tl.where(word < words, used_high, 1.0), mask=2 * word < padded_columns)
            m_low, m_high = m_low[None, :], m_high[None, :]
    # 5. Codes, two neighbours of a row a word.
    if HAS_CODES:
        # No mask within a row: it is a whole number of tiles.
        target = codes.to(tl.pointer_type(tl.uint16)) + row_0[:, None] * (wide * 64) + word[None, :]
        found_0 = pairs_of_codes(_high(words_0, OFFSET) * m_0, _low(words_0, OFFSET) * m_0, CODE, INTERPRETED)
        tl.store(target, found_0, mask=(row_0 < padded_rows)[:, None])
        found_1 = pairs_of_codes(_high(words_1, OFFSET) * m_1, _low(words_1, OFFSET) * m_1, CODE, INTERPRETED)
        tl.store(target + wide * 64, found_1, mask=(row_1 < padded_rows)[:, None])
    # 6. The other layout, two neighbours of a column a word.
    if HAS_CODES_T:
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + (2 * word)[:, None] * (tall * 64) + pair[None, :]
        inside_t = (2 * word < padded_columns)[:, None]
        low = pairs_of_codes(_low(words_1, OFFSET) * m_low, _low(words_0, OFFSET) * m_low, CODE, INTERPRETED)
        tl.store(target_t, tl.trans(low), mask=inside_t)
        high = pairs_of_codes(_high(words_1, OFFSET) * m_high, _high(words_0, OFFSET) * m_high, CODE, INTERPRETED)
        tl.store(target_t + tall * 64, tl.trans(high), mask=inside_t)


@triton.jit(
    do_not_specialize=("rows", "words", "stride_row"), do_not_specialize_on_alignment=("scale", "scale_t", "sums")
)
def packed_block_cast_kernel(
    x,
    codes,
    codes_t,
    scale,
    scale_t,
    sums,
    rows,
    words,
    stride_row,
    ALIGN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    SQUARE: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One tile of x [rows, 2 words], whose rows are contiguous; outputs as of `triton_kernel.block_cast_kernel`.

    words and stride_row, in words too, come in units of ALIGN.
    """
    cast_tile(
        tl.program_id(0), x, codes, codes_t, scale, scale_t, sums, rows, words, stride_row, ALIGN, OFFSET, HAS_CODES,
        HAS_CODES_T, SQUARE, EPSILON, POWER_OF_TWO, INF_TO_NAN, COLUMN_SUM, CODE, INTERPRETED, FORMAT_MAX, SMALLEST,
        LARGEST,
    )  # fmt: skip
