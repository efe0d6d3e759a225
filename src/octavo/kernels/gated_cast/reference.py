"""gated_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activations import activated
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.scaling import TENSOR


def gated_cast_reference(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """As `octavo.kernels.gated_cast.gated_cast`; any device."""
    # 1. The product in float32, as a separate gate would have handed it on.  [M, K], [M, K] -> [M, K]
    y = activated(gate.float(), activation) * up.float()
    if through is not None:
        y = y.to(through)
    # 2. Scale, cast, fill up, turn.  [M, K] -> [M', K'], [K', M']
    sources = (scale if rowwise else None, scale if columnwise else None)
    codes, _, codes_t, _, _ = cast_transpose_reference(y, format, *sources, None, gathered)
    return codes, scale.reshape(()).clone(), codes_t


def gated_output_reference(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.gated_cast.gated_output`; any device."""
    # 1. The product in float32, rounded once.  [M, K], [M, K] -> [M, K]
    output = (activated(gate.float(), activation) * up.float()).to(dtype)
    # 2. Its amax, in one part.  [M, K] -> [1]
    return output, amax_reference(output, TENSOR).reshape(1)
