"""cast_transpose on a GPU: each program reads one block of x and writes its codes in both layouts.

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

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.codes import CODE_DTYPES, INTERPRETED, largest_finite, multiplier_and_scale, pairs_of_codes, scaled
from octavo.kernels.launcher import Key, Launcher, specialization
from octavo.kernels.layout import padded
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

# Rows and columns of a block (64 columns are 128 bytes of bf16, 64 of codes): of a small matrix, which has too few
# large blocks to fill the card; of one with so many elements or more; and of such a one with a scale a row or a column,
# of which a wide block loads fewer. As measured on an H200.
_BLOCK = (64, 64)
_BLOCK_LARGE = (128, 64)
_BLOCK_OF_VECTORS = (64, 128)
_LARGE = 1 << 25
WARPS = 4


# What is not in the launcher's key must not make a variant: the number of rows, which is that of the tokens, and where
# among others a scale or an amax lies.
@triton.jit(
    do_not_specialize=("rows",),
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
    """One block of x [rows, columns], whose rows are contiguous.

    -> codes [padded rows, padded columns] with scale, codes_t its transpose with scale_t, gathered [], and
    sums [blocks of rows, columns]. SHARED: both layouts hold the same codes. BY_ROW, BY_COLUMN: what is given is a
    vector; else PARTIALS, PARTIALS_T numbers whose largest counts. STORE_SCALE: a scale of the whole matrix is written
    too.
    """
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
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


class _Layout(NamedTuple):
    """What of a launch follows from shapes and flags: the shapes of what it writes, and arguments of the kernel."""

    codes: tuple[int, int]
    scale: tuple[int, ...] | None
    codes_t: tuple[int, int]
    scale_t: tuple[int, ...] | None
    sums: tuple[int, int]
    programs: int
    key: Key
    numbers: tuple[int, int, int]
    constants: tuple[Any, ...]


class _Flags(NamedTuple):
    """What a call asks for; of amaxes given for the whole matrix, how many."""

    format: str
    has_codes: bool
    has_codes_t: bool
    shared: bool
    by_row: bool
    by_column: bool
    partials: int
    partials_t: int
    rule: ScaleRule | None
    stores_scale: bool
    gathers: bool
    inf_to_nan: bool
    column_sum: bool
    traced: bool


class _Call(NamedTuple):
    """A launch: what it writes, how many programs, the key of its variant, and the arguments in three parts."""

    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    programs: int
    key: Key
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, int, int]
    constants: tuple[Any, ...]


def _layout(rows: Any, columns: int, stride_row: int, flags: _Flags) -> _Layout:
    padded_rows, padded_columns = padded(rows), padded(columns)
    block_rows, block_columns = _BLOCK
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    if not isinstance(rows, int) or rows * columns >= _LARGE:
        block_rows, block_columns = _BLOCK_OF_VECTORS if flags.by_row or flags.by_column else _BLOCK_LARGE
    tiles_tall, tiles_wide = -(-padded_rows // block_rows), -(-padded_columns // block_columns)
    rule = flags.rule
    # A new scalar Inductor would fill before it is written, a vector it leaves alone.
    whole = None if not flags.stores_scale else (1,) if flags.traced else ()
    constants = (
        flags.has_codes,
        flags.has_codes_t,
        flags.shared,
        flags.by_row,
        flags.by_column,
        rule is not None,
        flags.partials,
        flags.partials_t,
        0.0 if rule is None else rule.epsilon,
        rule is not None and rule.power_of_two,
        flags.stores_scale,
        flags.gathers,
        flags.inf_to_nan,
        flags.column_sum,
        CODE_DTYPES[flags.format],
        INTERPRETED,
        format_named(flags.format).max,
        SMALLEST_MULTIPLIER,
        LARGEST_MULTIPLIER,
        block_rows,
        block_columns,
    )
    numbers = rows, columns, stride_row
    # Traced, nothing is launched by a key, nor is anything asked of the numbers.
    key = Key() if flags.traced else Key((rows >> 31, specialization(columns, stride_row), flags.format, constants))
    return _Layout(
        (padded_rows, padded_columns),
        (padded_rows, 1) if flags.by_row else whole,
        (padded_columns, padded_rows),
        (padded_columns, 1) if flags.by_column else whole,
        (tiles_tall, columns),
        tiles_tall * tiles_wide,
        key,
        numbers,
        constants,
    )


# A training asks for the same few again and again.
_kept_layout = functools.lru_cache(maxsize=1024)(_layout)


def prepare(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
    traced: bool = False,
) -> _Call:
    """The launch for an x whose rows are contiguous; its sums [blocks of rows, K] are partial.

    Traced, no output is an input: every scale is new, of a whole matrix [1].
    """
    rows, columns = x.shape
    shared = rowwise is columnwise
    by_row = rowwise is not None and rowwise.dim() == 2
    by_column = columnwise is not None and columnwise.dim() == 2
    read, read_t = _readable(rowwise), _readable(columnwise)
    # A given scale is taken as it is, unless it may be written to before its codes are multiplied.
    stores_scale = traced or rule is not None or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    flags = _Flags(
        format.name,
        rowwise is not None,
        columnwise is not None,
        shared,
        by_row,
        by_column,
        1 if by_row or read is None else read.numel(),
        1 if by_column or read_t is None else read_t.numel(),
        rule,
        stores_scale,
        gathered is not None,
        inf_to_nan,
        column_sum,
        traced,
    )
    layout = (_layout if traced else _kept_layout)(rows, columns, x.stride(0), flags)
    codes = scale = codes_t = scale_t = sums = None
    if rowwise is not None:
        codes = x.new_empty(layout.codes, dtype=format.dtype)
        scale = rowwise if layout.scale is None else x.new_empty(layout.scale, dtype=torch.float32)
    if columnwise is not None:
        codes_t = x.new_empty(layout.codes_t, dtype=format.dtype)
        if shared:
            scale_t = scale
        else:
            scale_t = columnwise if layout.scale_t is None else x.new_empty(layout.scale_t, dtype=torch.float32)
    if column_sum:
        sums = x.new_empty(layout.sums, dtype=torch.float32)
    # A pointer that the flags leave unused may be any; x itself would be materialised once more by the compiler.
    unused = codes if codes is not None else codes_t if codes_t is not None else x if gathered is None else gathered
    return _Call(
        (codes, scale, codes_t, scale_t, sums),
        layout.programs,
        layout.key,
        (
            x,
            unused if codes is None else codes,
            unused if codes_t is None else codes_t,
            unused if read is None else read,
            unused if read_t is None else read_t,
            unused if scale is None else scale,
            unused if scale_t is None else scale_t,
            unused if gathered is None else gathered,
            unused if sums is None else sums,
        ),
        layout.numbers,
        layout.constants,
    )


def _readable(given: Tensor | None) -> Tensor | None:
    """Scales or amaxes as the kernel reads them: without gaps, and partial amaxes a power of two in number."""
    if given is None:
        return None
    if given.dim() != 2 and given.numel() & (given.numel() - 1):
        return given.amax()
    return given.contiguous()


def _flipped(given: Tensor | None) -> Tensor | None:
    return given if given is None or given.dim() != 2 else given.reshape(given.shape[1], given.shape[0])


_launch_kernel = Launcher(cast_transpose_kernel)


def cast_transpose_triton(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `octavo.kernels.cast_transpose.cast_transpose`: E4M3 or E5M2, more than one column, a device of Triton's."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) != 1:
        if x.stride(0) == 1 and x.shape[0] != 1:
            # Contiguous the other way round: the transposed problem, with the roles of the layouts exchanged. (Of one
            # row it would be a problem of one column, see `one_column_reasons`.)
            codes_t, scale_t, codes, scale, _ = cast_transpose_triton(
                x.t(), format, _flipped(columnwise), _flipped(rowwise), rule, gathered, inf_to_nan
            )
            return codes, scale, codes_t, scale_t, x.sum(0, dtype=torch.float32) if column_sum else None
        x = x.contiguous()
    outputs, programs, key, tensors, numbers, constants = prepare(
        x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum
    )
    codes, scale, codes_t, scale_t, sums = outputs
    _launch_kernel(programs, (x.dtype, x.data_ptr() % 16 == 0, key), tensors, numbers, constants, WARPS)
    return codes, scale, codes_t, scale_t, None if sums is None else sums.sum(0)
