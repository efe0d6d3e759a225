"""LayerNorm or RMSNorm, a Linear, an activation and a second Linear in FP8, as one.

    n  [M, K]  = norm of x, rounded to the dtype of the layer
    z  [M, N]  = n @ w1^T + b1                N = F, or 2F of a gated activation
    a  [M, F]  = f(z), rounded to the dtype of the layer
    y  [M, K'] = a @ w2^T + b2

Where their scales are known beforehand n, a and the gradient of z exist as codes alone. Output, gradients and gathered
amaxes are those of `normalise`, `linear`, `activate`, `linear`, to the bit.

Kept for the backward, a token in bf16: x as it came (2 K bytes), codes of n (K), z (2 N), codes of a (F), eight bytes
of statistics; and the codes of w1 and w2. With `stored_fp8` z takes N + 4. With `recomputed` nothing but x and the
statistics is kept, and the codes of w1 in both layouts: the backward makes n, z and a again, with the same scales, and
does not gather their amaxes again; y is not computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.activation import decoded, stored
from octavo.functional.fused_casts import (
    cast_activated,
    cast_activation_gradient,
    cast_normalised,
    repeated_scale,
    repeating,
)
from octavo.functional.linear import quantize_weight
from octavo.functional.norm import norm_backward
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
from octavo.kernels.activation_cast import activation_output
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
    """

    norm: Norm
    activation: str
    fc1: LinearPlan
    fc2: LinearPlan
    return_norm: bool = False
    stored_fp8: bool = False
    recomputed: bool = False

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
    first = cached_weights[0] or quantize_weight(parameters.fc1_weight, setup.fc1, True, False)
    second = cached_weights[1] or quantize_weight(parameters.fc2_weight, setup.fc2, True, False)
    nothing = _Layouts(False, False, setup.return_norm, False)
    middle = _middle(x, parameters, first, setup, nothing)
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
        as_rows(x), setup.norm, parameters.norm_weight, parameters.norm_bias, setup.fc1.input, layouts.n_columnwise,
        layouts.n_rows,
    )  # fmt: skip
    # 2. The first product.  [M, K] @ [K, N] -> [M, N]
    z = fprop(n.operand, w1, parameters.fc1_bias, _first(x, parameters, setup), setup.fc1)
    # 3. Codes of a.  [M, N] -> [M, F]
    a = cast_activated(z, setup.activation, setup.fc2.input, setup.dtype, True, layouts.a_columnwise, layouts.a_rows)
    return _Middle(n.operand, n.rows, (n.mean, n.rstd), z, a.operand, a.rows)


class _NormMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Any:
        parameters, (setup, w1, w2) = Parameters(*arguments[:6]), arguments[6:]
        needs_dn, fc1, fc2 = _needs(ctx.needs_input_grad)
        keeps = not setup.recomputed
        # 1. Codes of the weights, each in the layouts that somebody will use.
        if w1 is None:
            w1 = quantize_weight(parameters.fc1_weight, setup.fc1, True, needs_dn and setup.fc1.dgrad_fp8)
        if w2 is None:
            w2 = quantize_weight(parameters.fc2_weight, setup.fc2, True, fc2.dx and setup.fc2.dgrad_fp8)
        # 2. What lies between.  [M, K] -> [M, F]
        wanted = _for_backward(setup, fc1, fc2)
        layouts = wanted if keeps else _Layouts(False, False, False, False)
        middle = _middle(x, parameters, w1, setup, layouts._replace(n_rows=layouts.n_rows or setup.return_norm))
        # 3. The second product.  [M, F] @ [F, K'] -> [M, K']
        y = fprop(middle.a, w2, parameters.fc2_bias, _second(x, parameters, setup), setup.fc2)
        n_rows = None if middle.n_rows is None else shaped(middle.n_rows, x.shape[:-1])
        # 4. What the backward needs.
        kept = _kept_of(middle._replace(n_rows=n_rows), setup, fc1, fc2) if keeps else (None,) * 8
        again = setup.recomputed and (fc1.dx or fc1.dw or fc1.db or fc2.dw)
        ctx.save_for_backward(
            *kept,
            *kept_weight(w1, parameters.fc1_weight, setup.fc1, fc1.dx),
            *kept_weight(w2, parameters.fc2_weight, setup.fc2, fc2.dx),
            *((x, parameters.norm_weight) if needs_dn or again else (None, None)),
            *(middle.statistics if needs_dn else (None, None)),
            *((parameters.norm_bias, parameters.fc1_bias, w1.codes, w1.scale) if again else (None,) * 4),
            *(_scales(middle, setup) if again else (None, None)),
        )
        ctx.setup, ctx.x_shape = setup, x.shape
        ctx.extents = _first(x, parameters, setup), _second(x, parameters, setup)
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        y = shaped(y, x.shape[:-1])
        return (y, n_rows) if setup.return_norm else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dn_returned: Tensor | None = None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        setup: NormMLP = ctx.setup
        _, fc1, fc2 = _needs(ctx.needs_input_grad)
        first, second = ctx.extents
        kept, w1, w2, (x, norm_weight, mean, rstd), again = _unpacked(ctx.saved_tensors)
        # 1. What was not kept.
        if setup.recomputed and (fc2.dx or fc2.dw):
            kept = _recomputed(ctx, x, norm_weight, again, fc1, fc2)
        n, z_kept, z_scale, a = Kept(*kept[:3]), kept[3], kept[4], Kept(*kept[5:])
        # 2. The second product.  dy [M, K'] -> da [M, F], dw2 [K', F], db2 [K']
        gradient = quantized_gradient(as_rows(dy), setup.fc2, fc2)
        da, dw2, db2 = gradients(gradient, a, w2, fc2, second, setup.fc2)
        dn = dw1 = db1 = dx = dgamma = dbeta = None
        if da is not None:
            # 3. The activation.  da [M, F] -> dz [M, N]
            z = decoded(z_kept, z_scale, (first.tokens, first.num_out), setup.dtype)
            gradient = cast_activation_gradient(da, z, setup.activation, setup.fc1, setup.dtype, fc1)
            # 4. The first product.  dz [M, N] -> dn [M, K], dw1 [N, K], db1 [N]
            dn, dw1, db1 = gradients(gradient, n, w1, fc1, first, setup.fc1)
        # 5. The normalisation.  dn [M, K] -> dx [M, K], dgamma [K], dbeta [K]
        if dn is not None:
            dn = dn if dn_returned is None else dn + as_rows(dn_returned)
            needs = ctx.needs_input_grad[:3]
            dx, dgamma, dbeta = norm_backward(dn, as_rows(x), setup.norm, norm_weight, mean, rstd, needs)
        small = [
            None if value is None else value.to(dtype)
            for value, dtype in zip((dgamma, dbeta, dw1, db1, dw2, db2), ctx.dtypes, strict=True)
        ]
        return (None if dx is None else dx.reshape(ctx.x_shape), *small, None, None, None)


