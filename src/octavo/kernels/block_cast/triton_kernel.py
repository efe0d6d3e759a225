"""block_cast on a GPU: each program reads one tile of 128 x 128 and writes its codes in both layouts.

    code = convert(fp32(x) * m)     one multiplication rounded to nearest; the instruction saturates and keeps NaN

A tile holds 128 blocks along its rows and 128 along its columns, or one of 128x128: all amaxes come from the one read,
and its values stay in registers until both layouts are written. Rows are taken in pairs, so that what passes through
shared memory to the other layout are words of two codes, as in `octavo.kernels.cast_transpose.triton_kernel`.

What pads the extents is written by the tiles at the edge. A multiplier is always finite here, so what is read as zero
outside of the matrix becomes the code zero.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.amax.packed_kernel import OFFSETS, is_packed
from octavo.kernels.block_cast.layout import scale_shape, whole_blocks
from octavo.kernels.block_cast.packed_kernel import OPTIONS, packed_block_cast_kernel
from octavo.kernels.block_cast.tile_scales import multiplier_of, store_scales, store_square_scales
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.codes import CODE_DTYPES, pairs_of_codes
from octavo.kernels.launcher import Launcher, WithOptions, common_alignment, specialization
from octavo.kernels.layout import padded
from octavo.kernels.sum_kernel import joined_sums
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

# Measured on an H200, TB/s of a cast of 16384 x 8192 of bf16 into both layouts with 4, 8 and 16 warps: 1x128 2.96,
# 2.98, 1.55; with the sums of a gradient 2.11, 1.25, 0.97; 128x128 2.88, 3.36, 2.43. (Values read once more for each
# layout, from the L1 cache, in place of held ones: 1.83, 2.27, 1.80; 1.82, 1.55, 0.89; 2.00, 2.59, 2.12.)
WARPS = {BLOCK_1X128: 4, BLOCK_128X128: 8}
# The same in words, 4 and 8 warps: 1x128 3.60 (3.75 with `OPTIONS`), 3.17; 128x128 3.83, 3.81.
PACKED_WARPS = {BLOCK_1X128: 4, BLOCK_128X128: 4}


@triton.jit
def _load(source, inside, INF_TO_NAN: tl.constexpr):
    """float32 values, 0 outside; of a gradient, inf as NaN."""
    values = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if INF_TO_NAN:
        # inf - inf is NaN; 0 taken from anything changes nothing, the sign of a zero included.
        values = values - (values - values)
    return values


@triton.jit
def _finite_magnitude(values):
    """|x|; 0 where x is inf or NaN."""
    magnitude = tl.abs(values)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


# What is not in the launcher's key must not make a variant: the number of rows, which is that of the tokens, and where
# scales and sums lie.
@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("scale", "scale_t", "sums"))
def block_cast_kernel(
    x,
    codes,
    codes_t,
    scale,
    scale_t,
    sums,
    rows,
    columns,
    stride_row,
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
    """One tile of x [rows, columns], whose rows are contiguous.

    -> codes [rows to 16, columns to 128], codes_t [columns to 16, rows to 128]; sums [blocks of rows * columns];
    1x128: scale [blocks of columns, rows to 16], scale_t [blocks of rows, columns to 16];
    SQUARE: scale [blocks of rows, blocks of columns to 4], scale_t [blocks of columns, blocks of rows to 4].
    """
    # 1. Which tile; 64 bits, since an offset can exceed 2^31.
    tall, wide = (rows + 127) // 128, (columns + 127) // 128
    program = tl.program_id(0)
    tile_row, tile_column = (program // wide).to(tl.int64), (program % wide).to(tl.int64)
    pair = tile_row * 64 + tl.arange(0, 64)
    column = tile_column * 128 + tl.arange(0, 128)
    row_0, row_1 = 2 * pair, 2 * pair + 1
    # 2. Its values, even rows and odd ones, each [64, 128]: where, and what is inside.
    source_0 = x + row_0[:, None] * stride_row + column[None, :]
    source_1 = source_0 + stride_row
    inside_0 = (row_0 < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (row_1 < rows)[:, None] & (column < columns)[None, :]
    # 3. Their sums, and their amaxes.
    if COLUMN_SUM:
        total = tl.sum(_load(source_0, inside_0, False) + _load(source_1, inside_1, False), axis=0)
        tl.store(sums + tile_row * columns + column, total, mask=column < columns)
    values_0, values_1 = _load(source_0, inside_0, INF_TO_NAN), _load(source_1, inside_1, INF_TO_NAN)
    finite_0, finite_1 = _finite_magnitude(values_0), _finite_magnitude(values_1)
    by_column = tl.max(tl.maximum(finite_0, finite_1), axis=0)
    # 4. Multipliers and scales.
    padded_rows, padded_columns = (rows + 15) // 16 * 16, (columns + 15) // 16 * 16
    if SQUARE:
        m_0, used = multiplier_of(tl.max(by_column, axis=0), EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
        m_1, m_t = m_0, m_0
        store_square_scales(scale, scale_t, tile_row, tile_column, tall, wide, used, HAS_CODES, HAS_CODES_T)
    else:
        if HAS_CODES:
            m_0, used_0 = multiplier_of(tl.max(finite_0, axis=1), EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            m_1, used_1 = multiplier_of(tl.max(finite_1, axis=1), EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            target = scale + tile_column * padded_rows
            store_scales(target, row_0, rows, padded_rows, used_0)
            store_scales(target, row_1, rows, padded_rows, used_1)
            m_0, m_1 = m_0[:, None], m_1[:, None]
        if HAS_CODES_T:
            m_t, used_t = multiplier_of(by_column, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
            target = scale_t + tile_row * padded_columns + column
            tl.store(target, tl.where(column < columns, used_t, 1.0), mask=column < padded_columns)
            m_t = m_t[None, :]
    # 5. Codes.
    if HAS_CODES:
        # No mask within a row: it is a whole number of tiles.
        target = codes + row_0[:, None] * (wide * 128) + column[None, :]
        tl.store(target, (values_0 * m_0).to(CODE), mask=(row_0 < padded_rows)[:, None])
        tl.store(target + wide * 128, (values_1 * m_1).to(CODE), mask=(row_1 < padded_rows)[:, None])
    # 6. The other layout, two codes a word.
    if HAS_CODES_T:
        words = pairs_of_codes(values_1 * m_t, values_0 * m_t, CODE, INTERPRETED)
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + column[:, None] * (tall * 64) + pair[None, :]
        tl.store(target_t, tl.trans(words), mask=(column < padded_columns)[:, None])


# Triton's interpreter knows no assembly.
_INTERPRETED = not isinstance(block_cast_kernel, triton.runtime.JITFunction)


class _Call(NamedTuple):
    """A launch: the kernel, what it writes, how many programs, arguments in three parts, and warps a program."""

    kernel: Any
    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    programs: int
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]
    warps: int


def prepare(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
    packed: bool,
) -> _Call:
    """The launch for an x whose rows are contiguous; its sums [blocks of rows * K] are partial.

    packed: x is what `octavo.kernels.amax.packed_kernel.is_packed` asks for.
    """
    rows, columns = x.shape
    tall, wide = whole_blocks(rows), whole_blocks(columns)
    codes = scale = codes_t = scale_t = sums = None
    if rowwise:
        codes = x.new_empty((padded(rows), wide), dtype=format.dtype)
        scale = x.new_empty(scale_shape(rows, columns, granularity), dtype=torch.float32)
    if columnwise:
        codes_t = x.new_empty((padded(columns), tall), dtype=format.dtype)
        scale_t = x.new_empty(scale_shape(columns, rows, granularity), dtype=torch.float32)
    if column_sum:
        sums = x.new_empty((tall // 128 * columns,), dtype=torch.float32)
    # A pointer that the flags leave unused may be any; x itself would be materialised once more by the compiler.
    unused = codes if codes is not None else codes_t
    assert unused is not None, "a cast into no layout is not launched"
    outputs = (codes, scale, codes_t, scale_t, sums)
    order = (codes, codes_t, scale, scale_t, sums)
    tensors = (x, *(unused if out is None else out for out in order))
    programs = (tall // 128) * (wide // 128)
    numbers: tuple[Any, ...] = (rows, columns, x.stride(0))
    constants: tuple[Any, ...] = (
        rowwise,
        columnwise,
        granularity is BLOCK_128X128,
        rule.epsilon,
        rule.power_of_two,
        inf_to_nan,
        column_sum,
        CODE_DTYPES[format.name],
        _INTERPRETED,
        format.max,
        SMALLEST_MULTIPLIER,
        LARGEST_MULTIPLIER,
    )
    if not packed:
        return _Call(block_cast_kernel, outputs, programs, tensors, numbers, constants, WARPS[granularity])
    in_words = columns // 2, x.stride(0) // 2
    align = common_alignment(*in_words)
    numbers = rows, *(number // align for number in in_words)
    constants = (align, OFFSETS[x.dtype], *constants)
    return _Call(packed_block_cast_kernel, outputs, programs, tensors, numbers, constants, PACKED_WARPS[granularity])


_launch_general = Launcher(block_cast_kernel)
_launch_packed = Launcher(WithOptions(packed_block_cast_kernel, **OPTIONS))


def block_cast_triton(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool = True,
    columnwise: bool = True,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `octavo.kernels.block_cast.block_cast`: E4M3 or E5M2, columns and layouts, a device of Triton's."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) != 1:
        if x.stride(0) == 1 and x.shape[0] != 1:
            # Contiguous the other way round: the transposed problem, with the roles of the layouts exchanged. (Of one
            # row it would be a problem of one column, see `one_column_reasons`.)
            codes_t, scale_t, codes, scale, _ = block_cast_triton(
                x.t(), format, granularity, rule, columnwise, rowwise, inf_to_nan
            )
            return codes, scale, codes_t, scale_t, x.sum(0, dtype=torch.float32) if column_sum else None
        x = x.contiguous()
    kernel, outputs, programs, tensors, numbers, constants, warps = prepare(
        x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum, is_packed(x)
    )
    codes, scale, codes_t, scale_t, sums = outputs
    if kernel is packed_block_cast_kernel:
        # None of the numbers has more than 31 bits.
        key: tuple[Any, ...] = (x.dtype, format.name, constants)
        _launch_packed(programs, key, tensors, numbers, constants, warps)
    else:
        aligned = x.data_ptr() % 16 == 0
        key = (x.dtype, aligned, numbers[0] >> 31, specialization(*numbers[1:]), format.name, constants)
        _launch_general(programs, key, tensors, numbers, constants, warps)
    return codes, scale, codes_t, scale_t, None if sums is None else joined_sums(sums, x.shape[1])
