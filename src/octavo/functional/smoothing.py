"""Smooth-SwiGLU: the outliers of single channels leave the activation before its cast, and the product does not change.

    s_c  = 2^floor(log2 of the amax of channel c of a)      [F], measured now, on the device
    a'   = a / s                                            [M, F], within (-2, 2)
    w2'  = w2 s                                             [K', F], its columns
    y    = a' w2'^T + b2  =  a w2^T + b2

and in the backward, s being a constant:

    da   = dy w2               of the codes of w2 itself, which no channel's scale has made coarser
    dw2  = (dy^T a') s         its columns

Powers of two change no digit, so that all of this is exact but for what the casts of a' and w2' round. The scale of a'
with one scale a tensor is known before any data is: 2^floor(log2(M / 2)) takes all of (-2, 2). Without smoothing one
channel's outlier makes that scale coarse for all others, and with delayed scaling saturates until the history knows it.

Price: z is read twice, in bf16 4 bytes an element of a each time; w2' is written and read in high precision, measured
and cast in every call, also where w2's own codes are kept. Kept for the backward: s, 4 bytes a channel.

Source: Fishman, Chmiel, Banner, Soudry, "Scaling FP8 training to trillion-token LLMs", 2024, arXiv 2409.12517.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.linear import quantize_weight
from octavo.functional.products import (
    Extents,
    Kept,
    Needs,
    fprop,
    gradients,
    kept_input,
    kept_weight,
    quantized_gradient,
    refuse_second_derivative,
    shaped,
)
from octavo.functional.shared_input import as_rows
from octavo.kernels import amax_by_row_and_column
from octavo.kernels.activation_channel_amax import activation_channel_amax
from octavo.recipes import Recipe
from octavo.recipes.recipe import LinearSpecs
from octavo.runtime import LinearPlan, Observer
from octavo.scaling import TENSOR
from octavo.tensor import (
    CurrentQuantizer,
    Operand,
    OperandState,
    Quantizer,
    QuantizeSpec,
    StaticQuantizer,
)
from octavo.tensor.operand_state import is_captured

# Between these s and 1 / s keep weights and gradients of float32 and bfloat16 finite.
_LEAST, _MOST = 2.0**-96, 2.0**96
_EXPONENT = 0x7F800000
_ONE_TWICE = 254 << 23


def _scale_of_input(format: Format) -> float:
    """Of codes that take all of (-2, 2), a power of two."""
    return 2.0 ** -math.floor(math.log2(format.max / 2))


# Of a' and w2', where the recipe keeps one scale a tensor of a, or scales w2 with delay; by the format of their codes.
_OF_INPUT = {
    format.name: StaticQuantizer(QuantizeSpec(format=format, scaling="static", static_scale=_scale_of_input(format)))
    for format in (E4M3, E5M2)
}
_OF_WEIGHT = {format.name: CurrentQuantizer(QuantizeSpec(format=format)) for format in (E4M3, E5M2)}


class Smoothing(NamedTuple):
    """What one call runs with.

    Attributes:
        input: makes codes of a'.
        weight: makes codes of w2'.
        state: where the amax of a itself is gathered; None if it is not.
        least: amaxes below it count as it.
    """

    input: Quantizer
    weight: Quantizer
    state: OperandState | None
    least: float


class Channels(NamedTuple):
    """s [F] and 1 / s [F], float32, powers of two."""

    scale: Tensor
    inverse: Tensor


def check_smoothing(specs: LinearSpecs) -> None:
    """Raise ValueError if a recipe says of fc2's operands what smoothing replaces."""
    for operand, spec, other in (("input", specs.input, specs.input_t), ("weight", specs.weight, specs.weight_t)):
        if spec is not other or spec.rounding != "nearest":
            raise ValueError(
                f"smooth_swiglu makes both layouts of fc2's {operand} by one spec, rounded to nearest, and the recipe"
                f" has {spec} and {other}: give fc2 another recipe by an override, or leave smooth_swiglu out"
            )
        if spec.scaling == "static":
            raise ValueError(
                f"smooth_swiglu measures the channels of fc2's operands in every call, and the recipe gives a static"
                f" scale of its {operand}: give fc2 another recipe by an override, or leave smooth_swiglu out"
            )


def smoothing_of(recipe: Recipe, plan: LinearPlan, observer: Observer | None, state: OperandState | None) -> Smoothing:
    """How one call is smoothed: with the plan's quantizers where the recipe's word on a and w2 holds for a' and w2'.

    Args:
        recipe: of fc2.
        plan: of a and w2 themselves.
        observer: wraps quantizers, those of the plan too.
        state: where the amax of a is gathered.

    Raises:
        ValueError: the recipe says what smoothing replaces.
    """
    specs = recipe.linear
    check_smoothing(specs)
    of_input, of_weight = plan.input, plan.weight
    if specs.input.granularity is TENSOR:
        made = _OF_INPUT[specs.input.format.name]
        of_input = made if observer is None else observer("input", made)
    if specs.weight.granularity is TENSOR:
        # Also where w2's own scale is predicted.
        delayed = specs.weight.scaling == "delayed"
        measured = _OF_WEIGHT[specs.weight.format.name] if delayed else CurrentQuantizer(specs.weight)
        of_weight = measured if observer is None else observer("weight", measured)
    return Smoothing(of_input, of_weight, state, specs.input.epsilon)


