"""block_cast in plain PyTorch: the definition."""

from __future__ import annotations

import math

from torch import Tensor

from octavo.formats import Format
from octavo.kernels.block_cast.layout import lay_out
from octavo.kernels.cast_transpose.reference import rounded
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.scaling import (
    MX,
    Granularity,
    block_amax,
    expand_scale,
    multiplier_from_amax,
    mx_multiplier,
    mx_scale,
    scale_from_multiplier,
)


def block_cast_reference(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool = True,
    columnwise: bool = True,
    inf_to_nan: bool = False,
    column_sum: bool = False,
    uniform: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `octavo.kernels.block_cast.block_cast`; any device.

    uniform: [M, K], rounds stochastically, see `octavo.formats.round_stochastically`; both layouts by the same numbers.
    """
    # 1. float32, and its sums.  [M, K] -> [K]
    x32 = x.float()
    sums = x32.sum(0) if column_sum else None
    # 2. Of a gradient, inf counts as NaN.
    if inf_to_nan:
        x32 = x32.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
    # 3. The matrix, and the transposed one, by blocks of its own rows: for 128x128 these are the same blocks.
    codes, scale = _one_layout(x32, format, granularity, rule, uniform) if rowwise else (None, None)
    uniform_t = None if uniform is None else uniform.t()
    codes_t, scale_t = _one_layout(x32.t(), format, granularity, rule, uniform_t) if columnwise else (None, None)
    return codes, scale, codes_t, scale_t, sums


def _one_layout(
    x: Tensor, format: Format, granularity: Granularity, rule: ScaleRule, uniform: Tensor | None
) -> tuple[Tensor, Tensor]:
    # 1. amax of each block, finite values only.  [M, K] -> [M or M / 128, K / 128 or / 32]
    amax = block_amax(x, granularity)
    # 2. Multiplier and scale, by the rule.
    multiplier, scale = _multiplier_and_scale(amax, format, granularity, rule)
    # 3. Codes.  [M, K]
    codes = rounded(x * expand_scale(multiplier, granularity, (x.shape[0], x.shape[1])), format, uniform)
    # 4. As the product reads them.
    return lay_out(codes.contiguous(), scale, granularity)


def _multiplier_and_scale(
    amax: Tensor, format: Format, granularity: Granularity, rule: ScaleRule
) -> tuple[Tensor, Tensor]:
    """Of amaxes [tall, wide]: both float32, but the scale of MX E8M0."""
    if granularity is MX:
        scale = mx_scale(amax, format, rule.rounding)
        return mx_multiplier(scale), scale
    multiplier = multiplier_from_amax(amax, format, epsilon=rule.epsilon, power_of_two=rule.power_of_two)
    return multiplier, scale_from_multiplier(multiplier)
