"""LayerNorm or RMSNorm and a Linear in FP8, as one.

    n  [M, K] = norm of x, rounded to the dtype of the layer       (`octavo.functional.norm`)
    y  [M, N] = n @ w^T + b                                        (`octavo.functional.products`)

Where the scale of n is known beforehand n exists as codes alone. Output, gradients and gathered amaxes are those of
`normalise` and then `linear`, to the bit. (On a GPU the statistics of a row are sums in another order where one of the
two measures its scale, see `octavo.kernels.norm_cast`.)

Kept for the backward, a token: x as it came, K bytes of codes of n, eight bytes of statistics (four of RMSNorm); and
the codes of w. Nothing of n if w is frozen, nothing of x, the statistics and w if nothing before the product wants a
gradient. A product in high precision keeps its operand instead of the codes. A plan that keeps the input of its product
has the codes of n made again from x, with the same scale. (In compiled code it is the compiler that says what is kept.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.fused_casts import cast_normalised, repeated_scale, repeating
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
from octavo.kernels.norm_backward import norm_backward
from octavo.kernels.norm_cast import Norm
from octavo.runtime import LinearPlan
from octavo.tensor import Operand


class NormLinear(NamedTuple):
    """What one call runs with.

    Attributes:
        norm: the normalisation; `through` is the dtype of the layer.
        plan: quantizers and precision of each product.
        return_norm: n is handed out as well.
    """

    norm: Norm
    plan: LinearPlan
    return_norm: bool

    @property
    def dtype(self) -> torch.dtype:
        """That of n and y."""
        assert self.norm.through is not None, "a layer hands on a dtype"
        return self.norm.through


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    setup: NormLinear,
    cached_weight: Operand | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y [..., N], n [..., K] if it is to be returned) of the dtype of the layer.

    Args:
        x: [..., K].
        norm_weight, norm_bias: [K] or None.
        weight: [N, K], a QuantizedTensor included.
        bias: [N] or None.
        setup: what to run with.
        cached_weight: codes of the weight made before, in the layouts that are needed.
    """
    if torch.is_grad_enabled():
        result: Any = _NormLinear.apply(x, norm_weight, norm_bias, weight, bias, setup, cached_weight)
        return result if setup.return_norm else (result, None)
    refuse_tangents(x, norm_weight, norm_bias, weight, bias)
    operand = cached_weight or quantize_weight(weight, setup.plan, True, False)
    n = cast_normalised(dense_rows(x), setup.norm, norm_weight, norm_bias, setup.plan.input, False, setup.return_norm)
    lead = x.shape[:-1]
    y = fprop(n.operand, operand, bias, _extents(x, weight, setup.dtype), setup.plan)
    return y.reshape(*lead, y.shape[1]), n.rows.reshape(x.shape) if setup.return_norm and n.rows is not None else None


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        setup: NormLinear,
        cached_weight: Operand | None,
    ) -> Any:
        plan, extents = setup.plan, _extents(x, weight, setup.dtype)
        needs_dn, needs_dw = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        # 1. Codes of n and w, each in the layouts that somebody will use.
        again = needs_dw and plan.wgrad_fp8 and plan.keeps_input
        columnwise, keeps_n = needs_dw and plan.wgrad_fp8 and not again, needs_dw and not plan.wgrad_fp8
        return_rows = setup.return_norm or keeps_n
        n = cast_normalised(dense_rows(x), setup.norm, norm_weight, norm_bias, plan.input, columnwise, return_rows)
        w = cached_weight
        if w is None:
            w = quantize_for_products(weight, plan, needs_dn)
        # 2. The product.  [M, K] @ [K, N] -> [M, N]
        y = shaped(fprop(n.operand, w, bias, extents, plan), x.shape[:-1])
        rows = shaped(n.rows, x.shape[:-1]) if n.rows is not None and return_rows else None
        # 3. What the backward needs.
        ctx.save_for_backward(
            *(Kept() if again else kept_input(n.operand, rows, plan, needs_dw)),
            *kept_weight(w, weight, plan, needs_dn),
            *((x, norm_weight) if needs_dn or again else (None, None)),
            *((n.mean, n.rstd) if needs_dn else (None, None)),
            *((norm_bias, repeated_scale(plan.input, n.operand)) if again else (None, None)),
        )
        ctx.setup, ctx.extents, ctx.x_shape, ctx.again = setup, extents, x.shape, again
        ctx.dtypes = [None if p is None else p.dtype for p in (norm_weight, norm_bias, bias)]
        leave_out_zeros(ctx)
        return (y, rows) if setup.return_norm else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dn_returned: Tensor | None = None) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        setup, saved = ctx.setup, ctx.saved_tensors
        n, (x, norm_weight, mean, rstd, norm_bias, n_scale) = Kept(*saved[:3]), saved[6:]
        wants_w, wants_b = ctx.needs_input_grad[3:5]
        needs = Needs(any(ctx.needs_input_grad[:3]), wants_w, wants_b)
        dn = dw = db = dx = dgamma = dbeta = None
        if dy is not None:
            # 1. The products.  dy [M, N] -> dn [M, K], dw [N, K], db [N]
            if ctx.again:
                quantizer = repeating(setup.plan.input, n_scale)
                made = cast_normalised(dense_rows(x), setup.norm, norm_weight, norm_bias, quantizer, True, False)
                n = Kept(made.operand.codes_t, made.operand.scale_t)
            gradient = quantized_gradient(as_rows(dy), setup.plan, needs)
            dn, dw, db = gradients(gradient, n, Kept(*saved[3:6]), needs, ctx.extents, setup.plan)
        # 2. The normalisation.  dn [M, K] -> dx [M, K], dgamma [K], dbeta [K]
        dn = summed(dn, dn_returned)
        if dn is not None and needs.dx:
            wants = ctx.needs_input_grad[:3]
            dx, dgamma, dbeta = norm_backward(dn, dense_rows(x), setup.norm, norm_weight, mean, rstd, wants)
        small = zip((dgamma, dbeta, db), ctx.dtypes, strict=True)
        dgamma, dbeta, db = (None if value is None else value.to(dtype) for value, dtype in small)
        return None if dx is None else dx.reshape(ctx.x_shape), dgamma, dbeta, dw, db, None, None


def _extents(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Extents:
    return Extents(x.shape[:-1].numel(), weight.shape[0], weight.shape[1], dtype, weight.dtype)
