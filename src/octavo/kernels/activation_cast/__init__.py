"""activation_cast: an activation function and the cast of its result, in one pass over memory.

    y                = f(x), or f(first half of x) * second half     float32, then rounded `through` a dtype
    y                = y * channels                                  on request: a power of two a column
    codes   [M', K'] = cast(y / scale)            codes_t [K', M'] = codes^T
    gathered []      = max(gathered, largest finite |y|)

x is [M, K], or [M, 2K] of a gated function (`octavo.kernels.activations` has them all). M' and K' are M and K rounded
up to a multiple of 16; what is added is zero. Bytes moved an element of the result in bf16: 2 read (4 if gated) and
2 written, against 2 more written and 2 more read of an activation and then a cast. With current scaling, where the
scale comes from the result, `activation_output` writes the result with its amax, so that only the cast is left. With
`channels` each column is multiplied by a power of two of its own, 4 bytes more a column: it is exact, and what is
rounded, gathered and cast is the product.

relu, srelu and their gated kinds are the reference's to the bit; of the others the twin's function differs by some
units in the last place of float32 (`triton_functions.py` has the bounds), so that a few results that lie next to the
middle of two codes take the other one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.activation_cast.reference import activation_cast_reference, activation_output_reference
from octavo.kernels.activations import GATED, check_activation
from octavo.kernels.library import register
from octavo.kernels.operands import check_matrix, check_scale, check_through, fake_codes, merge, one_part, present
from octavo.kernels.triton_support import cast_reasons, runs_inductor, runs_on, uses_triton


class ActivationCastOutput(NamedTuple):
    """codes [M', K'], their scale [], codes_t [K', M']; None for a layout that was not asked for."""

    codes: Tensor | None
    scale: Tensor
    codes_t: Tensor | None


class ActivationOutput(NamedTuple):
    """output [M, K] in high precision, and amaxes [P] of its parts."""

    output: Tensor
    amaxes: Tensor


def activation_cast(
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    *,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    channels: Tensor | None = None,
) -> ActivationCastOutput:
    """Codes of the activation of a matrix x [M, K] or [M, 2K] (any floating dtype, any strides), by a known scale.

    Args:
        x: the matrix.
        activation: its name, see `octavo.kernels.activations`.
        format: of the codes.
        scale: float32 [].
        through: what the float32 result is rounded to before it is cast, as a separate activation would have handed it
            on; None casts the float32 itself.
        gathered: float32 [], to which the amax of the result is added by max, in place.
        rowwise, columnwise: which layouts to give.
        channels: float32 [K], powers of two, by which the columns are multiplied after they are rounded.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    _check("activation_cast", x, activation, through, channels)
    check_scale("activation_cast", scale)
    if not torch.compiler.is_compiling():
        return ActivationCastOutput(
            *_launch(x, activation, format, scale, through, gathered, rowwise, columnwise, channels)
        )
    if runs_inductor(x, _width(x, activation), format.name):
        codes, used, codes_t = _inductor().activation_cast_inductor(
            x, activation, format.name, scale, through, gathered, rowwise, columnwise, channels
        )
    else:
        codes, used, codes_t, largest = _operator(
            x, activation, format.name, scale, through, gathered is not None, rowwise, columnwise, channels
        )
        merge(gathered, largest)
    return ActivationCastOutput(codes if rowwise else None, used, codes_t if columnwise else None)


def activation_output(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None = None
) -> ActivationOutput:
    """The activation of x in high precision, with parts of its amax as `cast_transpose` takes them.

    Args: as of `activation_cast`; dtype: bfloat16, float16 or float32, to which the float32 result is rounded.
    """
    _check("activation_output", x, activation, dtype, channels)
    if torch.compiler.is_compiling():
        if runs_inductor(x, _width(x, activation)):
            return ActivationOutput(*_inductor().activation_output_inductor(x, activation, dtype, channels))
        return ActivationOutput(*_output_operator(x, activation, dtype, channels))
    return ActivationOutput(*_launch_output(x, activation, dtype, channels))


def unsupported_reasons(x: Tensor, format: Format, activation: str = "relu") -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does. Halves count of a gated one."""
    return cast_reasons(x[:, : _width(x, activation)], format)


def _inductor() -> Any:
    from octavo.kernels import compiled_activations

    return compiled_activations


def _check(operation: str, x: Tensor, activation: str, through: torch.dtype | None, channels: Tensor | None) -> None:
    check_matrix(operation, "x", x)
    check_activation(activation, x.shape[1])
    check_through(operation, through)
    if channels is not None and (channels.dtype != torch.float32 or channels.shape != (_width(x, activation),)):
        raise ValueError(
            f"{operation} takes float32 channels [{_width(x, activation)}], one for each column of the result, found"
            f" {channels.dtype} of shape {tuple(channels.shape)}"
        )


def _launch(
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    channels: Tensor | None = None,
    own_scale: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    if x.is_cuda and x.numel() and _width(x, activation) != 1 and runs_on(x.device.index, format.name):
        from octavo.kernels.activation_cast.triton_kernel import activation_cast_triton

        return activation_cast_triton(
            x, activation, format, scale, through, gathered, rowwise, columnwise, channels, own_scale
        )
    return activation_cast_reference(x, activation, format, scale, through, gathered, rowwise, columnwise, channels)


def _launch_output(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    # One column: bfloat16 is made in pairs as codes are, see `one_column_reasons`.
    if uses_triton(x) and x.numel() and _width(x, activation) != 1:
        from octavo.kernels.activation_cast.triton_kernel import activation_output_triton

        return activation_output_triton(x, activation, dtype, channels)
    return activation_output_reference(x, activation, dtype, channels)


def _width(x: Tensor, activation: str) -> int:
    return x.shape[1] // 2 if activation in GATED else x.shape[1]


def _implementation(
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    rowwise: bool,
    columnwise: bool,
    channels: Tensor | None,
) -> tuple[Tensor, ...]:
    gathered = x.new_zeros((), dtype=torch.float32) if gather else None
    outputs = _launch(
        x, activation, format_named(format), scale, through, gathered, rowwise, columnwise, channels, own_scale=True
    )
    return present(*outputs, gathered, like=x)


def _fake(
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    rowwise: bool,
    columnwise: bool,
    channels: Tensor | None,
) -> tuple[Tensor, ...]:
    return present(
        *fake_codes(x, (x.shape[0], _width(x, activation)), format, rowwise, columnwise),
        x.new_empty((), dtype=torch.float32) if gather else None,
        like=x,
    )


def _output_implementation(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None
) -> tuple[Tensor, Tensor]:
    output, amaxes = _launch_output(x, activation, dtype, channels)
    return output, one_part(amaxes)


_operator = register(
    "activation_cast(Tensor x, str activation, str format, Tensor scale, ScalarType? through, bool gather,"
    " bool rowwise, bool columnwise, Tensor? channels) -> (Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_output_operator = register(
    "activation_output(Tensor x, str activation, ScalarType dtype, Tensor? channels) -> (Tensor, Tensor)",
    _output_implementation,
    lambda x, activation, dtype, channels: (
        x.new_empty((x.shape[0], _width(x, activation)), dtype=dtype),
        x.new_empty((1,), dtype=torch.float32),
    ),
)

__all__ = [
    "ActivationCastOutput",
    "ActivationOutput",
    "activation_cast",
    "activation_cast_reference",
    "activation_output",
    "activation_output_reference",
    "unsupported_reasons",
]
