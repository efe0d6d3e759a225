"""Linears of several experts, each over its own part of the tokens, in FP8.

    x [M, K] is cut into groups of m_0, m_1, ... tokens, and for each expert e, on its rows alone,

    fprop   y  [m_e, N] = x  [m_e, K] @ w_e [N, K]^T + b_e
    dgrad   dx [m_e, K] = dy [m_e, N] @ w_e [N, K]
    wgrad   dw_e [N, K] = dy [m_e, N]^T @ x [m_e, K]
    dbias   db_e [N]    = sum of dy over m_e, in float32

Every expert has scales of its own, of its input, its weight and its gradient, and gives the bits of an
`octavo.functional.linear` on its rows. Here the sizes are known to the host: one cast and one product an expert, which
write into one output. (`octavo.functional.grouped_on_device` takes sizes that only the device knows.)

Kept for the backward, a token: as of a Linear, K bytes of codes of x; an expert: the codes of its weight. A group is
padded to a multiple of 16 inside its own codes, so nothing that pads ever meets another group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.linear import linear, quantize_weight
from octavo.functional.products import count, refuse_second_derivative
from octavo.functional.shared_input import as_rows
from octavo.kernels import padded
from octavo.kernels.grouped_mm import scaled_mm_by_group
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, QuantizedTensor

# What is kept of one expert: codes_t and scale_t of x, codes_t and scale_t of w, w itself for a dgrad without FP8.
_KEPT = 5


class GroupedCall(NamedTuple):
    """What one call runs with.

    Attributes:
        splits: tokens of each expert.
        plans: of each expert.
        dtype: of the output.
        cached: codes of each weight that were made before, or None.
    """

    splits: tuple[int, ...]
    plans: tuple[LinearPlan, ...]
    dtype: torch.dtype
    cached: tuple[Operand | None, ...]

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First row of each group, and the one after its last."""
        return bounds_of(self.splits)


