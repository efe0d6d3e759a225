"""cast_transpose on a GPU: each program reads one block of x and writes its codes in both layouts.

    code = convert(fp32(x) * m)     one multiplication rounded to nearest; the instruction saturates and keeps NaN

Rows are taken in pairs: the codes of two neighbours in a column are one 16-bit word, so that what passes through shared
memory to the other layout is a matrix of words and not of single bytes. (With bytes the kernel ran at 87 % of copy, with
words at 91 %: `benchmarks/LOG.md`.)

With a rule, programs run from the last block to the first: the pass that measured the amax has left the end of x in
the L2 cache.

What pads the extents to multiples of 16 is written by the blocks at the edge.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.launcher import Launcher, specialization
from octavo.kernels.layout import padded
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

# Rows and columns of a block (64 columns are 128 bytes of bf16, 64 of codes): of a small matrix, which has too few large
# blocks to fill the card; of one with so many elements or more; and of such a one with a scale a row or a column, of which
# a wide block loads fewer. As measured on an H200.
_BLOCK = (64, 64)
_BLOCK_LARGE = (128, 64)
_BLOCK_OF_VECTORS = (64, 128)
_LARGE = 1 << 25
WARPS = 4

_CODE_DTYPES = {E4M3.name: tl.float8e4nv, E5M2.name: tl.float8e5}


@triton.jit
def _multiplier(
    source,
    index,
    extent,
    VECTOR: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """(multiplier, scale) of `index`, or one for all unless VECTOR: given the scale, or the amax and
    the rule of `octavo.scaling.rules`.

    Divisions round to nearest: Triton's `/` is an approximation, off by up to 2 ulp. Every choice is a comparison that
    NaN fails, so that NaN passes through, as in the reference.
    """
    if VECTOR:
        given = tl.load(source + index, mask=index < extent, other=1.0)
    elif PARTIALS > 1:
        given = tl.max(tl.load(source + tl.arange(0, PARTIALS)), axis=0)
    else:
        given = tl.load(source)
    if FROM_AMAX:
        raised = tl.where(given < EPSILON, EPSILON, given)
        m = tl.div_rn(tl.full(raised.shape, FORMAT_MAX, tl.float32), raised)
        m = tl.where(raised == 0.0, 1.0, m)
        m = tl.where(m < SMALLEST, SMALLEST, m)
        m = tl.where(m > LARGEST, LARGEST, m)
        if POWER_OF_TWO:
            # Without its fraction, a normal float32 is the power of two below.
            m = (m.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m)
    else:
        scale = given
        m = tl.div_rn(tl.full(given.shape, 1.0, tl.float32), given)
    return m, scale


@triton.jit
def _scaled(values, multiplier, inside, INF_TO_NAN: tl.constexpr):
    """values * multiplier, float32, rounded once; 0 outside of the matrix, even if the multiplier is not a number."""
    product = values * multiplier
    if INF_TO_NAN:
        # inf - inf is NaN; 0 taken from anything changes nothing, the sign of a zero included.
        product = product - (values - values)
    return tl.where(inside, product, 0.0)


@triton.jit
def _pairs_of_codes(upper, lower, CODE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes of two float32 matrices as one of 16-bit words, each with that of `lower` in its low byte.

    The conversion writes pairs, and is asked for just these. (Made of single codes by shifts, the words came out wrong on
    sm_90 in some variants, though the PTX was right: Triton 3.6's ptxas. `check_kernels.py` looks at all of them.)
    """
    if INTERPRETED:
        low = lower.to(CODE).to(tl.uint8, bitcast=True).to(tl.uint16)
        words = low | (upper.to(CODE).to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
    elif CODE == tl.float8e4nv:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 first, second;
            cvt.rn.satfinite.e4m3x2.f32 first, $1, $3;
            cvt.rn.satfinite.e4m3x2.f32 second, $2, $4;
            mov.b32 $0, {first, second}; }""",
            "=r,f,f,f,f", [upper, lower], dtype=tl.uint16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 first, second;
            cvt.rn.satfinite.e5m2x2.f32 first, $1, $3;
            cvt.rn.satfinite.e5m2x2.f32 second, $2, $4;
            mov.b32 $0, {first, second}; }""",
            "=r,f,f,f,f", [upper, lower], dtype=tl.uint16, is_pure=True, pack=2,
        )  # fmt: skip
    return words


@triton.jit
def _largest_finite(magnitude):
    """The largest entry of a matrix of |x|, float32; inf and NaN count as 0."""
    return tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=1), axis=0)


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
            largest = tl.maximum(_largest_finite(tl.abs(values_0)), _largest_finite(tl.abs(values_1)))
        tl.atomic_max(gathered, largest, sem="relaxed")
    if COLUMN_SUM:
        total = tl.sum(values_0 + values_1, axis=0)
        tl.store(sums + tile_row.to(tl.int64) * columns + column, total, mask=column < columns)
    # 4. The codes; padding is zero even if the multiplier is not a number.
    within = (column < padded_columns)[None, :] & (row_0 < padded_rows)[:, None]
    if HAS_CODES:
        m_0, used_0 = _multiplier(
            rowwise, row_0, rows, BY_ROW, FROM_AMAX, PARTIALS, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST
        )
        m_1, used_1 = m_0, used_0
        if BY_ROW:
            m_1, used_1 = _multiplier(
                rowwise, row_1, rows, BY_ROW, FROM_AMAX, PARTIALS, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST
            )
            if tile_column == 0:
                tl.store(scale + row_0, tl.where(row_0 < rows, used_0, 1.0), mask=row_0 < padded_rows)
                tl.store(scale + row_1, tl.where(row_1 < rows, used_1, 1.0), mask=row_1 < padded_rows)
            m_0, m_1 = m_0[:, None], m_1[:, None]
        elif STORE_SCALE:
            tl.store(scale, used_0, mask=program == 0)
        scaled_0, scaled_1 = (
            _scaled(values_0, m_0, inside_0, INF_TO_NAN),
            _scaled(values_1, m_1, inside_1, INF_TO_NAN),
        )
        target = codes + row_0[:, None] * padded_columns + column[None, :]
        tl.store(target, scaled_0.to(CODE), mask=within)
        tl.store(target + padded_columns, scaled_1.to(CODE), mask=within)
    # 5. The other layout, two codes a word.
    if HAS_CODES_T:
        if not SHARED:
            m_t, used_t = _multiplier(
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
                _scaled(values_0, m_t, inside_0, INF_TO_NAN),
                _scaled(values_1, m_t, inside_1, INF_TO_NAN),
            )
        words = _pairs_of_codes(scaled_1, scaled_0, CODE, INTERPRETED)
        # The extent of codes_t in words; divisions and masks as the compiler needs them to store 16 bytes at once.
        width_t = (rows + 15) // 16 * 8
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + column[:, None] * width_t + pair[None, :]
        tl.store(target_t, tl.trans(words), mask=(column < padded_columns)[:, None] & (pair < width_t)[None, :])


