"""What comes before a product and the cast of its result, in one pass where the scale is known beforehand.

    known scale (delayed after the first batch, static)   one kernel: the result exists as codes alone
    one scale measured from the result (current)          one kernel for the result and its amax, one cast
    a scale a row measured, row-wise codes alone          one kernel, which has the row at hand
    any other (by block, stochastic, observed)            the result, then the quantizer

The result is rounded to the dtype of the layer before it is scaled, as a separate layer would have handed it on. So all
three give the bits of the separate layers, and gather their amaxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.functional.products import Gradient, Needs, all_fp8, fp8_layouts, quantized_gradient
from octavo.kernels import cast_transpose
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.activations import PLAIN
from octavo.kernels.norm_cast import Norm, norm_cast, norm_output
from octavo.kernels.row_cast import gated_row_cast, norm_row_cast
from octavo.runtime import LinearPlan
from octavo.scaling import TENSOR
from octavo.tensor import CurrentQuantizer, DelayedQuantizer, Operand, Quantizer, QuantizeSpec, StaticQuantizer
from octavo.tensor.operand_state import is_captured


class Normalised(NamedTuple):
    """The operand of a normalised matrix [M, K]; its rows in high precision if asked for or made; the statistics."""

    operand: Operand
    rows: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class Activated(NamedTuple):
    """The operand of an activation's result [M, K]; the result in high precision if asked for or made."""

    operand: Operand
    rows: Tensor | None


class _Known(NamedTuple):
    """A scale [] that does not depend on the data, and where the amax of what is cast is gathered."""

    spec: QuantizeSpec
    scale: Tensor
    gathered: Tensor | None


def cast_normalised(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    quantizer: Quantizer,
    columnwise: bool,
    return_rows: bool,
) -> Normalised:
    """Normalise the rows of x [M, K] and quantize them, row-wise and on request column-wise too.

    Args:
        x: any floating dtype.
        norm: `through` is the dtype of the layer.
        weight, bias: [K] or None.
        quantizer: of the product's input.
        columnwise: both layouts.
        return_rows: the result in high precision is wanted too.
    """
    rows_of = None if columnwise else measuring_rows(quantizer)
    if rows_of is not None:
        spec = rows_of.spec
        codes, scale, rows, mean, rstd = norm_row_cast(
            x, norm, weight, bias, spec.format, spec.rule, return_output=return_rows
        )
        return Normalised(Operand(codes, scale, None, None), rows, mean, rstd)
    known = known_scale(quantizer, x)
    if known is None:
        output, amaxes, mean, rstd = norm_output(x, norm, weight, bias)
        return Normalised(quantized(output, amaxes, quantizer, True, columnwise), output, mean, rstd)
    codes, scale, codes_t, rows, mean, rstd = norm_cast(
        x,
        norm,
        weight,
        bias,
        known.spec.format,
        known.scale,
        gathered=known.gathered,
        columnwise=columnwise,
        return_output=return_rows,
    )
    operand = Operand(codes, scale, codes_t, scale if columnwise else None)
    note_cast(quantizer, known, operand, x)
    return Normalised(operand, rows, mean, rstd)


def cast_activated(
    z: Tensor,
    activation: str,
    quantizer: Quantizer,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    return_rows: bool,
    channels: Tensor | None = None,
) -> Activated:
    """Apply an activation to z [M, K] or [M, 2K] and quantize the result.

    Args:
        z: any floating dtype.
        activation: its name, see `octavo.kernels.activations`.
        quantizer: of the product's input.
        dtype: of the layer.
        rowwise, columnwise: the layouts.
        return_rows: the result in high precision is wanted too.
        channels: float32 [K], powers of two by which the columns are multiplied before the cast, not those that are
            returned.
    """
    # There is no kernel for both.
    rows_of = None if columnwise or return_rows or not rowwise or channels is not None else measuring_rows(quantizer)
    if rows_of is not None and activation in PLAIN:
        cast = gated_row_cast(z, None, activation, rows_of.spec.format, rows_of.spec.rule, through=dtype)
        return Activated(Operand(*cast, None, None), None)
    known = None if return_rows else known_scale(quantizer, z)
    if known is None and channels is not None and return_rows:
        output = activation_output(z, activation, dtype).output
        return Activated(quantizer((output.float() * channels).to(dtype), rowwise, columnwise), output)
    if known is None:
        output, amaxes = activation_output(z, activation, dtype, channels)
        return Activated(quantized(output, amaxes, quantizer, rowwise, columnwise), output)
    codes, scale, codes_t = activation_cast(
        z,
        activation,
        known.spec.format,
        known.scale,
        through=dtype,
        gathered=known.gathered,
        rowwise=rowwise,
        columnwise=columnwise,
        channels=channels,
    )
    operand = Operand(codes, scale if rowwise else None, codes_t, scale if columnwise else None)
    note_cast(quantizer, known, operand, z)
    return Activated(operand, None)


