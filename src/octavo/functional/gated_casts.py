"""The gate of an MLP whose two first products are two layers: its product's cast, and the casts of both gradients.

    a  [M, F] = f(gate) * up                     gate, up [M, F], each of a product of its own
    dgate = da up f'(gate)    dup = da f(gate)   each with the scale of its own layer

As `octavo.functional.fused_casts` has it of one matrix: in one pass where scales are known beforehand, else the result,
with its amax if one scale is measured from it, and then the quantizer. The same bits either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.functional.fused_casts import (
    Activated,
    known_scale,
    measured_gradient,
    measuring_rows,
    note_cast,
    quantized,
)
from octavo.functional.products import Gradient, Needs, all_fp8
from octavo.kernels.gated_backward_cast import gated_backward_cast, gated_backward_output
from octavo.kernels.gated_cast import gated_cast, gated_output
from octavo.kernels.row_cast import gated_row_cast
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, Quantizer

Plans = tuple[LinearPlan, LinearPlan]


def cast_gated(
    gate: Tensor,
    up: Tensor,
    activation: str,
    quantizer: Quantizer,
    dtype: torch.dtype,
    rowwise: bool,
    columnwise: bool,
    return_rows: bool,
) -> Activated:
    """f(gate) * up and its codes.

    Args:
        gate, up: [M, F], any floating dtype.
        activation: the name of f.
        quantizer: of the product's input.
        dtype: of the layer.
        rowwise, columnwise: the layouts.
        return_rows: the result in high precision is wanted too.
    """
    # There is no kernel for both.
    rows_of = None if columnwise or return_rows or not rowwise else measuring_rows(quantizer)
    if rows_of is not None:
        cast = gated_row_cast(gate, up, activation, rows_of.spec.format, rows_of.spec.rule, through=dtype)
        return Activated(Operand(*cast, None, None), None)
    known = None if return_rows else known_scale(quantizer, gate)
    if known is None:
        output, amaxes = gated_output(gate, up, activation, dtype)
        return Activated(quantized(output, amaxes, quantizer, rowwise, columnwise), output)
    codes, scale, codes_t = gated_cast(
        gate,
        up,
        activation,
        known.spec.format,
        known.scale,
        through=dtype,
        gathered=known.gathered,
        rowwise=rowwise,
        columnwise=columnwise,
    )
    operand = Operand(codes, scale if rowwise else None, codes_t, scale if columnwise else None)
    note_cast(quantizer, known, operand, gate)
    return Activated(operand, None)


def cast_gated_gradients(
    da: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    plans: Plans,
    dtype: torch.dtype,
    needs: tuple[Needs, Needs],
) -> tuple[Gradient, Gradient]:
    """The gradients of gate and of up as the products before them take them.

    Args:
        da: [M, F], of f(gate) * up.
        gate, up: [M, F].
        activation: the name of f.
        plans: of the layers that made gate and up.
        dtype: of the layer.
        needs: what the backward of each computes.
    """
    first, second = (
        known_scale(plan.grad_output, gate) if all_fp8(plan, wanted) else None
        for plan, wanted in zip(plans, needs, strict=True)
    )
    # One kernel casts both to one format.
    if first is not None and second is not None and first.spec == second.spec:
        pair = gated_backward_cast(
            da,
            gate,
            up,
            activation,
            first.spec.format,
            (first.scale, second.scale),
            through=dtype,
            gathered=(first.gathered, second.gathered),
            inf_to_nan=first.spec.inf_to_nan,
            column_sums=(needs[0].db, needs[1].db),
        )
        operands = [Operand(out.codes, out.scale, out.codes_t, out.scale, out.column_sum) for out in pair]
        for plan, known, operand in zip(plans, (first, second), operands, strict=True):
            note_cast(plan.grad_output, known, operand, gate)
        return Gradient(None, operands[0]), Gradient(None, operands[1])
    dgate, dup = gated_backward_output(da, gate, up, activation, dtype)
    return (
        measured_gradient(dgate.output, dgate.amaxes, plans[0], needs[0]),
        measured_gradient(dup.output, dup.amaxes, plans[1], needs[1]),
    )
