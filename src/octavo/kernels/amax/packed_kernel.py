"""amax by row and by column of bf16 and fp16, two elements at a time.

    |x| finite  ->  (bits of x without the sign) + (0x8000 - bits of inf)      a positive int16, in the order of |x|
    inf, NaN    ->  the same, but negative

So one instruction compares two pairs of elements (`max.s16x2`, Hopper and later), and nothing is converted to float32
but what leaves the kernel. (16384 x 8192 of bf16 on an H200: 98 % of copy's rate, 73 % element by element in
the loop of `triton_kernel`; see `benchmarks/LOG.md`.)
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launcher import common_alignment

# 0x8000 less the bits of inf.
OFFSETS = {torch.bfloat16: 0x0080, torch.float16: 0x0400}
# Rows of a block and words of two elements in each; a program takes several blocks one below the other, so many that
# there are about four programs for each multiprocessor of an H200. As measured on one.
_BLOCK_ROWS = 32
_BLOCK_WORDS = 128
_PROGRAMS = 528


@triton.jit
def atomic_max(target, value, mask):
    """Raise float32 in memory to values, neither of them negative: of those the order is that of their bits.

    (Of floats Triton makes two atomics, one for each sign.)
    """
    target = target.to(tl.pointer_type(tl.int32))
    tl.atomic_max(target, value.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def lower(pairs):
    """The lower of two int16, as int32."""
    return (pairs << 16) >> 16


@triton.jit
def larger(a, b):
    """The larger of each of two pairs of int16."""
    if INTERPRETED:
        high, low = tl.maximum(a >> 16, b >> 16), tl.maximum(lower(a), lower(b))
        out = (high << 16) | (low & 0xFFFF)
    else:
        out = tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)
    return out


@triton.jit
def largest_along(pairs, axis: tl.constexpr):
    """The largest of each of two int16 along an axis."""
    if INTERPRETED:
        # Which calls Python for each element of a reduction by a function of one's own.
        out = (tl.max(pairs >> 16, axis=axis) << 16) | (tl.max(lower(pairs), axis=axis) & 0xFFFF)
    else:
        out = tl.reduce(pairs, axis, larger)
    return out


@triton.jit
def float32_of(number, OFFSET: tl.constexpr):
    """The magnitude that an int16, here in an int32, stands for; 0 for what is not finite."""
    bits = tl.maximum(number, OFFSET) - OFFSET
    if OFFSET == 0x0080:
        value = (bits << 16).to(tl.float32, bitcast=True)
    else:
        value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit(
    do_not_specialize=("rows", "words", "stride_row", "blocks"),
    do_not_specialize_on_alignment=("by_row", "by_column"),
)
def packed_amax_kernel(
    x,
    by_row,
    by_column,
    rows,
    words,
    stride_row,
    blocks,
    ALIGN: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COLUMN: tl.constexpr,
    OFFSET: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """`blocks` blocks of x [rows, 2 words] (rows contiguous), one below the other.

    -> their part of by_row [rows] and by_column [2 words], by max. words and stride_row, in words too, come in units of
    ALIGN.
    """
    PAIR: tl.constexpr = OFFSET << 16 | OFFSET
    words = words * ALIGN
    stride_row = stride_row * ALIGN
    tiles_wide = tl.cdiv(words, BLOCK_WORDS)
    # 64 bits where a program and a block begin, since an offset can exceed 2^31; 32 within (see `is_packed`).
    first = (tl.program_id(0) // tiles_wide).to(tl.int64) * (BLOCK_ROWS * blocks)
    begin = (tl.program_id(0) % tiles_wide).to(tl.int64) * BLOCK_WORDS
    row, word = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WORDS)
    source = x.to(tl.pointer_type(tl.int32)) + first * stride_row + begin
    within = row[:, None] * stride_row + word[None, :]
    inside = (begin + word < words)[None, :]
    left = (rows - first).to(tl.int32)
    target = by_row + first
    largest = tl.full([BLOCK_ROWS, BLOCK_WORDS], PAIR, tl.int32)
    for _ in range(blocks):
        # No carry leaves the lower half: 0x7FFF + OFFSET is less than 0x10000.
        found = tl.load(source + within, mask=(row < left)[:, None] & inside, other=0)
        numbers = (found & 0x7FFF7FFF) + PAIR
        if HAS_ROW:
            both = largest_along(numbers, 1)
            value = float32_of(tl.maximum(lower(both), both >> 16), OFFSET)
            atomic_max(target + row, value, row < left)
        largest = larger(largest, numbers)
        source += BLOCK_ROWS * stride_row.to(tl.int64)
        target += BLOCK_ROWS
        left -= BLOCK_ROWS
    if HAS_COLUMN:
        both = largest_along(largest, 0)
        value = tl.interleave(float32_of(lower(both), OFFSET), float32_of(both >> 16, OFFSET))
        column = 2 * begin + tl.arange(0, 2 * BLOCK_WORDS)
        atomic_max(by_column + column, value, column < 2 * words)


# Triton's interpreter knows no assembly.
INTERPRETED = tl.constexpr(not isinstance(larger, triton.runtime.JITFunction))


def is_packed(x: Tensor) -> bool:
    """Whether the kernel takes x (rows contiguous): of 16-bit elements, in words that begin where words do."""
    # A kernel rounds rows up to whole blocks of 128.
    return has_rows_of_words(x) and x.shape[0] <= 2**31 - 128 and x.data_ptr() % 16 == 0


def has_rows_of_words(x: Tensor) -> bool:
    """Whether each row of x (contiguous) is a row of words if the first one is."""
    columns, stride_row = x.shape[1], x.stride(0)
    # What the kernel counts in 32 bits, besides rows: columns, and offsets within a block.
    counts = max(columns, _BLOCK_ROWS * stride_row) < 2**31
    return x.dtype in OFFSETS and columns % 2 == 0 and stride_row % 2 == 0 and counts


def packed_arguments(x: Tensor, row: bool, column: bool) -> tuple[int, tuple[int, ...], tuple[Any, ...]]:
    """(programs, numbers, constants) of a launch."""
    rows, words, stride_row = x.shape[0], x.shape[1] // 2, x.stride(0) // 2
    align = common_alignment(words, stride_row)
    wide = -(-words // _BLOCK_WORDS)
    # A power of two.
    blocks = 1 << (max(1, rows * wide // (_BLOCK_ROWS * _PROGRAMS)).bit_length() - 1)
    programs = -(-rows // (_BLOCK_ROWS * blocks)) * wide
    numbers = rows, words // align, stride_row // align, blocks
    return programs, numbers, (align, row, column, OFFSETS[x.dtype], _BLOCK_ROWS, _BLOCK_WORDS)
