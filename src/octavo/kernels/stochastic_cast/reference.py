"""stochastic_cast in plain PyTorch: the definition, of given random numbers."""

from __future__ import annotations

from torch import Tensor

from octavo.formats import Format
from octavo.kernels.amax import amax_by_row_and_column, partial_amax
from octavo.kernels.block_cast.reference import block_cast_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.scaling import PRODUCT_BLOCKS, TENSOR, Granularity

Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def stochastic_cast_reference(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule | None,
    scale: Tensor | None,
    uniform: Tensor,
    rowwise: bool = True,
    columnwise: bool = True,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> Outputs:
    """As `octavo.kernels.stochastic_cast.stochastic_cast`; any device. uniform: float64 [M, K] in [0, 1)."""
    # 1. Blocks bring their scales from the same read.
    if granularity in PRODUCT_BLOCKS:
        assert rule is not None, "scales by block are measured"
        return block_cast_reference(x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum, uniform)
    # 2. What each layout is scaled by: the scale, or amaxes by a rule.  [M, K] -> [] | [P] | [M, 1], [1, K]
    by_row = by_column = scale
    if scale is None:
        if granularity is TENSOR:
            by_row = by_column = partial_amax(x)
        else:
            by_row, by_column = amax_by_row_and_column(x, rowwise, columnwise)
    # 3. Values in units of the scale, rounded by the random numbers of their places.  [M, K] -> [M', K'], [K', M']
    return cast_transpose_reference(
        x,
        format,
        by_row if rowwise else None,
        by_column if columnwise else None,
        rule,
        None,
        inf_to_nan,
        column_sum,
        uniform,
    )
