"""Linear in FP8: three matrix products, and what autograd keeps between them.

    fprop   y  [M, N] = x  [M, K] @ w  [N, K]^T + b
    dgrad   dx [M, K] = dy [M, N] @ w  [N, K]
    wgrad   dw [N, K] = dy [M, N]^T @ x [M, K]
    dbias   db [N]    = sum of dy over M, in float32

Every product takes K-major codes, so x and dy are needed in both layouts and w in both. Kept for the backward: the
codes of x and of w in the layout that the backward wants (one byte an element each) with their scales, and nothing
else; not the codes of x if w is frozen, not those of w if x needs no gradient. A product that runs in high precision
keeps its operand in the dtype of the output instead, and so does a wgrad whose plan says so: x is then cast again. A
dgrad whose plan says so keeps the weight, which is there anyway, and casts it again. No product is computed that nobody
needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional.forward_mode import refuse_tangents, refuse_transforms
from octavo.functional.products import (
    Kept,
    codes_of_weight,
    count,
    in_high_precision,
    keeps_weight_codes,
    kept_weight,
    refuse_second_derivative,
    unpadded,
)
from octavo.functional.shared_input import as_rows, quantize_input
from octavo.kernels import padded, scaled_mm
from octavo.kernels.side_stream import side_of
from octavo.kernels.triton_support import uses_triton
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, QuantizedTensor, cast_together, operand_of

_unsafe_view = torch.ops.aten._unsafe_view.default
_unwrap = torch._C._functorch.unwrap_if_dead


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    out_dtype: torch.dtype,
    cached_weight: Operand | None = None,
) -> Tensor:
    """y = x w^T + b with FP8 products -> [..., N] of `out_dtype`.

    Args:
        x: [..., K], any floating dtype.
        weight: [N, K], a QuantizedTensor included.
        bias: [N] or None.
        plan: quantizers and precision of each product.
        out_dtype: float32, bfloat16 or float16.
        cached_weight: codes of the weight made before, in the layouts that are needed.
    """
    if torch.is_grad_enabled():
        apply = _Linear.apply
        if not torch.compiler.is_compiling():
            if torch._C._are_functorch_transforms_active():
                refuse_transforms()
            # What `Function.apply` does besides is to look for tensors that a transform has left behind.
            x, weight = _unwrap(x), _unwrap(weight)
            apply = _apply
        result: Tensor = apply(x, weight, bias, plan, out_dtype, cached_weight)
        return result
    refuse_tangents(x, weight, bias)
    if cached_weight is None and plan.together and _are_cast_together(x, weight, out_dtype):
        rows, operand = _both(x, weight, plan, out_dtype, False, False)
    else:
        operand = cached_weight or quantize_weight(weight, plan, True, False)
        rows = quantize_input(x, plan, out_dtype, False)
    return _fprop(rows, operand, bias, x, weight.shape[0], plan, out_dtype)


def quantize_weight(weight: Tensor, plan: LinearPlan, rowwise: bool, columnwise: bool) -> Operand:
    """Codes of a weight [N, K]; of one that is FP8 already, its own."""
    if not isinstance(weight, QuantizedTensor):
        return plan.weight(weight, rowwise, columnwise)
    spec, other = plan.weight_spec, plan.weight_spec_t
    if other is spec or not columnwise:
        return operand_of(weight, plan.weight, rowwise, columnwise, spec.granularity)
    by_row = operand_of(weight, plan.weight, rowwise, False, spec.granularity)
    if other.format.dtype == weight.codes.dtype:
        by_column = operand_of(weight, plan.weight, False, True, other.granularity)
    else:
        # dgrad wants another format than the codes at hand.
        by_column = plan.weight(weight.dequantize(), False, True)
    return by_row._replace(codes_t=by_column.codes_t, scale_t=by_column.scale_t)


def quantize_for_products(weight: Tensor, plan: LinearPlan, needs_dx: bool) -> Operand:
    """Codes of a weight [N, K] for fprop, and for dgrad if that will take them from here."""
    return quantize_weight(weight, plan, True, keeps_weight_codes(weight, plan, needs_dx))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        out_dtype: torch.dtype,
        cached_weight: Operand | None,
    ) -> Tensor:
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        # 1. Codes, each in the layouts that somebody will use.
        keeps_codes = needs_dw and plan.wgrad_fp8 and not plan.keeps_input
        rows, operand = _operands(x, weight, plan, out_dtype, keeps_codes, needs_dx, cached_weight)
        # 2. The product.  [M, K] @ [K, N] -> [M, N]
        y = _fprop(rows, operand, bias, x, weight.shape[0], plan, out_dtype)
        # 3. What the backward needs.
        keeps_x = needs_dw and not keeps_codes
        ctx.save_for_backward(
            rows.codes_t if keeps_codes else None,
            rows.scale_t if keeps_codes else rows.scale if needs_dw and plan.keeps_input else None,
            x.to(out_dtype) if keeps_x else None,
            *kept_weight(operand, weight, plan, needs_dx),
        )
        ctx.about = plan, x.shape, x.dtype, out_dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        traced = torch.compiler.is_compiling()
        refuse_second_derivative()
        plan: LinearPlan
        plan, x_shape, x_dtype, out_dtype, weight_dtype, bias_dtype = ctx.about
        x_codes_t, x_scale_t, x_high, *of_weight = ctx.saved_tensors
        w = Kept(*of_weight)
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        rows = as_rows(dy)
        (num_rows, num_out), num_in = rows.shape, x_shape[-1]
        # 1. Codes of dy in the layouts that somebody will use.
        dgrad_fp8, wgrad_fp8 = needs_dx and plan.dgrad_fp8, needs_dw and plan.wgrad_fp8
        codes = None
        if dgrad_fp8 or wgrad_fp8:
            # The same read gives the gradient of the bias.
            codes = plan.grad_output(rows, dgrad_fp8, wgrad_fp8, needs_db)
        # 2. dgrad and wgrad, at the same time where that gains.
        kept, side = Kept(x_codes_t, x_scale_t, x_high), None
        if dgrad_fp8 and wgrad_fp8 and not traced:
            side = side_of(rows, 2 * num_rows * num_out * num_in)
        dx = dw = db = None
        if side is not None:
            dw, dx = side.both(
                lambda: _wgrad(rows, codes, kept, num_in, plan, weight_dtype, traced),
                lambda: _dgrad(rows, codes, w, num_in, plan, out_dtype, traced),
            )
        else:
            if needs_dx:
                dx = _dgrad(rows, codes if dgrad_fp8 else None, w, num_in, plan, out_dtype, traced)
            if needs_dw:
                dw = _wgrad(rows, codes if wgrad_fp8 else None, kept, num_in, plan, weight_dtype, traced)
        if dx is not None:
            dx = dx if len(x_shape) == 2 else dx.reshape(x_shape)
            dx = dx if dx.dtype is x_dtype else dx.to(x_dtype)
        # 3. dbias, of the high-precision dy.  [M, N] -> [N]
        if needs_db:
            sums = None if codes is None else codes.column_sum
            db = (rows.sum(0, dtype=torch.float32) if sums is None else sums).to(bias_dtype)
        return dx, dw, db, None, None, None


# `_Linear.apply` without what it does in Python first.
_apply = super(torch.autograd.Function, _Linear).apply


def _operands(
    x: Tensor,
    weight: Tensor,
    plan: LinearPlan,
    out_dtype: torch.dtype,
    keeps_codes: bool,
    needs_dx: bool,
    cached_weight: Operand | None,
) -> tuple[Operand, Operand]:
    """Codes of x and of w in the layouts that somebody will use."""
    if cached_weight is not None:
        return quantize_input(x, plan, out_dtype, keeps_codes), cached_weight
    if plan.together and _are_cast_together(x, weight, out_dtype):
        return _both(x, weight, plan, out_dtype, keeps_codes, keeps_weight_codes(weight, plan, needs_dx))
    side = None if torch.compiler.is_compiling() else side_of(x, 2 * x.numel() * weight.shape[0])
    if side is None:
        rows = quantize_input(x, plan, out_dtype, keeps_codes)
        return rows, quantize_for_products(weight, plan, needs_dx)
    operand, rows = side.both(
        lambda: quantize_for_products(weight, plan, needs_dx),
        lambda: quantize_input(x, plan, out_dtype, keeps_codes),
    )
    return rows, operand


def _are_cast_together(x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> bool:
    """True if x and w may be cast by one launch, which they are if their rows have an even number of elements."""
    if torch.compiler.is_compiling():
        return False
    plain = type(x) is Tensor and type(weight) in (nn.Parameter, Tensor)
    # Kernels of two elements at a time take those of 16 bits; others are cast one after, or beside, the other.
    halves = out_dtype.itemsize == weight.dtype.itemsize == 2
    return plain and halves and weight.is_contiguous() and uses_triton(weight)


def _both(
    x: Tensor, weight: Tensor, plan: LinearPlan, out_dtype: torch.dtype, columnwise: bool, weight_columnwise: bool
) -> tuple[Operand, Operand]:
    """Codes of x and of w, made together; those of w alone if another layer has made those of x."""
    made: list[Operand] = []

    def cast(rows: Tensor) -> Operand:
        of_x, of_w = cast_together(plan.input, rows, columnwise, plan.weight, weight, weight_columnwise)  # type: ignore[arg-type]
        made.append(of_w)
        return of_x

    rows = quantize_input(x, plan, out_dtype, columnwise, cast)
    return rows, made[0] if made else plan.weight(weight, True, weight_columnwise)


def _dgrad(
    rows: Tensor, codes: Operand | None, w: Kept, num_in: int, plan: LinearPlan, dtype: torch.dtype, traced: bool
) -> Tensor:
    """[M, N] @ [N, K] -> [M, K]; of rows in high precision, without codes."""
    if codes is None:
        count(plan, "dgrad", None, None)
        return rows @ in_high_precision(w.high, rows.dtype)
    dy_codes, dy_scale = codes.row_wise
    w_codes_t, w_scale_t = codes_of_weight(w, plan, dy_scale)
    count(plan, "dgrad", dy_codes, w_codes_t, dy_scale)
    dx = scaled_mm(dy_codes, w_codes_t, dy_scale, w_scale_t, None, dtype, plan.accumulate.dgrad)
    return unpadded(dx, rows.shape[0], num_in, traced)


def _wgrad(
    rows: Tensor, codes: Operand | None, x: Kept, num_in: int, plan: LinearPlan, dtype: torch.dtype, traced: bool
) -> Tensor:
    """[N, M] @ [M, K] -> [N, K]; of rows in high precision, without codes."""
    if codes is None:
        count(plan, "wgrad", None, None)
        assert x.high is not None, "the forward kept it"
        return (rows.t() @ as_rows(x.high)).to(dtype)
    dy_codes, dy_scale = codes.column_wise
    x_codes_t, x_scale_t = x.codes_t, x.scale_t
    if x.high is not None:
        again = plan.input.again(as_rows(x.high), x_scale_t, dy_scale)  # type: ignore[attr-defined]
        x_codes_t, x_scale_t = again.column_wise
    assert x_codes_t is not None, "the forward kept them"
    assert x_scale_t is not None, "codes come with their scale"
    count(plan, "wgrad", dy_codes, x_codes_t, dy_scale)
    dw = scaled_mm(dy_codes, x_codes_t, dy_scale, x_scale_t, None, dtype, plan.accumulate.wgrad)
    return unpadded(dw, rows.shape[1], num_in, traced)


def _fprop(
    x_operand: Operand,
    w_operand: Operand,
    bias: Tensor | None,
    x: Tensor,
    num_out: int,
    plan: LinearPlan,
    out_dtype: torch.dtype,
) -> Tensor:
    """[M', K'] @ [K', N'] -> [..., N]"""
    codes, scale = x_operand.row_wise
    w_codes, w_scale = w_operand.row_wise
    count(plan, "fprop", codes, w_codes, scale)
    if bias is not None:
        # In the dtype of the output, as torch.autocast would have it; the product adds no other without a pass more.
        bias = bias.to(out_dtype)
        if padded(num_out) != num_out:
            bias = torch.nn.functional.pad(bias, (0, padded(num_out) - num_out))
    y = scaled_mm(codes, w_codes, scale, w_scale, bias, out_dtype, plan.accumulate.fprop)
    traced, lead = torch.compiler.is_compiling(), x.shape[:-1]
    rows = unpadded(y, lead.numel(), num_out, traced)
    if len(lead) == 1 and rows is y:
        return y
    # A view made inside an autograd Function could not be changed in place by the user; this one is not known as a
    # view. (`resize_` would count as a change of what a selective checkpoint has saved.)
    shaped: Tensor = _unsafe_view(rows, (*lead, num_out))
    return shaped
