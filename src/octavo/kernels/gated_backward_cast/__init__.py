"""gated_backward_cast: the gradients of a gate and of what it multiplies, and their casts, in one pass over memory.

    dgate [M, K]     = grad up f'(gate)                      dup [M, K] = grad f(gate)        float32, then `through`
    codes   [M', K'] = cast(d / scale)                       codes_t [K', M'] = codes^T              of each
    gathered []      = max(gathered, largest finite |d|)                                             of each
    column_sum [K]   = sum of d over its rows, in float32    (the gradient of the bias before it)    of each

grad, gate and up are matrices [M, K]. The two gradients have a scale each, since they belong to two linear layers;
`octavo.kernels.activation_backward_cast` takes gate and up as halves of one matrix, with one scale. M' and K' are M and
K rounded up to a multiple of 16; what is added is zero. Bytes moved an element in bf16: 6 read and 4 written; a
backward of the product and of the activation, and two casts, read 16 and write 10. With current scaling, where scales
come from the results, `gated_backward_output` writes these with their amaxes, so that only the casts are left.

How far the twin is from the reference, `octavo.kernels.activation_cast` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.gated_backward_cast.reference import (
    Codes,
    Pair,
    gated_backward_cast_reference,
    gated_backward_output_reference,
)
from octavo.kernels.gated_cast import check_gated
from octavo.kernels.library import register
from octavo.kernels.operands import check_matrix, check_scale, fake_codes, merge, one_part, present
from octavo.kernels.triton_support import cast_reasons, runs_inductor, runs_on, uses_triton


class GradientCodes(NamedTuple):
    """codes [M', K'], their scale [], codes_t [K', M'], column_sum [K] or None."""

    codes: Tensor
    scale: Tensor
    codes_t: Tensor
    column_sum: Tensor | None


class GradientOutput(NamedTuple):
    """output [M, K], a gradient in high precision, and amaxes [P] of its parts."""

    output: Tensor
    amaxes: Tensor


def gated_backward_cast(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scales: Pair,
    *,
    through: torch.dtype | None = None,
    gathered: tuple[Tensor | None, Tensor | None] = (None, None),
    inf_to_nan: bool = True,
    column_sums: tuple[bool, bool] = (False, False),
) -> tuple[GradientCodes, GradientCodes]:
    """Codes of the gradients of gate and of up, in both layouts, by scales that are known.

    Args:
        grad: [M, K], that of f(gate) * up; any floating dtype, any strides.
        gate, up: [M, K], the same.
        activation: the name of f, one of `octavo.kernels.activations.PLAIN`.
        format: of all codes.
        scales: float32 [], of the gradient of gate and of that of up.
        through: what a float32 gradient is rounded to before it is cast, as a separate backward would have handed it
            on; None casts the float32 itself.
        gathered: float32 [] or None, of each: what its amax is added to by max, in place.
        inf_to_nan: ±inf becomes NaN instead of ±M, so that a loss scaler still sees the overflow.
        column_sums: of each, give the sums as well; the same in every run.

    Raises:
        ValueError: an argument has another shape or dtype, or the activation is unknown.
    """
    _check("gated_backward_cast", grad, gate, up, activation, through)
    for scale in scales:
        check_scale("gated_backward_cast", scale)
    if not torch.compiler.is_compiling():
        pair = _launch(grad, gate, up, activation, format, scales, through, gathered, inf_to_nan, column_sums)
        return GradientCodes(*pair[0]), GradientCodes(*pair[1])
    if runs_inductor(gate, gate.shape[1], format.name):
        from octavo.kernels.compiled_gated import gated_backward_cast_inductor

        of_gate, of_up = gathered
        outputs = gated_backward_cast_inductor(
            grad, gate, up, activation, format.name, *scales, through, of_gate, of_up, inf_to_nan, *column_sums
        )
    else:
        gathers = [largest is not None for largest in gathered]
        *outputs, largest_gate, largest_up = _operator(
            grad, gate, up, activation, format.name, *scales, through, *gathers, inf_to_nan, *column_sums
        )
        merge(gathered[0], largest_gate)
        merge(gathered[1], largest_up)
    codes, scale, codes_t, sums, codes_2, scale_2, codes_t_2, sums_2 = outputs
    return (
        GradientCodes(codes, scale, codes_t, sums if column_sums[0] else None),
        GradientCodes(codes_2, scale_2, codes_t_2, sums_2 if column_sums[1] else None),
    )


def gated_backward_output(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype
) -> tuple[GradientOutput, GradientOutput]:
    """The two gradients in high precision, each with parts of its amax as `cast_transpose` takes them.

    Args: as of `gated_backward_cast`; dtype: bfloat16, float16 or float32, to which the gradients are rounded.
    """
    _check("gated_backward_output", grad, gate, up, activation, dtype)
    if torch.compiler.is_compiling():
        operator = _output_operator
        if runs_inductor(gate, gate.shape[1]):
            from octavo.kernels.compiled_gated import gated_backward_output_inductor as operator
        dgate, dup, amaxes, amaxes_2 = operator(grad, gate, up, activation, dtype)
        return GradientOutput(dgate, amaxes), GradientOutput(dup, amaxes_2)
    pair = _launch_output(grad, gate, up, activation, dtype)
    return GradientOutput(*pair[0]), GradientOutput(*pair[1])


def unsupported_reasons(gate: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return cast_reasons(gate, format)


def _check(
    operation: str, grad: Tensor, gate: Tensor, up: Tensor, activation: str, through: torch.dtype | None
) -> None:
    check_matrix(operation, "grad [M, K]", grad)
    check_gated(operation, gate, up, activation, through)
    if grad.shape != gate.shape:
        raise ValueError(
            f"grad has shape {tuple(grad.shape)}; for a gate of shape {tuple(gate.shape)} it takes the same"
        )


def _launch(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scales: Pair,
    through: torch.dtype | None,
    gathered: tuple[Tensor | None, Tensor | None],
    inf_to_nan: bool,
    column_sums: tuple[bool, bool],
    own_scale: bool = False,
) -> tuple[Codes, Codes]:
    arguments = (grad, gate, up, activation, format, scales, through, gathered, inf_to_nan, column_sums)
    if gate.is_cuda and gate.numel() and gate.shape[1] != 1 and runs_on(gate.device.index, format.name):
        from octavo.kernels.gated_backward_cast.triton_kernel import gated_backward_cast_triton

        return gated_backward_cast_triton(*arguments, own_scale)
    return gated_backward_cast_reference(*arguments)


def _launch_output(grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Pair, Pair]:
    # One column: bfloat16 is made in pairs as codes are, see `one_column_reasons`.
    if uses_triton(gate) and gate.numel() and gate.shape[1] != 1:
        from octavo.kernels.gated_backward_cast.triton_kernel import gated_backward_output_triton

        return gated_backward_output_triton(grad, gate, up, activation, dtype)
    return gated_backward_output_reference(grad, gate, up, activation, dtype)


def _implementation(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale_gate: Tensor,
    scale_up: Tensor,
    through: torch.dtype | None,
    gather_gate: bool,
    gather_up: bool,
    inf_to_nan: bool,
    sum_gate: bool,
    sum_up: bool,
) -> tuple[Tensor, ...]:
    of_gate, of_up = (
        grad.new_zeros((), dtype=torch.float32) if gather else None for gather in (gather_gate, gather_up)
    )
    pair = _launch(
        grad, gate, up, activation, format_named(format), (scale_gate, scale_up), through, (of_gate, of_up),
        inf_to_nan, (sum_gate, sum_up), own_scale=True,
    )  # fmt: skip
    return present(*pair[0], *pair[1], of_gate, of_up, like=gate)


def _fake(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale_gate: Tensor,
    scale_up: Tensor,
    through: torch.dtype | None,
    gather_gate: bool,
    gather_up: bool,
    inf_to_nan: bool,
    sum_gate: bool,
    sum_up: bool,
) -> tuple[Tensor, ...]:
    def one(sums: bool) -> tuple[Tensor | None, ...]:
        column_sum = gate.new_empty((gate.shape[1],), dtype=torch.float32) if sums else None
        return *fake_codes(gate, gate.shape, format), column_sum

    gathered = [gate.new_empty((), dtype=torch.float32) if gather else None for gather in (gather_gate, gather_up)]
    return present(*one(sum_gate), *one(sum_up), *gathered, like=gate)


def _output_implementation(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    pair = _launch_output(grad, gate, up, activation, dtype)
    return *(output for output, _ in pair), *(one_part(amaxes) for _, amaxes in pair)


def _output_fake(grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((gate.shape, dtype),) * 2 + (((1,), torch.float32),) * 2
    return tuple(gate.new_empty(shape, dtype=kind) for shape, kind in shapes)


_operator = register(
    "gated_backward_cast(Tensor grad, Tensor gate, Tensor up, str activation, str format, Tensor scale_gate,"
    " Tensor scale_up, ScalarType? through, bool gather_gate, bool gather_up, bool inf_to_nan, bool sum_gate,"
    " bool sum_up) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_output_operator = register(
    "gated_backward_output(Tensor grad, Tensor gate, Tensor up, str activation, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _output_implementation,
    _output_fake,
)

__all__ = [
    "GradientCodes",
    "GradientOutput",
    "gated_backward_cast",
    "gated_backward_cast_reference",
    "gated_backward_output",
    "gated_backward_output_reference",
    "unsupported_reasons",
]