def cast_activation_gradient(
    da: Tensor, z: Tensor, activation: str, plan: LinearPlan, dtype: torch.dtype, needs: Needs
) -> Gradient:
    """The gradient of an activation's input as the products before the activation take it.

    Args:
        da: [M, K], of the activation's result.
        z: [M, K] or [M, 2K], the activation's input.
        activation: its name.
        plan: of the linear part that made z.
        dtype: of the layer.
        needs: what that part's backward computes.
    """
    known = known_scale(plan.grad_output, z) if all_fp8(plan, needs) else None
    if known is not None:
        out = activation_backward_cast(
            da,
            z,
            activation,
            known.spec.format,
            known.scale,
            through=dtype,
            gathered=known.gathered,
            inf_to_nan=known.spec.inf_to_nan,
            column_sum=needs.db,
        )
        operand = Operand(out.codes, out.scale, out.codes_t, out.scale, out.column_sum)
        note_cast(plan.grad_output, known, operand, z)
        return Gradient(None, operand)
    rows, amaxes = activation_backward_output(da, z, activation, dtype)
    return measured_gradient(rows, amaxes, plan, needs)


def measured_gradient(rows: Tensor, amaxes: Tensor, plan: LinearPlan, needs: Needs) -> Gradient:
    """A gradient [M, F] in high precision, whose amaxes [P] in parts are known, with its codes."""
    rowwise, columnwise = fp8_layouts(plan, needs)
    if not (rowwise or columnwise) or not _measures_one_scale(plan.grad_output):
        return quantized_gradient(rows, plan, needs)
    return Gradient(rows, quantized(rows, amaxes, plan.grad_output, rowwise, columnwise, needs.db))


def repeating(quantizer: Quantizer, scale: Tensor | None) -> Quantizer:
    """A quantizer that makes again what another one made with `scale`, and gathers nothing."""
    if not isinstance(quantizer, DelayedQuantizer):
        return quantizer
    measured = quantizer.from_data and quantizer.fixed is None
    return DelayedQuantizer(
        quantizer.spec, quantizer.state, gather=False, from_data=measured, scale=None if measured else scale
    )


def repeated_scale(quantizer: Quantizer, operand: Operand) -> Tensor | None:
    """The scale that `repeating` takes of what a quantizer made; None where it measures again."""
    return operand.scale if isinstance(quantizer, DelayedQuantizer) else None


def known_scale(quantizer: Quantizer, x: Tensor) -> _Known | None:
    """What a quantizer casts with, if it is known before the data is."""
    if isinstance(quantizer, StaticQuantizer):
        value = quantizer.spec.static_scale
        assert value is not None, "a static spec holds its scale"
        return _Known(quantizer.spec, torch.full((), value, dtype=torch.float32, device=x.device), None)
    if not isinstance(quantizer, DelayedQuantizer) or (quantizer.from_data and quantizer.fixed is None):
        return None
    if quantizer.spec.rounding == "stochastic":
        return None  # fused kernels round to nearest
    state, fixed = quantizer.state, quantizer.fixed
    scale = state.scale if fixed is None else fixed
    traced = torch.compiler.is_compiling()
    if state.late_bound and not traced:
        # The layer may have run in another format since the forward of this backward.
        scale = state.scale_for(quantizer.spec.format.max)
    if state.captured and fixed is None and not traced and not is_captured(x):
        # An update will write to it, and a backward may want it after that.
        scale = scale.clone()
    return _Known(quantizer.spec, scale, state.gathered if quantizer.gather else None)


def measuring_rows(quantizer: Quantizer) -> CurrentQuantizer | None:
    """A quantizer that measures a scale of each row, which the kernel that makes the row can do as well."""
    return quantizer if isinstance(quantizer, CurrentQuantizer) and quantizer.measures_rows else None


def note_cast(quantizer: Quantizer, known: _Known, operand: Operand, x: Tensor) -> None:
    """What a delayed quantizer notes of a cast of its own."""
    if not isinstance(quantizer, DelayedQuantizer):
        return
    if not torch.compiler.is_compiling() and is_captured(x):
        # What a graph reads stays where it is.
        quantizer.state.captured = True
    quantizer.note(operand if operand.scale is not None else operand.transposed)


def _measures_one_scale(quantizer: Quantizer) -> bool:
    return isinstance(quantizer, CurrentQuantizer) and quantizer.spec.granularity is TENSOR


def quantized(
    x: Tensor, amaxes: Tensor, quantizer: Quantizer, rowwise: bool, columnwise: bool, column_sum: bool = False
) -> Operand:
    """Codes of x [M, K], whose amaxes [P] in parts are known already."""
    if not _measures_one_scale(quantizer):
        return quantizer(x, rowwise, columnwise, column_sum) if column_sum else quantizer(x, rowwise, columnwise)
    assert isinstance(quantizer, CurrentQuantizer), "the only one that measures one scale"
    spec = quantizer.spec
    cast = cast_transpose(
        x,
        spec.format,
        amaxes if rowwise else None,
        amaxes if columnwise else None,
        rule=spec.rule,
        inf_to_nan=spec.inf_to_nan,
        column_sum=column_sum,
    )
    return Operand(*cast)
