"""activation_channel_amax: how large each channel of an activation's result becomes, without writing the result.

    y           = f(x), or f(first half of x) * second half     float32, then rounded `through` a dtype
    amaxes [K]  = largest finite |y| of each column
    gathered [] = max(gathered, largest of them)

x is [M, K], or [M, 2K] of a gated function (`octavo.kernels.activations` has them all). It is the first of two reads of
x: `activation_cast` with a factor a channel is the other. Bytes moved an element of the result in bf16, with both: 4
read (8 if gated) and 2 written. Keeping y between the two would move 2 + 2 for the 2 (4) of the second read.

Of activations that rest on exponentials an amax may differ from the reference's in its last bits, as
`octavo.kernels.activation_cast` says of their results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.activation_channel_amax.reference import activation_channel_amax_reference
from octavo.kernels.activations import GATED, check_activation
from octavo.kernels.library import register
from octavo.kernels.operands import check_matrix, check_through, merge
from octavo.kernels.triton_support import device_reasons, one_column_reasons, uses_triton


def activation_channel_amax(
    x: Tensor, activation: str, through: torch.dtype | None = None, gathered: Tensor | None = None
) -> Tensor:
    """Largest finite magnitude of each column of an activation's result -> float32 [K].

    Args:
        x: [M, K] or [M, 2K], any floating dtype, any strides.
        activation: its name, see `octavo.kernels.activations`.
        through: what the float32 result is rounded to, as a separate activation would have handed it on; None looks at
            the float32 itself.
        gathered: float32 [], to which the largest is added by max, in place.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    check_matrix("activation_channel_amax", "x", x)
    check_activation(activation, x.shape[1])
    check_through("activation_channel_amax", through)
    if torch.compiler.is_compiling():
        amaxes: Tensor = _operator(x, activation, through)
    else:
        amaxes = _launch(x, activation, through)
    if gathered is not None and amaxes.numel():
        merge(gathered, amaxes.amax())
    return amaxes


def unsupported_reasons(x: Tensor, activation: str = "relu") -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return device_reasons(x.device) + one_column_reasons(x[:, : _width(x, activation)])


def _launch(x: Tensor, activation: str, through: torch.dtype | None) -> Tensor:
    # One column: bfloat16 is made in pairs as codes are, see `one_column_reasons`.
    if uses_triton(x) and x.numel() and _width(x, activation) != 1:
        from octavo.kernels.activation_channel_amax.triton_kernel import activation_channel_amax_triton

        return activation_channel_amax_triton(x, activation, through)
    return activation_channel_amax_reference(x, activation, through)


def _width(x: Tensor, activation: str) -> int:
    return x.shape[1] // 2 if activation in GATED else x.shape[1]


_operator = register(
    "activation_channel_amax(Tensor x, str activation, ScalarType? through) -> Tensor",
    _launch,
    lambda x, activation, through: x.new_empty((_width(x, activation),), dtype=torch.float32),
)

__all__ = ["activation_channel_amax", "activation_channel_amax_reference", "unsupported_reasons"]
