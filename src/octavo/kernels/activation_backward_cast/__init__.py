"""activation_backward_cast: the gradient of an activation's input and its cast, in one pass over memory.

    dx [M, N]        = grad f'(x); of a gated function [grad second f'(first), grad f(first)]; float32, then `through`
    codes   [M', N'] = cast(dx / scale)           codes_t [N', M'] = codes^T
    gathered []      = max(gathered, largest finite |dx|)
    column_sum [N]   = sum of dx over its rows, in float32        (the gradient of the bias before the activation)

grad is [M, K], x is [M, N], N = K or 2K of a gated function (`octavo.kernels.activations` has them all). M' and N' are
M and N rounded up to a multiple of 16; what is added is zero. Bytes moved an element of grad in bf16: 4 read and 2
written (gated 6 and 4), against 4 more (8) of a backward and then a cast. With current scaling, where the scale comes
from the result, `activation_backward_output` writes the result with its amax, so that only the cast is left.

The gradients of relu, srelu and their gated kinds are the reference's to the bit; of the others `activation_cast` says
how far they are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.activation_backward_cast.reference import (
    activation_backward_cast_reference,
    activation_backward_output_reference,
)
from octavo.kernels.activations import GATED, check_activation
from octavo.kernels.library import register
from octavo.kernels.operands import check_matrix, check_scale, check_through, fake_codes, merge, one_part, present
from octavo.kernels.triton_support import cast_reasons, runs_inductor, runs_on, uses_triton


class ActivationBackwardCastOutput(NamedTuple):
    """codes [M', N'], their scale [], codes_t [N', M'], column_sum [N] or None."""

    codes: Tensor
    scale: Tensor
    codes_t: Tensor
    column_sum: Tensor | None


class ActivationBackwardOutput(NamedTuple):
    """output [M, N], the gradient in high precision, and amaxes [P] of its parts."""

    output: Tensor
    amaxes: Tensor


def activation_backward_cast(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    *,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = True,
    column_sum: bool = False,
) -> ActivationBackwardCastOutput:
    """Codes of the gradient of an activation's input, in both layouts, by a scale that is known.

    Args:
        grad: [M, K], that of the activation's result; any floating dtype, any strides.
        x: [M, K] or [M, 2K], the activation's input; the same.
        activation: its name, see `octavo.kernels.activations`.
        format: of the codes.
        scale: float32 [].
        through: what the float32 gradient is rounded to before it is cast, as a separate backward would have handed it
            on; None casts the float32 itself.
        gathered: float32 [], to which the amax of the gradient is added by max, in place.
        inf_to_nan: ±inf becomes NaN instead of ±M, so that a loss scaler still sees the overflow.
        column_sum: give the sums as well; the same in every run.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    _check("activation_backward_cast", grad, x, activation, through)
    check_scale("activation_backward_cast", scale)
    if not torch.compiler.is_compiling():
        return ActivationBackwardCastOutput(
            *_launch(grad, x, activation, format, scale, through, gathered, inf_to_nan, column_sum)
        )
    if runs_inductor(x, _width(x, activation), format.name):
        codes, used, codes_t, sums = _inductor().activation_backward_cast_inductor(
            grad, x, activation, format.name, scale, through, gathered, inf_to_nan, column_sum
        )
    else:
        codes, used, codes_t, sums, largest = _operator(
            grad, x, activation, format.name, scale, through, gathered is not None, inf_to_nan, column_sum
        )
        merge(gathered, largest)
    return ActivationBackwardCastOutput(codes, used, codes_t, sums if column_sum else None)


def activation_backward_output(
    grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype
) -> ActivationBackwardOutput:
    """The gradient in high precision, of the shape of x, with parts of its amax as `cast_transpose` takes them.

    Args: as of `activation_backward_cast`; dtype: bfloat16, float16 or float32, to which the gradient is rounded.
    """
    _check("activation_backward_output", grad, x, activation, dtype)
    if torch.compiler.is_compiling():
        if runs_inductor(x, _width(x, activation)):
            return ActivationBackwardOutput(
                *_inductor().activation_backward_output_inductor(grad, x, activation, dtype)
            )
        return ActivationBackwardOutput(*_output_operator(grad, x, activation, dtype))
    return ActivationBackwardOutput(*_launch_output(grad, x, activation, dtype))


def unsupported_reasons(x: Tensor, format: Format, activation: str = "relu") -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does. Halves count of a gated one."""
    return cast_reasons(x[:, : _width(x, activation)], format)


def _inductor() -> Any:
    from octavo.kernels import compiled_activations

    return compiled_activations


def _check(operation: str, grad: Tensor, x: Tensor, activation: str, through: torch.dtype | None) -> None:
    check_matrix(operation, "grad [M, K]", grad)
    check_matrix(operation, "x", x)
    check_activation(activation, x.shape[1])
    check_through(operation, through)
    expected = (x.shape[0], _width(x, activation))
    if grad.shape != expected:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}; for {activation} of x of shape {tuple(x.shape)} it takes"
            f" {list(expected)}"
        )


def _launch(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
    own_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if x.is_cuda and x.numel() and _width(x, activation) != 1 and runs_on(x.device.index, format.name):
        from octavo.kernels.activation_backward_cast.triton_kernel import activation_backward_cast_triton

        return activation_backward_cast_triton(
            grad, x, activation, format, scale, through, gathered, inf_to_nan, column_sum, own_scale
        )
    return activation_backward_cast_reference(
        grad, x, activation, format, scale, through, gathered, inf_to_nan, column_sum
    )


def _launch_output(grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # One column: bfloat16 is made in pairs as codes are, see `one_column_reasons`.
    if uses_triton(x) and x.numel() and _width(x, activation) != 1:
        from octavo.kernels.activation_backward_cast.triton_kernel import activation_backward_output_triton

        return activation_backward_output_triton(grad, x, activation, dtype)
    return activation_backward_output_reference(grad, x, activation, dtype)


def _width(x: Tensor, activation: str) -> int:
    return x.shape[1] // 2 if activation in GATED else x.shape[1]


def _implementation(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, ...]:
    gathered = x.new_zeros((), dtype=torch.float32) if gather else None
    outputs = _launch(
        grad, x, activation, format_named(format), scale, through, gathered, inf_to_nan, column_sum, own_scale=True
    )
    return present(*outputs, gathered, like=x)


def _fake(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, ...]:
    return present(
        *fake_codes(x, x.shape, format),
        x.new_empty((x.shape[1],), dtype=torch.float32) if column_sum else None,
        x.new_empty((), dtype=torch.float32) if gather else None,
        like=x,
    )


def _output_implementation(grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    output, amaxes = _launch_output(grad, x, activation, dtype)
    return output, one_part(amaxes)


_operator = register(
    "activation_backward_cast(Tensor grad, Tensor x, str activation, str format, Tensor scale, ScalarType? through,"
    " bool gather, bool inf_to_nan, bool column_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_output_operator = register(
    "activation_backward_output(Tensor grad, Tensor x, str activation, ScalarType dtype) -> (Tensor, Tensor)",
    _output_implementation,
    lambda grad, x, activation, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((1,), dtype=torch.float32),
    ),
)

__all__ = [
    "ActivationBackwardCastOutput",
    "ActivationBackwardOutput",
    "activation_backward_cast",
    "activation_backward_cast_reference",
    "activation_backward_output",
    "activation_backward_output_reference",
    "unsupported_reasons",
]
