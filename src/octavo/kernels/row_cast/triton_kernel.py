"""row_cast on a GPU: a program has a row, in registers, from the read to the codes."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.activation_cast.triton_functions import activated
from octavo.kernels.amax.triton_kernel import finite_magnitude
from octavo.kernels.codes import multiplier_of_amax, scaled
from octavo.kernels.tile import load_rows, rounded


@triton.jit
def _store_row(
    codes,
    scale,
    values,
    inside,
    row,
    column,
    rows,
    columns,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE: tl.constexpr,
):
    """Codes of one row under the scale of its own amax; a row that was added is zero, and its scale 1."""
    largest = tl.max(tl.where(inside, finite_magnitude(values), 0.0), axis=0)
    m = multiplier_of_amax(largest, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
    own = tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m)
    tl.store(scale + row, tl.where(row < rows, own, 1.0))
    padded_columns = (columns + 15) // 16 * 16
    target = codes + row * padded_columns + column
    tl.store(target, scaled(values, m, inside, False).to(CODE), mask=column < padded_columns)


@triton.jit(do_not_specialize=("rows",))
def row_cast_kernel(
    x,
    codes,
    scale,
    rows,
    columns,
    stride_row,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of x [rows, columns] -> codes [padded rows, padded columns], scale [padded rows]."""
    # 64 bits, since an offset can exceed 2^31.
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = (column < columns) & (row < rows)
    values = load_rows(x + row * stride_row + column, inside)
    _store_row(
        codes, scale, values, inside, row, column, rows, columns, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST,
        CODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def gated_row_cast_kernel(
    gate,
    up,
    codes,
    scale,
    rows,
    columns,
    stride_gate,
    stride_up,
    BASE: tl.constexpr,
    GATED: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row of f(gate) * up, both [rows, columns], or of f(gate) -> codes, scale."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = (column < columns) & (row < rows)
    values = activated(load_rows(gate + row * stride_gate + column, inside), BASE, INTERPRETED)
    if GATED:
        values = values * load_rows(up + row * stride_up + column, inside)
    values = rounded(values, THROUGH, INTERPRETED)
    _store_row(
        codes, scale, values, inside, row, column, rows, columns, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST,
        CODE,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def norm_row_cast_kernel(
    x,
    weight,
    bias,
    codes,
    scale,
    output,
    mean,
    rstd,
    rows,
    columns,
    stride_row,
    CENTRED: tl.constexpr,
    NORM_EPSILON: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    THROUGH: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    CODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One normalised row of x [rows, columns] -> codes, scale, output [rows, columns], mean and rstd [rows]."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    within = column < columns
    inside = within & (row < rows)
    values = load_rows(x + row * stride_row + column, inside)
    # 1. Statistics of the row, which is at hand twice over.
    total = tl.sum(values, axis=0)
    count = tl.full(total.shape, 1.0, tl.float32) * columns.to(tl.float32)
    if CENTRED:
        middle = tl.div_rn(total, count)
        values = tl.where(inside, values - middle, 0.0)
        tl.store(mean + row, middle, mask=row < rows)
    variance = tl.div_rn(tl.sum(values * values, axis=0), count)
    factor = tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(variance + NORM_EPSILON))
    tl.store(rstd + row, factor, mask=row < rows)
    # 2. The result, each step rounded.
    values = values * factor
    if HAS_WEIGHT:
        values = values * (load_rows(weight + column, within) + ADDED)
    if HAS_BIAS:
        values = values + load_rows(bias + column, within)
    values = rounded(values, THROUGH, INTERPRETED)
    if HAS_OUTPUT:
        tl.store(output + row * columns + column, values.to(output.dtype.element_ty), mask=inside)
    # 3. Its codes.
    _store_row(
        codes, scale, values, inside, row, column, rows, columns, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST,
        CODE,
    )  # fmt: skip
