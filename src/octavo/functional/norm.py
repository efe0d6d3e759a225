"""LayerNorm and RMSNorm of rows, forward and backward.

    y      = ((x - mean) rstd) gamma + beta        mean and rstd of each row; RMSNorm: mean 0
    g      = dy gamma                              xhat = (x - mean) rstd
    dx     = rstd (g - mean(g) - xhat mean(g xhat))          of each row; RMSNorm without mean(g)
    dgamma = sum of dy xhat over the rows          dbeta = sum of dy over the rows

x, y, dy [M, K]; gamma, beta [K]. All in float32, each result rounded once to the dtype it is handed on in. gamma is the
weight, or 1 + the weight where that is kept zero-centred. Kept for the backward: x itself, which is mostly kept by
others too, and eight bytes a row (four of RMSNorm).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional.products import shaped
from octavo.functional.reference import norm_reference
from octavo.functional.shared_input import as_rows
from octavo.kernels.norm_cast import Norm, norm_output
from octavo.kernels.norm_cast.reference import normalised

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def normalise(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Normalised rows of x [..., K] -> the same shape, of dtype `norm.through`.

    Args:
        x: float32, bfloat16, float16; or float64, which stays float64 throughout.
        norm: which normalisation.
        weight, bias: [K] or None.
    """
    if x.dtype == torch.float64:
        weight, bias = (None if parameter is None else parameter.double() for parameter in (weight, bias))
        return norm_reference(x, norm, weight, bias)
    if torch.is_grad_enabled():
        result: Tensor = _Norm.apply(x, weight, bias, norm)
        return result
    return norm_output(dense_rows(x), norm, weight, bias).output.reshape(x.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
        output, _, mean, rstd = norm_output(dense_rows(x), norm, weight, bias)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.norm, ctx.bias_dtype = norm, None if bias is None else bias.dtype
        return shaped(output, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which octavo.LayerNorm and octavo.RMSNorm have"
                " for float64 alone: use torch.nn.LayerNorm or torch.nn.RMSNorm here"
            )
        x, weight, mean, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        dx, dweight, dbias = norm_backward(as_rows(dy), dense_rows(x), ctx.norm, weight, mean, rstd, needs)
        return (
            None if dx is None else dx.reshape(x.shape),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(ctx.bias_dtype),
            None,
        )


def dense_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K] with neighbours in a row side by side: in another order their sums are rounded otherwise."""
    rows = as_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def norm_backward(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """(dx [M, K] of x's dtype, dweight [K], dbias [K] in float32); None for what is not needed.

    Args:
        dy, x: [M, K].
        norm: which normalisation.
        weight: [K] or None.
        mean, rstd: [M] float32, what the forward found; mean is None of RMSNorm.
        needs: of x, weight, bias.
    """
    needs_dx, needs_dweight, needs_dbias = needs
    dx = dweight = dbias = None
    dy32 = dy.float()
    # 1. What was scaled and shifted.  [M, K]
    xhat = normalised(x, norm, None, None, mean, rstd)
    # 2. Gradients of the parameters.  [M, K] -> [K]
    if needs_dweight:
        dweight = (dy32 * xhat).sum(0)
    if needs_dbias:
        dbias = dy32.sum(0)
    # 3. That of x: what of g is neither constant in a row nor along xhat.  [M, K]
    if needs_dx:
        g = dy32 if weight is None else dy32 * (weight.float() + 1 if norm.zero_centered else weight.float())
        along = (g * xhat).mean(1, keepdim=True)
        across = g - xhat * along
        if mean is not None:
            across = across - g.mean(1, keepdim=True)
        dx = (across * rstd[:, None]).to(x.dtype)
    return dx, dweight, dbias
