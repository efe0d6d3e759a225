"""gated_cast: an activation of one matrix times another, and the cast of the product, in one pass over memory.

    y                = f(gate) * up                          float32, then rounded `through` a dtype
    codes   [M', K'] = cast(y / scale)            codes_t [K', M'] = codes^T
    gathered []      = max(gathered, largest finite |y|)

gate and up are matrices [M, K] of their own, as the two linear layers of a gated MLP give them, each with its scales;
`octavo.kernels.activation_cast` takes the two as halves of one matrix, and gives the same codes. M' and K' are M and K
rounded up to a multiple of 16; what is added is zero. Bytes moved an element in bf16: 4 read and 2 written, against 8
read and 6 written of an activation, a product and a cast. With current scaling, where the scale comes from the result,
`gated_output` writes it with its amax, so that only the cast is left.

How far the twin is from the reference, `octavo.kernels.activation_cast` says.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.activations import PLAIN
from octavo.kernels.gated_cast.reference import gated_cast_reference, gated_output_reference
from octavo.kernels.library import register
from octavo.kernels.operands import check_matrix, check_scale, check_through, fake_codes, merge, one_part, present
from octavo.kernels.triton_support import cast_reasons, runs_inductor, runs_on, uses_triton


class GatedCastOutput(NamedTuple):
    """codes [M', K'], their scale [], codes_t [K', M']; None for a layout that was not asked for."""

    codes: Tensor | None
    scale: Tensor
    codes_t: Tensor | None


class GatedOutput(NamedTuple):
    """output [M, K] in high precision, and amaxes [P] of its parts."""

    output: Tensor
    amaxes: Tensor


def gated_cast(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    *,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
) -> GatedCastOutput:
    """Codes of f(gate) * up, matrices [M, K] (any floating dtype, any strides), by a known scale.

    Args:
        gate, up: the matrices.
        activation: the name of f, one of `octavo.kernels.activations.PLAIN`.
        format: of the codes.
        scale: float32 [].
        through: what the float32 product is rounded to before it is cast, as a separate gate would have handed it on;
            None casts the float32 itself.
        gathered: float32 [], to which the amax of the product is added by max, in place.
        rowwise, columnwise: which layouts to give.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    check_gated("gated_cast", gate, up, activation, through)
    check_scale("gated_cast", scale)
    arguments = (gate, up, activation)
    if not torch.compiler.is_compiling():
        return GatedCastOutput(*_launch(*arguments, format, scale, through, gathered, rowwise, columnwise))
    if runs_inductor(gate, gate.shape[1], format.name):
        codes, used, codes_t = _inductor().gated_cast_inductor(
            *arguments, format.name, scale, through, gathered, rowwise, columnwise
        )
    else:
        codes, used, codes_t, largest = _operator(
            *arguments, format.name, scale, through, gathered is not None, rowwise, columnwise
        )
        merge(gathered, largest)
    return GatedCastOutput(codes if rowwise else None, used, codes_t if columnwise else None)


def gated_output(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> GatedOutput:
    """f(gate) * up in high precision, with parts of its amax as `cast_transpose` takes them.

    Args: as of `gated_cast`; dtype: bfloat16, float16 or float32, to which the float32 product is rounded.
    """
    check_gated("gated_output", gate, up, activation, dtype)
    if torch.compiler.is_compiling():
        if runs_inductor(gate, gate.shape[1]):
            return GatedOutput(*_inductor().gated_output_inductor(gate, up, activation, dtype))
        return GatedOutput(*_output_operator(gate, up, activation, dtype))
    return GatedOutput(*_launch_output(gate, up, activation, dtype))


def unsupported_reasons(gate: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return cast_reasons(gate, format)


def check_gated(operation: str, gate: Tensor, up: Tensor, activation: str, through: torch.dtype | None) -> None:
    """Raise ValueError unless gate and up are matrices of one shape, f is known, and values can be rounded so."""
    check_matrix(operation, "gate [M, K]", gate)
    check_matrix(operation, "up [M, K]", up)
    if up.shape != gate.shape:
        raise ValueError(f"up has shape {tuple(up.shape)}; for a gate of shape {tuple(gate.shape)} it takes the same")
    if activation not in PLAIN:
        raise ValueError(f"unknown activation {activation!r} of a gate: expected one of {', '.join(PLAIN)}")
    check_through(operation, through)


def _inductor() -> Any:
    from octavo.kernels import compiled_gated

    return compiled_gated


def _launch(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    own_scale: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    if gate.is_cuda and gate.numel() and gate.shape[1] != 1 and runs_on(gate.device.index, format.name):
        from octavo.kernels.gated_cast.triton_kernel import gated_cast_triton

        return gated_cast_triton(gate, up, activation, format, scale, through, gathered, rowwise, columnwise, own_scale)
    return gated_cast_reference(gate, up, activation, format, scale, through, gathered, rowwise, columnwise)


def _launch_output(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # One column: bfloat16 is made in pairs as codes are, see `one_column_reasons`.
    if uses_triton(gate) and gate.numel() and gate.shape[1] != 1:
        from octavo.kernels.gated_cast.triton_kernel import gated_output_triton

        return gated_output_triton(gate, up, activation, dtype)
    return gated_output_reference(gate, up, activation, dtype)


def _implementation(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, ...]:
    gathered = gate.new_zeros((), dtype=torch.float32) if gather else None
    outputs = _launch(
        gate, up, activation, format_named(format), scale, through, gathered, rowwise, columnwise, own_scale=True
    )
    return present(*outputs, gathered, like=gate)


def _fake(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gather: bool,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, ...]:
    return present(
        *fake_codes(gate, gate.shape, format, rowwise, columnwise),
        gate.new_empty((), dtype=torch.float32) if gather else None,
        like=gate,
    )


def _output_implementation(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    output, amaxes = _launch_output(gate, up, activation, dtype)
    return output, one_part(amaxes)


_operator = register(
    "gated_cast(Tensor gate, Tensor up, str activation, str format, Tensor scale, ScalarType? through, bool gather,"
    " bool rowwise, bool columnwise) -> (Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_output_operator = register(
    "gated_output(Tensor gate, Tensor up, str activation, ScalarType dtype) -> (Tensor, Tensor)",
    _output_implementation,
    lambda gate, up, activation, dtype: (
        gate.new_empty(gate.shape, dtype=dtype),
        gate.new_empty((1,), dtype=torch.float32),
    ),
)

__all__ = [
    "GatedCastOutput",
    "GatedOutput",
    "check_gated",
    "gated_cast",
    "gated_cast_reference",
    "gated_output",
    "gated_output_reference",
    "unsupported_reasons",
]
