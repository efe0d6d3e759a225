"""activation_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activations import activated
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.scaling import TENSOR


def activation_cast_reference(
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    channels: Tensor | None = None,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """As `octavo.kernels.activation_cast.activation_cast`; any device."""
    # 1. The function in float32, as a separate activation would have handed it on.  [M, K] or [M, 2K] -> [M, K]
    y = activated(x.float(), activation)
    if through is not None:
        y = y.to(through)
    if channels is not None:
        y = y.float() * channels
    # 2. Scale, cast, fill up, turn.  [M, K] -> [M', K'], [K', M']
    sources = (scale if rowwise else None, scale if columnwise else None)
    codes, _, codes_t, _, _ = cast_transpose_reference(y, format, *sources, None, gathered)
    return codes, scale.reshape(()).clone(), codes_t


def activation_output_reference(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.activation_cast.activation_output`; any device."""
    # 1. The function in float32, rounded once.  [M, K] or [M, 2K] -> [M, K]
    output = activated(x.float(), activation).to(dtype)
    if channels is not None:
        output = (output.float() * channels).to(dtype)
    # 2. Its amax, in one part.  [M, K] -> [1]
    return output, amax_reference(output, TENSOR).reshape(1)
