"""activation_backward_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activations import activation_gradient
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.scaling import TENSOR


def activation_backward_cast_reference(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = True,
    column_sum: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `octavo.kernels.activation_backward_cast.activation_backward_cast`; any device."""
    # 1. The gradient of x in float32, as a separate backward would have handed it on.  -> the shape of x, [M, N]
    dx = activation_gradient(grad.float(), x.float(), activation)
    if through is not None:
        dx = dx.to(through)
    # 2. Scale, cast, fill up, turn, sum.  [M, N] -> [M', N'], [N', M'], [N]
    codes, _, codes_t, _, sums = cast_transpose_reference(
        dx, format, scale, scale, None, gathered, inf_to_nan, column_sum
    )
    assert codes is not None, "both layouts were asked for"
    assert codes_t is not None, "both layouts were asked for"
    return codes, scale.reshape(()).clone(), codes_t, sums


def activation_backward_output_reference(
    grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.activation_backward_cast.activation_backward_output`; any device."""
    # 1. The gradient of x in float32, rounded once.  -> the shape of x, [M, N]
    dx = activation_gradient(grad.float(), x.float(), activation).to(dtype)
    # 2. Its amax, in one part.  [M, N] -> [1]
    return dx, amax_reference(dx, TENSOR).reshape(1)