def bounds_of(splits: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, row after the last) of each group."""
    bounds, start = [], 0
    for size in splits:
        bounds.append((start, start + size))
        start = start + size
    return bounds


def grouped_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: GroupedCall) -> Tensor:
    """y [M, N] of the call's dtype, with FP8 products.

    Args:
        x: [M, K], any floating dtype; M is the sum of the splits.
        weights: [N, K] each, QuantizedTensors included.
        biases: [N] or None each.
        call: what to run with.
    """
    if torch.is_grad_enabled():
        result: Tensor = _GroupedLinear.apply(x, call, len(weights), *weights, *biases)
        return result
    refuse_tangents(x, *weights, *biases)
    rows = x.to(call.dtype)
    operands, made = [], []
    for expert, (start, stop) in enumerate(call.bounds):
        plan = call.plans[expert]
        operands.append(plan.input(rows[start:stop], True, False))
        made.append(call.cached[expert] or quantize_weight(weights[expert], plan, True, False))
    return _fprop(operands, made, biases, weights[0].shape[0], call)


def grouped_linear_apart(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    splits: Sequence[int],
    plans: Sequence[LinearPlan | None],
    dtype: torch.dtype,
) -> Tensor:
    """y [M, N], where some experts have no plan and run in high precision; one autograd step an expert.

    Args:
        x: [M, K].
        weights, biases: of each expert.
        splits: tokens of each expert.
        plans: of each expert; None for high precision.
        dtype: of what experts in FP8 give; the others give what `torch.nn.functional.linear` does.
    """
    parts = []
    for part, weight, bias, plan in zip(x.split(list(splits)), weights, biases, plans, strict=True):
        if plan is not None:
            parts.append(linear(part, weight, bias, plan, dtype))
            continue
        high = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        parts.append(torch.nn.functional.linear(part, high, bias))
    return torch.cat(parts)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: GroupedCall, num_experts: int, *parameters: Any) -> Tensor:
        weights, biases = parameters[:num_experts], parameters[num_experts:]
        needs_dx, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        rows = x.to(call.dtype)
        operands, made, kept = [], [], []
        # 1. Codes of each group and of its weight, each in the layouts that somebody will use.
        for expert, (start, stop) in enumerate(call.bounds):
            plan, needs_dw = call.plans[expert], wants[expert]
            keeps_codes = needs_dw and plan.wgrad_fp8 and not plan.keeps_input
            operand = plan.input(rows[start:stop], True, keeps_codes)
            w = call.cached[expert]
            if w is None:
                w = quantize_weight(weights[expert], plan, True, needs_dx and plan.dgrad_fp8)
            scale = operand.scale_t if keeps_codes else operand.scale if needs_dw and plan.keeps_input else None
            kept += [operand.codes_t if keeps_codes else None, scale]
            kept += [w.codes_t, w.scale_t] if needs_dx and plan.dgrad_fp8 else [None, None]
            kept.append(weights[expert] if needs_dx and not plan.dgrad_fp8 else None)
            operands.append(operand)
            made.append(w)
        # 2. The products.  [m, K] @ [K, N] -> [m, N]
        y = _fprop(operands, made, biases, weights[0].shape[0], call)
        # 3. What the backward needs.
        keeps_x = any(
            wanted and (plan.keeps_input or not plan.wgrad_fp8)
            for wanted, plan in zip(wants[:num_experts], call.plans, strict=True)
        )
        ctx.save_for_backward(rows if keeps_x else None, *kept)
        ctx.call, ctx.x_dtype, ctx.num_in = call, x.dtype, x.shape[1]
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: GroupedCall = ctx.call
        rows, num_experts = as_rows(dy), len(call.splits)
        x, *kept = ctx.saved_tensors
        needs_dx, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        made: list[Operand | None] = []
        dws: list[Tensor | None] = []
        dbs: list[Tensor | None] = []
        # 1. Codes of dy and, of each expert, what belongs to it alone.
        for expert, (start, stop) in enumerate(call.bounds):
            plan, dy_e = call.plans[expert], rows[start:stop]
            needs_dw, needs_db = wants[expert], wants[num_experts + expert]
            dgrad_fp8, wgrad_fp8 = needs_dx and plan.dgrad_fp8, needs_dw and plan.wgrad_fp8
            codes = plan.grad_output(dy_e, dgrad_fp8, wgrad_fp8, needs_db) if dgrad_fp8 or wgrad_fp8 else None
            made.append(codes)
            dw = None
            if needs_dw:
                part = None if x is None else x[start:stop]
                codes_t, scale_t = kept[_KEPT * expert : _KEPT * expert + 2]
                dw = _wgrad(dy_e, codes, part, codes_t, scale_t, plan, ctx.num_in, ctx.dtypes[expert])
            dws.append(dw)
            db = None
            if needs_db:
                sums = None if codes is None else codes.column_sum
                db = dy_e.sum(0, dtype=torch.float32) if sums is None else sums
                db = db.to(ctx.dtypes[num_experts + expert])
            dbs.append(db)
        # 2. dx, whose groups lie in one matrix.
        dx = _dgrad(rows, made, kept, call, ctx.num_in).to(ctx.x_dtype) if needs_dx else None
        return dx, None, None, *dws, *dbs


def _fprop(
    operands: Sequence[Operand],
    weights: Sequence[Operand],
    biases: Sequence[Tensor | None],
    num_out: int,
    call: GroupedCall,
) -> Tensor:
    """[m', K'] @ [K', N'] -> [m, N] of each group, in [M, N]"""
    products, sums = [], []
    for x, w, bias, plan in zip(operands, weights, biases, call.plans, strict=True):
        codes, scale = x.row_wise
        w_codes, w_scale = w.row_wise
        count(plan, "fprop", codes, w_codes, scale)
        if bias is not None:
            bias = bias.to(call.dtype)
            if padded(num_out) != num_out:
                bias = torch.nn.functional.pad(bias, (0, padded(num_out) - num_out))
        products.append((codes, w_codes, scale, w_scale, bias))
        sums.append(plan.accumulate.fprop)
    return scaled_mm_by_group(products, call.splits, num_out, call.dtype, sums)


def _dgrad(rows: Tensor, made: Sequence[Operand | None], kept: Sequence[Any], call: GroupedCall, num_in: int) -> Tensor:
    """[m, N] @ [N, K] -> [m, K] of each group, in [M, K]"""
    if not all(plan.dgrad_fp8 for plan in call.plans):
        return _dgrad_apart(rows, made, kept, call, num_in)
    products = []
    for expert, (plan, codes) in enumerate(zip(call.plans, made, strict=True)):
        assert codes is not None, "an FP8 product takes codes"
        dy_codes, dy_scale = codes.row_wise
        w_codes_t, w_scale_t = kept[_KEPT * expert + 2 : _KEPT * expert + 4]
        count(plan, "dgrad", dy_codes, w_codes_t, dy_scale)
        products.append((dy_codes, w_codes_t, dy_scale, w_scale_t, None))
    sums = [plan.accumulate.dgrad for plan in call.plans]
    return scaled_mm_by_group(products, call.splits, num_in, call.dtype, sums)


def _dgrad_apart(
    rows: Tensor, made: Sequence[Operand | None], kept: Sequence[Any], call: GroupedCall, num_in: int
) -> Tensor:
    """As `_dgrad`, where some experts or all have it in high precision."""
    parts = []
    for expert, (start, stop) in enumerate(call.bounds):
        plan, codes = call.plans[expert], made[expert]
        w_codes_t, w_scale_t, w_high = kept[_KEPT * expert + 2 : _KEPT * expert + 5]
        if plan.dgrad_fp8:
            assert codes is not None, "an FP8 product takes codes"
            dy_codes, dy_scale = codes.row_wise
            count(plan, "dgrad", dy_codes, w_codes_t, dy_scale)
            product = (dy_codes, w_codes_t, dy_scale, w_scale_t, None)
            sums = [plan.accumulate.dgrad]
            parts.append(scaled_mm_by_group([product], [stop - start], num_in, call.dtype, sums))
            continue
        count(plan, "dgrad", None, None)
        dtype = rows.dtype
        high = w_high.dequantize(dtype) if isinstance(w_high, QuantizedTensor) else w_high.to(dtype)
        parts.append(rows[start:stop] @ high)
    return torch.cat(parts)


def _wgrad(
    dy: Tensor,
    codes: Operand | None,
    x: Tensor | None,
    codes_t: Tensor | None,
    scale_t: Tensor | None,
    plan: LinearPlan,
    num_in: int,
    dtype: torch.dtype,
) -> Tensor:
    """[N, m] @ [m, K] -> [N, K] of one expert."""
    if not plan.wgrad_fp8:
        assert x is not None, "the forward kept it"
        count(plan, "wgrad", None, None)
        return (dy.t() @ x).to(dtype)
    assert codes is not None, "an FP8 product takes codes"
    dy_codes, dy_scale = codes.column_wise
    if plan.keeps_input:
        again = plan.input.again(x, scale_t, dy_scale)  # type: ignore[attr-defined]
        codes_t, scale_t = again.column_wise
    assert codes_t is not None, "the forward kept them"
    assert scale_t is not None, "codes come with their scale"
    count(plan, "wgrad", dy_codes, codes_t, dy_scale)
    product = (dy_codes, codes_t, dy_scale, scale_t, None)
    return scaled_mm_by_group([product], [dy.shape[1]], num_in, dtype, [plan.accumulate.wgrad])
