"""LayerNorm or RMSNorm, a Linear, an activation and a second Linear in FP8, as one.

    n  [M, K]  = norm of x, rounded to the dtype of the layer
    z  [M, N]  = n @ w1^T + b1                N = F, or 2F of a gated activation
    a  [M, F]  = f(z), rounded to the dtype of the layer
    y  [M, K'] = a @ w2^T + b2

Where their scales are known beforehand n, a and the gradient of z exist as codes alone. Output, gradients and gathered
amaxes are those of `normalise`, `linear`, `activate`, `linear`, to the bit.

Kept for the backward, a token in bf16: x as it came (2 K bytes), codes of n (K), z (2 N), codes of a (F), eight bytes
of statistics; and the codes of w1 and w2. With `stored_fp8` z takes N + 4. With a plan that keeps the input of its
product, codes of n are made again from x, and those of a from z; with one that keeps its weight, those of the weight.
With `recomputed` nothing but x and the statistics is kept, and the codes of w1 in both layouts: the backward makes n, z
and a again; y is not computed again. What is made again is made with the same scales, and its amax is not gathered
again. (In compiled code it is the compiler that says what is kept.)

With `smoothing` a enters its product with the outliers of its channels taken away, which w2 has instead, see
`octavo.functional.smoothing`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.activation import decoded, stored
from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.fused_casts import (
    cast_activated,
    cast_activation_gradient,
    cast_normalised,
    repeated_scale,
    repeating,
)
from octavo.functional.linear import quantize_for_products, quantize_weight
from octavo.functional.norm import dense_rows
from octavo.functional.products import (
    Extents,
    Kept,
    Needs,
    fprop,
    gradients,
    kept_input,
    kept_weight,
    leave_out_zeros,
    quantized_gradient,
    refuse_second_derivative,
    shaped,
    summed,
)
from octavo.functional.shared_input import as_rows
from octavo.functional.smoothing import (
    Channels,
    Smoothing,
    folded,
    gradient_dtype,
    measured_channels,
    own_weight,
    reciprocal,
    unfolded,
)
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.norm_backward import norm_backward
from octavo.kernels.norm_cast import Norm
from octavo.runtime import LinearPlan
from octavo.tensor import Operand


class NormMLP(NamedTuple):
    """What one call runs with.

    Attributes:
        norm: the normalisation; `through` is the dtype of the layer.
        activation: its name, see `octavo.kernels.activations`.
        fc1, fc2: quantizers and precision of each product of the two linear parts.
        return_norm: n is handed out as well.
        stored_fp8: z is kept as codes.
        recomputed: n, z and a are not kept.
        smoothing: of the channels of a.
    """

    norm: Norm
    activation: str
    fc1: LinearPlan
    fc2: LinearPlan
    return_norm: bool = False
    stored_fp8: bool = False
    recomputed: bool = False
    smoothing: Smoothing | None = None

    @property
    def dtype(self) -> torch.dtype:
        """That of n, z, a and y."""
        assert self.norm.through is not None, "a layer hands on a dtype"
        return self.norm.through


class Parameters(NamedTuple):
    """Those of the layer: [K], [K], [N, K], [N], [K', F], [K']; None for what it has not."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    fc1_weight: Tensor
    fc1_bias: Tensor | None
    fc2_weight: Tensor
    fc2_bias: Tensor | None


class _Middle(NamedTuple):
    """What lies between the input and the second product."""

    n: Operand
    n_rows: Tensor | None
    statistics: tuple[Tensor | None, Tensor]
    z: Tensor
    a: Operand
    a_rows: Tensor | None
    channels: Channels | None


