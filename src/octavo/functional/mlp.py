"""The MLP of a transformer whose linear layers are modules of their own, in FP8 as one.

    z  [M, F]  = x @ w1^T + b1                 of a gated MLP two of them: gate = x @ wg^T + bg, up = x @ wu^T + bu
    a  [M, F]  = f(z), or f(gate) * up         rounded once to the dtype of the layers
    y  [M, K'] = a @ w2^T + b2

Each layer keeps its own quantizers, scales and state. Where scales are known beforehand, a and the gradients of z exist
as codes alone; where one scale is measured, a is written with its amax. Output, gradients and gathered amaxes are those
of `linear`, the activation of `octavo.kernels.activations` in float32 (`octavo.functional.activate`; of a gated MLP the
product included) and `linear`, to the bit. x is cast once for gate and up if they would cast it alike.

Kept for the backward, a token in bf16: codes of x (K bytes), z (2 F, gated 4 F), codes of a (F); and the codes of the
weights. A plan that keeps the input of its product has x kept instead of its codes, and those of a made again from z;
one that keeps its weight has that, which is there anyway, instead of its codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.fused_casts import Activated, cast_activated, cast_activation_gradient, repeated_scale, repeating
from octavo.functional.gated_casts import cast_gated, cast_gated_gradients
from octavo.functional.linear import quantize_for_products
from octavo.functional.products import (
    Extents,
    Gradient,
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
from octavo.functional.shared_input import as_rows, quantize_input, same_origin
from octavo.runtime import LinearPlan
from octavo.tensor import Operand, Quantizer


class MLP(NamedTuple):
    """What one call runs with.

    Attributes:
        activation: the name of f, one of `octavo.kernels.activations.PLAIN`.
        first: the plan of the layer before the activation; of a gated MLP, those of gate and up.
        last: the plan of the layer behind it.
        dtype: of z, a and y.
    """

    activation: str
    first: tuple[LinearPlan, ...]
    last: LinearPlan
    dtype: torch.dtype


class Layer(NamedTuple):
    """Parameters of one linear layer: weight [N, K], bias [N] or None; codes of the weight made before, or None."""

    weight: Tensor
    bias: Tensor | None
    cached_weight: Operand | None = None


def mlp(x: Tensor, first: tuple[Layer, ...], last: Layer, setup: MLP) -> Tensor:
    """y [..., K'] of the dtype of the layers.

    Args:
        x: [..., K], any floating dtype.
        first: the layer before the activation; or gate and up.
        last: the layer behind it.
        setup: what to run with.
    """
    layers = (*first, last)
    parameters = [parameter for layer in layers for parameter in layer[:2]]
    cached = tuple(layer.cached_weight for layer in layers)
    if torch.is_grad_enabled():
        result: Tensor = _MLP.apply(x, setup, cached, *parameters)
        return result
    refuse_tangents(x, *parameters)
    nothing = _Wanted(tuple(Needs(False, False, False) for _ in first), Needs(False, False, False))
    return _forward(x, setup, cached, parameters, nothing).y


class _Wanted(NamedTuple):
    """What the backward of each layer computes."""

    first: tuple[Needs, ...]
    last: Needs

    @staticmethod
    def of(needs_input_grad: tuple[bool, ...]) -> _Wanted:
        """By what autograd says of x, setup, cached weights, and a weight and a bias of each layer."""
        flags = needs_input_grad[3:]
        first = tuple(
            Needs(needs_input_grad[0], weight, bias) for weight, bias in zip(flags[:-2:2], flags[1:-2:2], strict=True)
        )
        return _Wanted(first, Needs(any(any(needs) for needs in first), *flags[-2:]))


class _Result(NamedTuple):
    """The output, and what lies before it."""

    y: Tensor
    x: list[Operand]
    z: list[Tensor]
    a: Activated
    weights: list[Operand]


def _forward(x: Tensor, setup: MLP, cached: tuple[Operand | None, ...], parameters: Any, wanted: _Wanted) -> _Result:
    plans, needs = (*setup.first, setup.last), (*wanted.first, wanted.last)
    weights, biases = parameters[::2], parameters[1::2]
    extents = _extents(x, setup, weights)
    # 1. Codes of x and of the weights, each in the layouts that somebody will use.
    inputs = _inputs(x, setup, wanted)
    operands = [
        made or quantize_for_products(weight, plan, need.dx)
        for made, weight, plan, need in zip(cached, weights, plans, needs, strict=True)
    ]
    # 2. The first products.  [M, K] @ [K, F] -> [M, F]
    z = [
        fprop(codes, operands[i], biases[i], extents[i], plan)
        for i, (codes, plan) in enumerate(zip(inputs, setup.first, strict=True))
    ]
    # 3. Codes of a.  [M, F]
    last = setup.last
    columnwise = _keeps_codes(last, wanted.last) or (wanted.last.dw and last.wgrad_fp8 and not wanted.last.dx)
    a = _activated(z, setup, last.input, (True, columnwise), wanted.last.dw and not last.wgrad_fp8)
    # 4. The last product.  [M, F] @ [F, K'] -> [M, K']
    y = fprop(a.operand, operands[-1], biases[-1], extents[-1], last)
    return _Result(shaped(y, x.shape[:-1]), inputs, z, a, operands)


def _inputs(x: Tensor, setup: MLP, wanted: _Wanted) -> list[Operand]:
    """Codes of x for each of the first products."""
    made: list[Operand] = []
    for plan, need in zip(setup.first, wanted.first, strict=True):
        # Without a backward, and so without a recompute, whatever x is: it is the same for both.
        if made and not any(map(any, wanted.first)) and _cast_alike(setup.first[0].input, plan.input):
            plan.input.note(made[0])  # type: ignore[attr-defined]
            made.append(made[0])
        else:
            made.append(quantize_input(x, plan, setup.dtype, _keeps_codes(plan, need)))
    return made


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, setup: MLP, cached: tuple[Operand | None, ...], *parameters: Any) -> Tensor:
        wanted = _Wanted.of(ctx.needs_input_grad)
        made = _forward(x, setup, cached, parameters, wanted)
        plans, needs, weights = (*setup.first, setup.last), (*wanted.first, wanted.last), parameters[::2]
        again = _made_again(setup.last, wanted.last)
        high = x.to(setup.dtype) if any(map(_keeps_rows, setup.first, wanted.first)) else None
        kept = [
            _kept_x(codes, high, plan, need)
            for codes, plan, need in zip(made.x, setup.first, wanted.first, strict=True)
        ]
        of_a = Kept() if again else kept_input(made.a.operand, made.a.rows, setup.last, wanted.last.dw)
        kept += [of_a, *map(kept_weight, made.weights, weights, plans, (need.dx for need in needs))]
        ctx.save_for_backward(
            *(tensor for one in kept for tensor in one),
            repeated_scale(setup.last.input, made.a.operand) if again else None,
            *(made.z if wanted.last.dx else [None] * len(made.z)),
        )
        ctx.setup, ctx.x_shape, ctx.x_dtype = setup, x.shape, x.dtype
        ctx.extents, ctx.dtypes = _extents(x, setup, weights), [None if p is None else p.dtype for p in parameters]
        return made.y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        setup: MLP = ctx.setup
        wanted, count = _Wanted.of(ctx.needs_input_grad), len(setup.first)
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them as they are read
        kept = [Kept(*saved[at : at + 3]) for at in range(0, 3 * (2 * count + 2), 3)]
        x, a, weights = kept[:count], kept[count], kept[count + 1 :]
        a_scale, z = saved[3 * len(kept)], saved[3 * len(kept) + 1 :]
        # 1. What was not kept.
        if _made_again(setup.last, wanted.last):
            made = _activated(z, setup, repeating(setup.last.input, a_scale), (False, True), False).operand
            a = Kept(made.codes_t, made.scale_t)
        # 2. The last product.  dy [M, K'] -> da [M, F], dw2 [K', F], db2 [K']
        gradient = quantized_gradient(as_rows(dy), setup.last, wanted.last)
        da, *of_last = gradients(gradient, a, weights[-1], wanted.last, ctx.extents[-1], setup.last)
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * (2 * count)
        if da is not None:
            # 3. The activation.  da [M, F] -> dz [M, F]
            of_z = _gradients_of_z(da, z, setup, wanted.first)
            x = _with_codes_of_x(x, of_z, setup.first, wanted.first)
            # 4. The first products, the last of them first, as autograd has it.  dz [M, F] -> dx [M, K], dw, db
            for i in reversed(range(count)):
                own, *found[2 * i : 2 * i + 2] = gradients(
                    of_z[i], x[i], weights[i], wanted.first[i], ctx.extents[i], setup.first[i]
                )
                if own is not None:
                    own = own.reshape(ctx.x_shape).to(ctx.x_dtype)
                    dx = own if dx is None else dx + own
        small = [
            None if value is None else value.to(dtype)
            for value, dtype in zip((*found, *of_last), ctx.dtypes, strict=True)
        ]
        return (dx, None, None, *small)


def _activated(z: Any, setup: MLP, quantizer: Quantizer, layouts: tuple[bool, bool], return_rows: bool) -> Activated:
    """a and its codes; `layouts`: row-wise, column-wise."""
    if len(z) == 2:
        return cast_gated(z[0], z[1], setup.activation, quantizer, setup.dtype, *layouts, return_rows)
    return cast_activated(z[0], setup.activation, quantizer, setup.dtype, *layouts, return_rows)


def _gradients_of_z(da: Tensor, z: Any, setup: MLP, needs: tuple[Needs, ...]) -> tuple[Gradient, ...]:
    """The gradients of the first products' results as their backwards take them."""
    if len(setup.first) == 2:
        return cast_gated_gradients(
            da, z[0], z[1], setup.activation, (setup.first[0], setup.first[1]), setup.dtype, (needs[0], needs[1])
        )
    return (cast_activation_gradient(da, z[0], setup.activation, setup.first[0], setup.dtype, needs[0]),)


def _keeps_codes(plan: LinearPlan, needs: Needs) -> bool:
    """True if wgrad takes the column-wise codes that the forward makes."""
    return needs.dw and plan.wgrad_fp8 and not plan.keeps_input


def _keeps_rows(plan: LinearPlan, needs: Needs) -> bool:
    """True if wgrad takes its input in high precision, or codes that are made of it again."""
    return needs.dw and (plan.keeps_input or not plan.wgrad_fp8)


def _made_again(plan: LinearPlan, needs: Needs) -> bool:
    """True if the codes of a are made again from z, which is kept if there is anything to compute before it."""
    return needs.dw and needs.dx and plan.keeps_input and plan.wgrad_fp8


def _kept_x(codes: Operand, high: Tensor | None, plan: LinearPlan, needs: Needs) -> Kept:
    """What wgrad of a first product needs of x."""
    if _keeps_codes(plan, needs):
        return Kept(codes.codes_t, codes.scale_t)
    # Of codes that are made again, the scale.
    return Kept(None, codes.scale if plan.keeps_input else None, high) if _keeps_rows(plan, needs) else Kept()


def _with_codes_of_x(
    x: list[Kept], of_z: tuple[Gradient, ...], plans: tuple[LinearPlan, ...], needs: tuple[Needs, ...]
) -> list[Kept]:
    """What the first products need of x: as it was kept; or its codes made again, once for all that make the same."""
    result: list[Kept] = []
    after: Tensor | None = None
    for i, (kept, plan, need) in enumerate(zip(x, plans, needs, strict=True)):
        if not (need.dw and plan.wgrad_fp8 and plan.keeps_input):
            result.append(kept)
        elif i and result[0].codes_t is not None and _cast_alike(plans[0].input, plan.input):
            result.append(result[0])
        else:
            assert kept.high is not None, "it was kept"
            codes = of_z[i].codes
            assert codes is not None, "an FP8 product takes codes"
            # One for all: the compiler drops a cast that repeats another.
            after = codes.column_wise[1] if after is None else after
            again: Operand = plan.input.again(as_rows(kept.high), kept.scale_t, after)  # type: ignore[attr-defined]
            result.append(Kept(again.codes_t, again.scale_t))
    return result


def _cast_alike(first: Any, second: Any) -> bool:
    """True if two quantizers make the same codes. (In compiled code that is left to the compiler.)"""
    if torch.compiler.is_compiling():
        return False
    one, other = (getattr(quantizer, "origin", _no_origin)() for quantizer in (first, second))
    return one is not None and other is not None and same_origin(one, other)


def _no_origin() -> None:
    """Of a quantizer that somebody watches."""


def _extents(x: Tensor, setup: MLP, weights: Any) -> list[Extents]:
    tokens = x.shape[:-1].numel()
    return [Extents(tokens, weight.shape[0], weight.shape[1], setup.dtype, weight.dtype) for weight in weights]