# Triton's interpreter knows no assembly.
_INTERPRETED = not isinstance(cast_transpose_kernel, triton.runtime.JITFunction)


class _Call(NamedTuple):
    """A launch: what it writes, how many programs, and the kernel's arguments in three parts."""

    outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    programs: int
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, ...]
    constants: tuple[Any, ...]


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

    Traced, no output is an input: every scale is new (of a whole matrix [1]: a new scalar Inductor would fill before it
    is written).
    """
    rows, columns = x.shape
    padded_rows, padded_columns = padded(rows), padded(columns)
    shared = rowwise is columnwise
    by_row = rowwise is not None and rowwise.dim() == 2
    by_column = columnwise is not None and columnwise.dim() == 2
    codes = scale = codes_t = scale_t = sums = None
    # A given scale is taken as it is, unless it may be written to before its codes are multiplied.
    stores_scale = traced or rule is not None or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    scalar = (1,) if traced else ()
    if rowwise is not None:
        codes = x.new_empty((padded_rows, padded_columns), dtype=format.dtype)
        scale = rowwise
        if stores_scale or by_row:
            scale = x.new_empty((padded_rows, 1) if by_row else scalar, dtype=torch.float32)
    if columnwise is not None:
        codes_t = x.new_empty((padded_columns, padded_rows), dtype=format.dtype)
        scale_t = scale if shared else columnwise
        if not shared and (stores_scale or by_column):
            scale_t = x.new_empty((padded_columns, 1) if by_column else scalar, dtype=torch.float32)
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    large = not isinstance(rows, int) or rows * columns >= _LARGE
    block_rows, block_columns = _BLOCK
    if large:
        block_rows, block_columns = _BLOCK_OF_VECTORS if by_row or by_column else _BLOCK_LARGE
    tiles_tall, tiles_wide = -(-padded_rows // block_rows), -(-padded_columns // block_columns)
    if column_sum:
        sums = x.new_empty((tiles_tall, columns), dtype=torch.float32)
    rowwise, columnwise = _readable(rowwise), _readable(columnwise)
    # A pointer that the flags leave unused may be any; x itself would be materialised once more by the compiler.
    unused = codes if codes is not None else codes_t if codes_t is not None else x if gathered is None else gathered
    return _Call(
        (codes, scale, codes_t, scale_t, sums),
        tiles_tall * tiles_wide,
        (
            x,
            unused if codes is None else codes,
            unused if codes_t is None else codes_t,
            unused if rowwise is None else rowwise,
            unused if columnwise is None else columnwise,
            unused if scale is None else scale,
            unused if scale_t is None else scale_t,
            unused if gathered is None else gathered,
            unused if sums is None else sums,
        ),
        (rows, columns, x.stride(0)),
        (
            codes is not None,
            codes_t is not None,
            shared,
            by_row,
            by_column,
            rule is not None,
            1 if by_row or rowwise is None else rowwise.numel(),
            1 if by_column or columnwise is None else columnwise.numel(),
            0.0 if rule is None else rule.epsilon,
            rule is not None and rule.power_of_two,
            stores_scale,
            gathered is not None,
            inf_to_nan,
            column_sum,
            _CODE_DTYPES[format.name],
            _INTERPRETED,
            format.max,
            SMALLEST_MULTIPLIER,
            LARGEST_MULTIPLIER,
            block_rows,
            block_columns,
        ),
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
    """As `octavo.kernels.cast_transpose.cast_transpose`: E4M3 or E5M2, at least one element, a device of Triton's."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) != 1:
        if x.stride(0) == 1:
            # Contiguous the other way round: the transposed problem, with the roles of the layouts exchanged.
            codes_t, scale_t, codes, scale, _ = cast_transpose_triton(
                x.t(), format, _flipped(columnwise), _flipped(rowwise), rule, gathered, inf_to_nan
            )
            return codes, scale, codes_t, scale_t, x.sum(0, dtype=torch.float32) if column_sum else None
        x = x.contiguous()
    outputs, programs, tensors, numbers, constants = prepare(
        x, format, rowwise, columnwise, rule, gathered, inf_to_nan, column_sum
    )
    codes, scale, codes_t, scale_t, sums = outputs
    key = (x.dtype, x.data_ptr() % 16 == 0, numbers[0] >> 31, specialization(*numbers[1:]), format.name, constants)
    _launch_kernel(programs, key, tensors, numbers, constants, WARPS)
    return codes, scale, codes_t, scale_t, None if sums is None else sums.sum(0)