def norm_mlp(
    x: Tensor,
    parameters: Parameters,
    setup: NormMLP,
    cached_weights: tuple[Operand | None, Operand | None] = (None, None),
) -> tuple[Tensor, Tensor | None]:
    """(y [..., K'], n [..., K] if it is to be returned) of the dtype of the layer.

    Args:
        x: [..., K].
        parameters: of the layer; weights may be QuantizedTensors.
        setup: what to run with.
        cached_weights: codes of the two weights made before, in the layouts that are needed.
    """
    if torch.is_grad_enabled():
        result: Any = _NormMLP.apply(x, *parameters, setup, *cached_weights)
        return result if setup.return_norm else (result, None)
    refuse_tangents(x, *parameters)
    first = cached_weights[0] or quantize_weight(parameters.fc1_weight, setup.fc1, True, False)
    middle = _middle(x, parameters, first, setup, _Layouts(False, False, setup.return_norm, False))
    second = _second_weight(parameters.fc2_weight, cached_weights[1], setup, middle.channels)
    y = fprop(middle.a, second, parameters.fc2_bias, _second(x, parameters, setup), setup.fc2)
    n = None if middle.n_rows is None or not setup.return_norm else middle.n_rows.reshape(x.shape)
    return y.reshape(*x.shape[:-1], y.shape[1]), n


class _Layouts(NamedTuple):
    """What is wanted beyond the row-wise codes: column-wise ones of n and a, and their values in high precision."""

    n_columnwise: bool
    a_columnwise: bool
    n_rows: bool
    a_rows: bool


def _middle(x: Tensor, parameters: Parameters, w1: Operand, setup: NormMLP, layouts: _Layouts) -> _Middle:
    """Everything before the second product."""
    # 1. Codes of n.  [M, K]
    n = cast_normalised(
        dense_rows(x), setup.norm, parameters.norm_weight, parameters.norm_bias, setup.fc1.input, layouts.n_columnwise,
        layouts.n_rows,
    )  # fmt: skip
    # 2. The first product.  [M, K] @ [K, N] -> [M, N]
    z = fprop(n.operand, w1, parameters.fc1_bias, _first(x, parameters, setup), setup.fc1)
    # 3. Codes of a.  [M, N] -> [M, F]
    smoothing, channels = setup.smoothing, None
    if smoothing is not None:
        channels = measured_channels(z, setup.activation, setup.dtype, smoothing)
    a = cast_activated(
        z, setup.activation, setup.fc2.input if smoothing is None else smoothing.input, setup.dtype, True,
        layouts.a_columnwise, layouts.a_rows, None if channels is None else channels.inverse,
    )  # fmt: skip
    return _Middle(n.operand, n.rows, (n.mean, n.rstd), z, a.operand, a.rows, channels)


