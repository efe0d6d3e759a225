"""stochastic_cast: codes of a matrix in both layouts, each rounded to one of its two neighbours by chance.

    codes   [M', K']    round(x / scale, u)         u [M, K] uniform in [0, 1), drawn by each call
    codes_t [K', M']    round(x / scale_t, u)^T     the same u: under one scale, or 128x128, the very codes of `codes`

The probability of a neighbour is the distance to the other, so that the expectation is x (what saturates excepted):
`octavo.formats.round_stochastically`. Scales, layouts, padding and specials are those of `cast_transpose`, and of
`block_cast` for scales by block.

The numbers come from torch's default generator of x's device, one float64 an element, row by row: `torch.manual_seed`
decides on the codes. Compiled code draws as it runs, from the same generator; two casts of one tensor to the same spec
are one there, as all others that repeat one another.

Plain PyTorch on every device, for which there is no Triton twin: about a dozen passes over memory, and 8 bytes an
element for the numbers alone. On a GPU that is many times the price of the nearest cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.block_cast.layout import block_of, scale_dtype, scale_shape, whole_blocks
from octavo.kernels.cast_transpose import CastOutput, ScaleRule
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.stochastic_cast.reference import Outputs, stochastic_cast_reference
from octavo.scaling import PRODUCT_BLOCKS, ROW, TENSOR, Granularity, ScaleRounding, granularity_named


def stochastic_cast(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    *,
    rule: ScaleRule | None = None,
    scale: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> CastOutput:
    """Codes of a matrix x [M, K] (any floating dtype, any strides), rounded stochastically.

    Args:
        x: the matrix.
        format: of both layouts.
        granularity: TENSOR, ROW, BLOCK_1X128, BLOCK_128X128 or MX, along the rows of each layout.
        rule: how scales come from amaxes; None if `scale` is given.
        scale: float32 [], of the whole matrix; None measures.
        rowwise, columnwise: give `codes`, give `codes_t`.
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients, so that a loss scaler still sees the overflow.
        column_sum: give the sums over rows as well, of x itself.

    Raises:
        ValueError: x is no floating-point matrix, the granularity another one, or both or neither of rule and scale.
    """
    if (rule is None) == (scale is None) or (scale is not None and granularity is not TENSOR):
        raise ValueError(f"give a rule, or one scale of granularity tensor; found {rule}, {scale} and {granularity}")
    if torch.compiler.is_compiling():
        given = ScaleRule() if rule is None else rule
        outputs = _operator(
            x, format.name, granularity.name, scale, *given, rowwise, columnwise, inf_to_nan, column_sum
        )
        wanted = (rowwise, rowwise, columnwise, columnwise, column_sum)
        codes, by_row, codes_t, by_column, sums = (
            out if want else None for out, want in zip(outputs, wanted, strict=True)
        )
        return CastOutput(codes, by_row, codes_t, by_column, sums)
    return CastOutput(*_launch(x, format, granularity, rule, scale, rowwise, columnwise, inf_to_nan, column_sum))


def _launch(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule | None,
    scale: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> Outputs:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"stochastic_cast takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}"
        )
    if granularity not in (TENSOR, ROW, *PRODUCT_BLOCKS):
        raise ValueError(f"granularity is {granularity}: products take tensor, row, 1x128, 128x128 or mx")
    uniform = torch.rand(x.shape, dtype=torch.float64, device=x.device)
    return stochastic_cast_reference(
        x, format, granularity, rule, scale, uniform, rowwise, columnwise, inf_to_nan, column_sum
    )


def _operator_implementation(
    x: Tensor,
    format: str,
    granularity: str,
    scale: Tensor | None,
    epsilon: str,
    power_of_two: bool,
    rounding: ScaleRounding,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, ...]:
    rule = ScaleRule(epsilon, power_of_two, rounding) if scale is None else None
    blocks = granularity_named(granularity)
    outputs = _launch(x, format_named(format), blocks, rule, scale, rowwise, columnwise, inf_to_nan, column_sum)
    codes, by_row, codes_t, by_column, sums = outputs
    # An operator returns tensors only, none of them twice: what was left out is an empty one.
    by_column = by_column.clone() if by_column is by_row and by_column is not None else by_column
    return tuple(x.new_empty(0) if out is None else out for out in (codes, by_row, codes_t, by_column, sums))


def _fake(
    x: Tensor,
    format: str,
    granularity: str,
    scale: Tensor | None,
    epsilon: str,
    power_of_two: bool,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, ...]:
    (rows, columns), dtype, blocks = x.shape, format_named(format).dtype, granularity_named(granularity)

    def layout(wanted: bool, tall: int, wide: int) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0), x.new_empty(0)
        if blocks in PRODUCT_BLOCKS:
            codes = x.new_empty((padded(tall), whole_blocks(wide, block_of(blocks))), dtype=dtype)
            return codes, x.new_empty(scale_shape(tall, wide, blocks), dtype=scale_dtype(blocks))
        of_rows = (padded(tall), 1) if blocks is ROW else ()
        return x.new_empty((padded(tall), padded(wide)), dtype=dtype), x.new_empty(of_rows, dtype=torch.float32)

    sums = x.new_empty((columns,), dtype=torch.float32) if column_sum else x.new_empty(0)
    return *layout(rowwise, rows, columns), *layout(columnwise, columns, rows), sums


_operator = register(
    "stochastic_cast(Tensor x, str format, str granularity, Tensor? scale, str epsilon, bool power_of_two,"
    " str rounding, bool rowwise, bool columnwise, bool inf_to_nan, bool column_sum)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_implementation,
    _fake,
    random=True,
)

__all__ = ["stochastic_cast", "stochastic_cast_reference"]
