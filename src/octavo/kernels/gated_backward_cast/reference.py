"""gated_backward_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activations import activated, activation_gradient
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.scaling import TENSOR

# codes, scale, codes_t, column_sum of one gradient.
Codes = tuple[Tensor, Tensor, Tensor, Tensor | None]
Pair = tuple[Tensor, Tensor]


def gated_backward_cast_reference(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scales: Pair,
    through: torch.dtype | None = None,
    gathered: tuple[Tensor | None, Tensor | None] = (None, None),
    inf_to_nan: bool = True,
    column_sums: tuple[bool, bool] = (False, False),
) -> tuple[Codes, Codes]:
    """As `octavo.kernels.gated_backward_cast.gated_backward_cast`; any device."""
    results = []
    for dx, scale, largest, sums in zip(
        # 1. Both gradients in float32.  [M, K]
        _gradients(grad, gate, up, activation), scales, gathered, column_sums, strict=True
    ):  # fmt: skip
        # 2. As a separate backward would have handed it on: scale, cast, fill up, turn, sum.  [M, K] -> [M', K'], …
        codes, _, codes_t, _, total = cast_transpose_reference(
            dx if through is None else dx.to(through), format, scale, scale, None, largest, inf_to_nan, sums
        )
        assert codes is not None, "both layouts were asked for"
        assert codes_t is not None, "both layouts were asked for"
        results.append((codes, scale.reshape(()).clone(), codes_t, total))
    return results[0], results[1]


def gated_backward_output_reference(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Pair, Pair]:
    """As `octavo.kernels.gated_backward_cast.gated_backward_output`; any device."""
    # 1. Both gradients in float32, rounded once.  [M, K]
    dgate, dup = (dx.to(dtype) for dx in _gradients(grad, gate, up, activation))
    # 2. Their amaxes, each in one part.  [M, K] -> [1]
    return (dgate, amax_reference(dgate, TENSOR).reshape(1)), (dup, amax_reference(dup, TENSOR).reshape(1))


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> Pair:
    """(grad up f'(gate), grad f(gate)) in float32."""
    grad, gate, up = grad.float(), gate.float(), up.float()
    return activation_gradient(grad * up, gate, activation), grad * activated(gate, activation)