def _second_weight(weight: Tensor, made: Operand | None, setup: NormMLP, channels: Channels | None) -> Operand:
    """What the second product of the forward takes."""
    if setup.smoothing is not None and channels is not None:
        return folded(weight, channels, setup.smoothing.weight)
    return made or quantize_weight(weight, setup.fc2, True, False)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Any:
        parameters, (setup, w1, w2) = Parameters(*arguments[:6]), arguments[6:]
        needs_dn, fc1, fc2 = _needs(ctx.needs_input_grad)
        again = _made_again(setup, fc1, fc2)
        # 1. Codes of the weights, each in the layouts that somebody will use.
        if w1 is None:
            w1 = quantize_for_products(parameters.fc1_weight, setup.fc1, needs_dn)
        if w2 is None and setup.smoothing is not None:
            w2 = own_weight(parameters.fc2_weight, setup.fc2, fc2)
        elif w2 is None:
            w2 = quantize_for_products(parameters.fc2_weight, setup.fc2, fc2.dx)
        # 2. What lies between.  [M, K] -> [M, F]
        layouts = _layouts(setup, fc1, fc2)
        middle = _middle(x, parameters, w1, setup, _without(layouts, again, setup.return_norm))
        # 3. The second product.  [M, F] @ [F, K'] -> [M, K']
        second = _second_weight(parameters.fc2_weight, w2, setup, middle.channels)
        y = fprop(middle.a, second, parameters.fc2_bias, _second(x, parameters, setup), setup.fc2)
        n_rows = None if middle.n_rows is None else shaped(middle.n_rows, x.shape[:-1])
        # 4. What the backward needs.
        ctx.save_for_backward(
            *(Kept() if again.n else kept_input(middle.n, n_rows, setup.fc1, fc1.dw)),
            *_kept_z(middle.z, setup, fc2.dx and not again.z),
            *(Kept() if again.a else kept_input(middle.a, middle.a_rows, setup.fc2, fc2.dw)),
            *kept_weight(w1, parameters.fc1_weight, setup.fc1, fc1.dx),
            *kept_weight(w2, parameters.fc2_weight, setup.fc2, fc2.dx),
            *((x, parameters.norm_weight) if needs_dn or again.n else (None, None)),
            *(middle.statistics if needs_dn else (None, None)),
            parameters.norm_bias if again.n else None,
            repeated_scale(setup.fc1.input, middle.n) if again.n else None,
            *((parameters.fc1_bias, w1.codes, w1.scale) if again.z else (None,) * 3),
            repeated_scale(setup.fc2.input, middle.a) if again.a else None,
            middle.channels.scale if middle.channels is not None and fc2.dw and setup.fc2.wgrad_fp8 else None,
        )
        ctx.setup, ctx.x_shape = setup, x.shape
        ctx.extents = _first(x, parameters, setup), _second(x, parameters, setup)
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        leave_out_zeros(ctx)
        y = shaped(y, x.shape[:-1])
        return (y, n_rows) if setup.return_norm else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dn_returned: Tensor | None = None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        setup: NormMLP = ctx.setup
        _, fc1, fc2 = _needs(ctx.needs_input_grad)
        first, second = ctx.extents
        saved = ctx.saved_tensors  # once: a checkpoint unpacks them as they are read
        w1, w2, (x, norm_weight, mean, rstd) = Kept(*saved[8:11]), Kept(*saved[11:14]), saved[14:18]
        dn = dw1 = db1 = dw2 = db2 = dx = dgamma = dbeta = None
        if dy is not None:
            # 1. What was not kept.
            n, z, a = _completed(ctx, saved, fc1, fc2)
            # 2. The second product.  dy [M, K'] -> da [M, F], dw2 [K', F], db2 [K']
            gradient = quantized_gradient(as_rows(dy), setup.fc2, fc2)
            da, dw2, db2 = gradients(gradient, a, w2, fc2, second, setup.fc2)
            if dw2 is not None and saved[-1] is not None:
                dw2 = unfolded(dw2, saved[-1])
            if da is not None:
                # 3. The activation.  da [M, F] -> dz [M, N]
                gradient = cast_activation_gradient(da, z, setup.activation, setup.fc1, setup.dtype, fc1)
                # 4. The first product.  dz [M, N] -> dn [M, K], dw1 [N, K], db1 [N]
                dn, dw1, db1 = gradients(gradient, n, w1, fc1, first, setup.fc1)
        # 5. The normalisation.  dn [M, K] -> dx [M, K], dgamma [K], dbeta [K]
        dn = summed(dn, dn_returned)
        if dn is not None and fc1.dx:
            needs = ctx.needs_input_grad[:3]
            dx, dgamma, dbeta = norm_backward(dn, dense_rows(x), setup.norm, norm_weight, mean, rstd, needs)
        small = [
            None if value is None else value.to(dtype)
            for value, dtype in zip((dgamma, dbeta, dw1, db1, dw2, db2), ctx.dtypes, strict=True)
        ]
        return (None if dx is None else dx.reshape(ctx.x_shape), *small, None, None, None)


class _Again(NamedTuple):
    """What the backward makes again."""

    n: bool
    z: bool
    a: bool


def _needs(wanted: tuple[bool, ...]) -> tuple[bool, Needs, Needs]:
    """(a gradient goes on before the first product, what that product's backward computes, what the second's does)."""
    dn = any(wanted[:3])
    fc1 = Needs(dn, wanted[3], wanted[4])
    return dn, fc1, Needs(any(fc1), wanted[5], wanted[6])


