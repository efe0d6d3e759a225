"""cast_transpose in plain PyTorch: the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import Format, cast_float32, round_stochastically
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.layout import pad_matrix, pad_row_scale
from octavo.scaling import TENSOR, multiplier_from_amax, scale_from_multiplier

_BITS = torch.uint8


def cast_transpose_reference(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = False,
    column_sum: bool = False,
    uniform: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """As `octavo.kernels.cast_transpose.cast_transpose`; any device.

    uniform: [M, K], rounds stochastically, see `octavo.formats.round_stochastically`; both layouts by the same numbers.
    """
    # 1. The amax of what came in joins the gathered one.  [M, K] -> []
    if gathered is not None:
        gathered.copy_(torch.maximum(gathered, amax_reference(x, TENSOR)))
    # 2. float32; of a gradient, inf counts as NaN.  Finite overflow of the product below still saturates.
    x32 = x.float()
    sums = x32.sum(0) if column_sum else None
    if inf_to_nan:
        x32 = x32.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
    codes = scale = codes_t = scale_t = None
    # 3. Scale, cast, fill up.  [M, K] -> [M', K']
    if rowwise is not None:
        multiplier, scale = multiplier_and_scale(rowwise, format, rule)
        # What need not be padded has the strides of x until here.
        codes = pad_matrix(rounded(x32 * multiplier, format, uniform).view(_BITS)).contiguous().view(format.dtype)
    # 4. The other layout: the same codes, or, with scales of its own, codes of its own.  [M, K] -> [K', M']
    if columnwise is rowwise and codes is not None:
        codes_t, scale_t = codes.t().clone(memory_format=torch.contiguous_format), scale
    elif columnwise is not None:
        multiplier, scale_t = multiplier_and_scale(columnwise, format, rule)
        transposed = rounded((x32 * multiplier).t().contiguous(), format, None if uniform is None else uniform.t())
        codes_t = pad_matrix(transposed.view(_BITS)).view(format.dtype)
        scale_t = scale_t if scale_t.dim() == 0 else scale_t.reshape(-1, 1)
    # 5. Codes of one layout never share memory with x or with the other; scales are filled up as codes are.
    return (
        codes,
        None if scale is None else pad_row_scale(scale),
        codes_t,
        None if scale_t is None else pad_row_scale(scale_t),
        sums,
    )


def rounded(x: Tensor, format: Format, uniform: Tensor | None) -> Tensor:
    """Codes of a float32 x: to nearest, or stochastically by `uniform`."""
    return cast_float32(x if uniform is None else round_stochastically(x, format, uniform), format)


def multiplier_and_scale(given: Tensor, format: Format, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    """The two reciprocals, each [] or [M, 1] or [1, K], of a scale, or of an amax by a rule."""
    if rule is None:
        scale = given.clone() if given.dim() == 2 else given.reshape(()).clone()
        return scale_from_multiplier(scale), scale
    amax = given if given.dim() == 2 else given.amax()
    multiplier = multiplier_from_amax(amax, format, epsilon=rule.epsilon, power_of_two=rule.power_of_two)
    return multiplier, scale_from_multiplier(multiplier)