def channels_of(amaxes: Tensor, least: float = 0.0) -> Channels:
    """Scales of channels with these amaxes [F], float32; those of zeros alone get the least scale there is."""
    powers = (amaxes.view(torch.int32) & _EXPONENT).view(torch.float32)
    scale = powers.clamp(max(_LEAST, 2.0 ** math.floor(math.log2(least)) if least > 0 else 0.0), _MOST)
    return Channels(scale, reciprocal(scale))


def reciprocal(scale: Tensor) -> Tensor:
    """1 / s [F] of powers of two, exact: the exponent, taken from twice that of 1."""
    return (_ONE_TWICE - scale.view(torch.int32)).view(torch.float32)


def measured_channels(z: Tensor, activation: str, dtype: torch.dtype, smoothing: Smoothing) -> Channels:
    """s of the activation of z [M, 2F], rounded to `dtype`."""
    state = smoothing.state
    if state is not None and not torch.compiler.is_compiling() and is_captured(z):
        # What a graph writes to stays where it is.
        state.captured = True
    amaxes = activation_channel_amax(z, activation, dtype, None if state is None else state.gathered)
    return channels_of(amaxes, smoothing.least)


def divided(a: Tensor, channels: Channels) -> Tensor:
    """a / s [M, F]."""
    return (a.float() * channels.inverse).to(a.dtype)


def folded(weight: Tensor, channels: Channels, quantizer: Quantizer) -> Operand:
    """Codes of w2 s [K', F], row-wise."""
    # float16 would not hold it.
    wide = weight.float() if weight.dtype == torch.float16 else weight
    return quantizer(wide * channels.scale.to(wide.dtype), True, False)


def unfolded(dw: Tensor, scale: Tensor) -> Tensor:
    """dw2 [K', F] of dy^T a' and s [F]."""
    return dw * scale.to(dw.dtype)


def own_weight(weight: Tensor, plan: LinearPlan, needs: Needs) -> Operand:
    """Codes of w2 itself [K', F], which dgrad takes and nobody else."""
    if needs.dx and plan.dgrad_fp8:
        return quantize_weight(weight, plan, False, True)
    return Operand(None, None, None, None)


def gradient_dtype(weight: Tensor) -> torch.dtype:
    """Of dy^T a', which float16 would not hold."""
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def smooth_linear(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    smoothing: Smoothing,
    out_dtype: torch.dtype,
    cached_weight: Operand | None = None,
) -> Tensor:
    """y = a w2^T + b2 [..., K'] of `out_dtype`, smoothed: the second part of an MLP by itself.

    Args:
        a: [..., F], any floating dtype.
        weight: [K', F], in high precision.
        bias: [K'] or None.
        plan: of a and w2 themselves.
        smoothing: what to smooth with.
        out_dtype: float32, bfloat16 or float16.
        cached_weight: codes of w2 made before, column-wise.
    """
    if not torch.is_grad_enabled():
        refuse_tangents(a, weight, bias)
        # For nobody is to be told of a gradient.
        a, weight, bias = a.detach(), weight.detach(), None if bias is None else bias.detach()
    y: Tensor = _SmoothLinear.apply(a, weight, bias, plan, smoothing, out_dtype, cached_weight)
    return y


class _SmoothLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        smoothing: Smoothing,
        out_dtype: torch.dtype,
        cached_weight: Operand | None,
    ) -> Tensor:
        rows, needs = as_rows(a), Needs(*ctx.needs_input_grad[:3])
        # 1. The scales of the channels.  [M, F] -> [F]
        by_column = amax_by_row_and_column(rows, False, True)[1]
        assert by_column is not None, "it was asked for"
        if smoothing.state is not None and by_column.numel():
            smoothing.state.gather(by_column.amax())
        channels = channels_of(by_column.reshape(-1), smoothing.least)
        # 2. Codes of a', of w2', and of w2 for the backward.
        keeps_codes = needs.dw and plan.wgrad_fp8
        operand = smoothing.input(divided(rows, channels), True, keeps_codes)
        own = own_weight(weight, plan, needs) if cached_weight is None else cached_weight
        # 3. The product.  [M, F] @ [F, K'] -> [M, K']
        extents = Extents(rows.shape[0], weight.shape[0], weight.shape[1], out_dtype, gradient_dtype(weight))
        y = fprop(operand, folded(weight, channels, smoothing.weight), bias, extents, plan)
        # 4. What the backward needs.
        ctx.save_for_backward(
            *kept_input(operand, rows.to(out_dtype), plan, needs.dw),
            *kept_weight(own, weight, plan, needs.dx),
            channels.scale if keeps_codes else None,
        )
        ctx.plan, ctx.extents, ctx.shape, ctx.dtype = plan, extents, a.shape, a.dtype
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return shaped(y, a.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        needs, saved = Needs(*ctx.needs_input_grad[:3]), ctx.saved_tensors
        gradient = quantized_gradient(as_rows(dy), ctx.plan, needs)
        da, dw, db = gradients(gradient, Kept(*saved[:3]), Kept(*saved[3:6]), needs, ctx.extents, ctx.plan)
        if dw is not None:
            dw = (dw if saved[6] is None else unfolded(dw, saved[6])).to(ctx.dtypes[0])
        return (
            None if da is None else da.reshape(ctx.shape).to(ctx.dtype),
            dw,
            None if db is None else db.to(ctx.dtypes[1]),
            *(None,) * 4,
        )