def _made_again(setup: NormMLP, fc1: Needs, fc2: Needs) -> _Again:
    """Everything but x with `recomputed`; and what a plan that keeps the input of its product can make of what is kept.

    A z that is kept as codes is another one than that which a was made of.
    """
    recomputed = setup.recomputed and (fc2.dx or fc2.dw)
    from_x = fc1.dw and setup.fc1.keeps_input and setup.fc1.wgrad_fp8
    from_z = fc2.dw and setup.fc2.keeps_input and setup.fc2.wgrad_fp8 and fc2.dx and not setup.stored_fp8
    return _Again(recomputed or from_x, recomputed, fc2.dw if recomputed else from_z)


def _layouts(setup: NormMLP, fc1: Needs, fc2: Needs) -> _Layouts:
    """What the backward wants of n and a."""
    return _Layouts(
        fc1.dw and setup.fc1.wgrad_fp8,
        fc2.dw and setup.fc2.wgrad_fp8,
        fc1.dw and not setup.fc1.wgrad_fp8,
        fc2.dw and not setup.fc2.wgrad_fp8,
    )


def _without(layouts: _Layouts, again: _Again, return_norm: bool) -> _Layouts:
    """What the forward makes for it."""
    return _Layouts(
        layouts.n_columnwise and not again.n,
        layouts.a_columnwise and not again.a,
        return_norm or (layouts.n_rows and not again.n),
        layouts.a_rows and not again.a,
    )


def _kept_z(z: Tensor, setup: NormMLP, wanted: bool) -> tuple[Tensor | None, Tensor | None]:
    """z, or its codes and their scale."""
    if not wanted:
        return None, None
    return stored(z) if setup.stored_fp8 else (z, None)


def _completed(ctx: Any, saved: Any, fc1: Needs, fc2: Needs) -> tuple[Kept, Tensor, Kept]:
    """What the backward needs of n, z and a: as it was kept, or made again with the scales of the forward."""
    setup, first = ctx.setup, ctx.extents[0]
    n, (z, z_scale), a = Kept(*saved[:3]), saved[3:5], Kept(*saved[5:8])
    x, norm_weight = saved[14:16]
    norm_bias, n_scale, fc1_bias, w1_codes, w1_scale, a_scale, channels = saved[18:]
    again, layouts = _made_again(setup, fc1, fc2), _layouts(setup, fc1, fc2)
    if again.n:
        # The product is that of the forward, and counted there.
        plan = setup.fc1._replace(input=repeating(setup.fc1.input, n_scale), counter=None)
        columnwise, rows = layouts.n_columnwise, layouts.n_rows
        made = cast_normalised(dense_rows(x), setup.norm, norm_weight, norm_bias, plan.input, columnwise, rows)
        n = kept_input(made.operand, made.rows, setup.fc1, fc1.dw)
        if again.z:
            z = fprop(made.operand, Operand(w1_codes, w1_scale, None, None), fc1_bias, first, plan)
    z = z if z_scale is None else decoded(z, z_scale, (first.tokens, first.num_out), setup.dtype)
    if again.a and layouts.a_columnwise:
        smoothing = setup.smoothing
        quantizer = repeating(setup.fc2.input, a_scale) if smoothing is None else smoothing.input
        inverse = None if channels is None else reciprocal(channels)
        a_operand = cast_activated(z, setup.activation, quantizer, setup.dtype, False, True, False, inverse).operand
        a = Kept(a_operand.codes_t, a_operand.scale_t)
    elif again.a:
        a = Kept(high=activation_output(z, setup.activation, setup.dtype).output)
    return n, z, a


def _first(x: Tensor, parameters: Parameters, setup: NormMLP) -> Extents:
    weight = parameters.fc1_weight
    return Extents(x.shape[:-1].numel(), weight.shape[0], weight.shape[1], setup.dtype, weight.dtype)


def _second(x: Tensor, parameters: Parameters, setup: NormMLP) -> Extents:
    weight = parameters.fc2_weight
    dtype = weight.dtype if setup.smoothing is None else gradient_dtype(weight)
    return Extents(x.shape[:-1].numel(), weight.shape[0], weight.shape[1], setup.dtype, dtype)
