"""Linears of several experts over groups of tokens whose sizes only the device knows: nothing waits for it.

The same products as in `octavo.functional.grouped_linear`, each for all experts at once:

    fprop   y  [M, N]     rows of expert e = x  [m_e, K] @ w_e [N, K]^T + b_e
    dgrad   dx [M, K]     rows of expert e = dy [m_e, N] @ w_e [N, K]
    wgrad   dw [E, N, K]  of expert e      = dy [m_e, N]^T @ x [m_e, K]
    dbias   db [E, N]     of expert e      = sum of dy over m_e

Scales and codes are those of each group alone. On a CPU so are all results, to the bit. On a GPU, where torch has the
product (E4M3 by E4M3, output in bfloat16), it is rounded before a bias is added; others run in Triton. In high
precision all three run through `torch._grouped_mm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.grouped_quantize import (
    GroupedOperand,
    granularity_reasons,
    quantize_groups,
    quantize_groups_again,
)
from octavo.functional.linear import quantize_weight
from octavo.functional.products import refuse_second_derivative
from octavo.kernels import padded
from octavo.kernels.grouped_cast import Groups, groups_of
from octavo.kernels.grouped_mm.on_device import (
    device_reasons,
    grouped_mm,
    grouped_mm_over_rows,
    grouped_sum,
    plain_grouped_mm,
    plain_grouped_mm_over_rows,
)
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, PairedQuantizer, QuantizedTensor

# Where parameters begin among the arguments of the autograd Function.
_FIRST = 9
# Entries of bfloat16 in 16 bytes, at which torch._grouped_mm wants every row to begin.
_ROW_ALIGNMENT = 8


class DeviceCall(NamedTuple):
    """What one call runs with.

    Attributes:
        plans: of each expert; None runs all in high precision.
        dtype: of the output.
        cached: codes of each weight that were made before, or None.
    """

    plans: tuple[LinearPlan, ...] | None
    dtype: torch.dtype
    cached: tuple[Operand | None, ...]

    @property
    def dgrad_fp8(self) -> bool:
        """The gradient of x is a product of codes."""
        return self.plans is not None and self.plans[0].dgrad_fp8

    @property
    def wgrad_fp8(self) -> bool:
        """The gradient of the weights is a product of codes."""
        return self.plans is not None and self.plans[0].wgrad_fp8

    @property
    def keeps_input(self) -> bool:
        """x is kept itself, and cast again."""
        return self.wgrad_fp8 and self.first.keeps_input

    @property
    def first(self) -> LinearPlan:
        """The plan of the first expert: formats, granularities and sums are those of all."""
        assert self.plans is not None, "high precision has no plan"
        return self.plans[0]


def unsupported_reasons(
    device: torch.device, dtype: torch.dtype, plan: LinearPlan | None, features: tuple[int, int]
) -> list[str]:
    """Why a call with sizes on the device cannot run; empty if it can.

    Args:
        device: of x.
        dtype: of the output.
        plan: of an expert, None for high precision.
        features: in and out.
    """
    if plan is None:
        return _plain_reasons(device, dtype, features)
    cast_by_group: list[Any] = [plan.input, plan.grad_output]
    if any(isinstance(quantizer, PairedQuantizer) for quantizer in (*cast_by_group, plan.weight)):
        return ["an operand has another spec in each of its products: grouped casts make both layouts of one"]
    if any(not hasattr(quantizer, "spec") for quantizer in (*cast_by_group, plan.weight)):
        return ["its quantizers are watched, one cast an expert"]
    # The weight of a product has blocks where the other operand has them: one reason is enough.
    of_casts = [reason for quantizer in cast_by_group for reason in granularity_reasons(quantizer.spec)]
    reasons = [*dict.fromkeys(of_casts), *device_reasons(device)]
    if not (plan.dgrad_fp8 and plan.wgrad_fp8):
        reasons += _plain_reasons(device, dtype, features)
    return reasons


def _plain_reasons(device: torch.device, dtype: torch.dtype, features: tuple[int, int]) -> list[str]:
    """Those of products in high precision: what torch._grouped_mm takes on a GPU."""
    if device.type == "cpu":
        return []
    reasons = []
    if dtype != torch.bfloat16:
        reasons.append(f"{dtype} in high precision: torch._grouped_mm takes bfloat16; run under torch.autocast")
    if features[0] % _ROW_ALIGNMENT or features[1] % _ROW_ALIGNMENT:
        reasons.append(f"{features[0]} x {features[1]} features in high precision: they must be multiples of 8")
    return reasons


def grouped_linear_on_device(
    x: Tensor, splits: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], call: DeviceCall
) -> Tensor:
    """y [M, N] of the call's dtype.

    Args:
        x: [M, K], any floating dtype.
        splits: integers [E] on the device of x, summing to M, which the device checks.
        weights: [N, K] each, QuantizedTensors included.
        biases: [N] each, or None for all.
        call: what to run with.
    """
    groups = groups_of(splits, x.shape[0])
    if not torch.is_grad_enabled():
        refuse_tangents(x, *weights, *biases)
        # An autograd Function is asked for the gradients of what has one, also where none will be.
        x, weights = x.detach(), [weight.detach() for weight in weights]
    result: Tensor = _GroupedOnDevice.apply(x, *groups, call, len(weights), *weights, *biases)
    return result


class _GroupedOnDevice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        # Tensors by themselves: what autograd and the compiler see of an argument.
        groups, (call, num_experts), parameters = Groups(*arguments[:6]), arguments[6:8], arguments[8:]
        weights, biases = parameters[:num_experts], parameters[num_experts:]
        needs_dx, needs_dw = ctx.needs_input_grad[0], any(ctx.needs_input_grad[_FIRST : _FIRST + num_experts])
        rows, num_out = x.to(call.dtype), weights[0].shape[0]
        bias = None if biases[0] is None else torch.stack([one.to(call.dtype) for one in biases])
        kept: list[Tensor | None] = [None] * 5
        if call.plans is None:
            y = plain_grouped_mm(rows, _high(weights, call.dtype), bias, groups.ends, True)
        else:
            # 1. Codes of x and of the weights, each in the layouts that somebody will use.
            columnwise = needs_dw and call.wgrad_fp8 and not call.keeps_input
            operand = quantize_groups(rows, groups, [plan.input for plan in call.plans], True, columnwise)
            made = _weight_operands(weights, call, needs_dx and call.dgrad_fp8)
            # 2. The products.  [M, K] @ [K, N] -> [M, N]
            y = _fprop(operand, made, bias, groups, call, num_out)
            # 3. What the backward needs.
            if columnwise:
                kept[:2] = operand.codes_t, operand.scale_t
            elif needs_dw and call.keeps_input:
                kept[1] = operand.by_group
            if needs_dx and call.dgrad_fp8:
                kept[2:4] = _stacked(made, column_wise=True)
        keeps_x = needs_dw and (not call.wgrad_fp8 or call.keeps_input)
        kept[4] = rows if keeps_x else None
        keeps_w = needs_dx and not call.dgrad_fp8
        ctx.save_for_backward(*groups, *kept, *(weights if keeps_w else ()))
        ctx.call, ctx.x_dtype, ctx.num_in, ctx.num_experts = call, x.dtype, x.shape[1], num_experts
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in parameters]
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        call: DeviceCall = ctx.call
        saved, num_experts = ctx.saved_tensors, ctx.num_experts
        groups, weights = Groups(*saved[:6]), saved[11:]
        x_codes_t, x_scale_t, w_codes_t, w_scale_t, x = saved[6:11]
        needs_dx, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[_FIRST:]
        needs_dw = any(wants[:num_experts])
        rows, num_out, dx = dy.contiguous(), dy.shape[1], None
        # 1. Codes of dy in the layouts that somebody will use.
        dgrad_fp8, wgrad_fp8 = needs_dx and call.dgrad_fp8, needs_dw and call.wgrad_fp8
        codes: GroupedOperand | None = None
        if (dgrad_fp8 or wgrad_fp8) and call.plans is not None:
            codes = quantize_groups(rows, groups, [plan.grad_output for plan in call.plans], dgrad_fp8, wgrad_fp8)
        # 2. dgrad.  [M, N] @ [N, K] -> [M, K]
        if dgrad_fp8 and codes is not None:
            how = call.first.accumulate.dgrad
            dy_codes, dy_scale = codes.row_wise
            _count(call, "dgrad", dy_codes)
            dx = grouped_mm(dy_codes, w_codes_t, dy_scale, w_scale_t, None, groups.ends, call.dtype, how)
            dx = _trimmed(dx, ctx.num_in)
        elif needs_dx:
            _count(call, "dgrad", None)
            dx = plain_grouped_mm(rows, _high(weights, rows.dtype), None, groups.ends, False)
        # 3. wgrad.  [N, m] @ [m, K] -> [N, K] of each expert
        dws: list[Tensor | None] = [None] * num_experts
        if needs_dw:
            if wgrad_fp8 and codes is not None:
                if call.keeps_input and call.plans is not None:
                    inputs = [plan.input for plan in call.plans]
                    x_codes_t, x_scale_t = quantize_groups_again(x, groups, inputs, x_scale_t).column_wise
                dy_codes, dy_scale = codes.column_wise
                _count(call, "wgrad", dy_codes)
                dtype, how = ctx.dtypes[0], call.first.accumulate.wgrad
                dw = grouped_mm_over_rows(
                    dy_codes, x_codes_t, dy_scale, x_scale_t, groups.ends, groups.ends_t, dtype, how
                )
                dw = dw[:, :num_out, : ctx.num_in]
            else:
                _count(call, "wgrad", None)
                dw = plain_grouped_mm_over_rows(rows, x, groups.ends)
            dws = _each(dw, ctx.dtypes[:num_experts], wants[:num_experts])
        # 4. dbias, of the high-precision dy.  [M, N] -> [N] of each expert
        dbs: list[Tensor | None] = [None] * num_experts
        if any(wants[num_experts:]):
            dbs = _each(grouped_sum(rows, groups.ends), ctx.dtypes[num_experts:], wants[num_experts:])
        dx = None if dx is None else dx.to(ctx.x_dtype)
        return dx, *(None,) * (_FIRST - 1), *dws, *dbs


def _fprop(
    operand: GroupedOperand,
    made: Sequence[Operand],
    bias: Tensor | None,
    groups: Groups,
    call: DeviceCall,
    num_out: int,
) -> Tensor:
    codes, scale = operand.row_wise
    w_codes, w_scale = _stacked(made, column_wise=False)
    _count(call, "fprop", codes)
    if bias is not None and w_codes.shape[1] != num_out:
        bias = torch.nn.functional.pad(bias, (0, padded(num_out) - num_out))
    y = grouped_mm(codes, w_codes, scale, w_scale, bias, groups.ends, call.dtype, call.first.accumulate.fprop)
    return _trimmed(y, num_out)


def _count(call: DeviceCall, gemm: str, codes: Tensor | None) -> None:
    """Note a product of each expert for `octavo.count_gemms`; without codes, one in high precision."""
    if call.plans is None or call.first.counter is None:
        return
    # `unsupported_reasons` lets none on a GPU pass that would have to be emulated there.
    precision = "high precision" if codes is None else "fp8" if codes.is_cuda else "fp8 emulated"
    for plan in call.plans:
        call.first.counter.add(plan.name, gemm, precision)


def _weight_operands(weights: Sequence[Tensor], call: DeviceCall, columnwise: bool) -> list[Operand]:
    assert call.plans is not None, "high precision makes no codes"
    made = []
    for weight, plan, cached in zip(weights, call.plans, call.cached, strict=True):
        made.append(quantize_weight(weight, plan, True, columnwise) if cached is None else cached)
    return made


def _stacked(made: Sequence[Operand], column_wise: bool) -> tuple[Tensor, Tensor]:
    """(codes [E, N', K'], scales [E, N', 1]) of all weights in one layout."""
    pairs = [operand.column_wise if column_wise else operand.row_wise for operand in made]
    # Bytes are stacked: not every torch stacks codes.
    codes = torch.stack([one.view(torch.uint8) for one, _ in pairs]).view(pairs[0][0].dtype)
    scales = torch.stack([scale for _, scale in pairs])
    if scales.dim() == 1:
        scales = scales[:, None, None].expand(-1, codes.shape[1], 1).contiguous()
    return codes, scales


def _high(weights: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """[E, N, K]"""
    return torch.stack([w.dequantize(dtype) if isinstance(w, QuantizedTensor) else w.to(dtype) for w in weights])


def _trimmed(out: Tensor, columns: int) -> Tensor:
    return out if out.shape[1] == columns else out[:, :columns].contiguous()


def _each(stacked: Tensor, dtypes: Sequence[torch.dtype], wanted: Sequence[bool]) -> list[Tensor | None]:
    """One gradient an expert."""
    parts = zip(stacked.unbind(), dtypes, wanted, strict=True)
    # Each its own part of one memory.
    return [part.to(dtype).contiguous() if wants else None for part, dtype, wants in parts]