def _needs(wanted: tuple[bool, ...]) -> tuple[bool, Needs, Needs]:
    """(a gradient goes on before the first product, what that product's backward computes, what the second's does)."""
    dn = any(wanted[:3])
    fc1 = Needs(dn, wanted[3], wanted[4])
    return dn, fc1, Needs(any(fc1), wanted[5], wanted[6])


def _for_backward(setup: NormMLP, fc1: Needs, fc2: Needs) -> _Layouts:
    """What the backward wants of n and a."""
    return _Layouts(
        fc1.dw and setup.fc1.wgrad_fp8,
        fc2.dw and setup.fc2.wgrad_fp8,
        fc1.dw and not setup.fc1.wgrad_fp8,
        fc2.dw and not setup.fc2.wgrad_fp8,
    )


def _kept_of(middle: _Middle, setup: NormMLP, fc1: Needs, fc2: Needs) -> tuple[Tensor | None, ...]:
    """(codes_t, scale_t, rows of n; z or its codes, their scale; codes_t, scale_t, rows of a)."""
    z: tuple[Tensor | None, Tensor | None] = (None, None)
    if fc2.dx:
        z = stored(middle.z) if setup.stored_fp8 else (middle.z, None)
    return (
        *kept_input(middle.n, middle.n_rows, setup.fc1, fc1.dw),
        *z,
        *kept_input(middle.a, middle.a_rows, setup.fc2, fc2.dw),
    )


def _scales(middle: _Middle, setup: NormMLP) -> tuple[Tensor | None, Tensor | None]:
    """Those that the casts of n and a must take again."""
    return repeated_scale(setup.fc1.input, middle.n), repeated_scale(setup.fc2.input, middle.a)


def _recomputed(
    ctx: Any, x: Tensor, norm_weight: Tensor | None, again: tuple[Any, ...], fc1: Needs, fc2: Needs
) -> tuple[Tensor | None, ...]:
    """What `_kept_of` would have given, made again with the scales of the forward."""
    setup: NormMLP = ctx.setup
    norm_bias, fc1_bias, w1_codes, w1_scale, n_scale, a_scale = again
    # The product is that of the forward, and counted there.
    plan = setup.fc1._replace(input=repeating(setup.fc1.input, n_scale), counter=None)
    wanted = _for_backward(setup, fc1, fc2)
    n = cast_normalised(as_rows(x), setup.norm, norm_weight, norm_bias, plan.input, wanted.n_columnwise, wanted.n_rows)
    z = fprop(n.operand, Operand(w1_codes, w1_scale, None, None), fc1_bias, ctx.extents[0], plan)
    a = Kept()
    if wanted.a_columnwise:
        quantizer = repeating(setup.fc2.input, a_scale)
        made = cast_activated(z, setup.activation, quantizer, setup.dtype, False, True, False)
        a = Kept(made.operand.codes_t, made.operand.scale_t)
    elif wanted.a_rows:
        a = Kept(high=activation_output(z, setup.activation, setup.dtype).output)
    return (*kept_input(n.operand, n.rows, setup.fc1, fc1.dw), z, None, *a)


def _unpacked(saved: Any) -> tuple[Any, Kept, Kept, Any, Any]:
    """Saved tensors as (kept of n, z, a; of w1; of w2; x, norm weight and statistics; what a recompute needs)."""
    return saved[:8], Kept(*saved[8:11]), Kept(*saved[11:14]), saved[14:18], saved[18:]


def _first(x: Tensor, parameters: Parameters, setup: NormMLP) -> Extents:
    weight = parameters.fc1_weight
    return Extents(x.shape[:-1].numel(), weight.shape[0], weight.shape[1], setup.dtype, weight.dtype)


def _second(x: Tensor, parameters: Parameters, setup: NormMLP) -> Extents:
    weight = parameters.fc2_weight
    return Extents(x.shape[:-1].numel(), weight.shape[0], weight.shape[1], setup.dtype, weight.dtype)
