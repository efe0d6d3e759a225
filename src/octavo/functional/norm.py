"""LayerNorm and RMSNorm of rows, forward and backward.

    y = ((x - mean) rstd) gamma + beta        mean and rstd of each row; RMSNorm: mean 0

x, y [M, K]; gamma, beta [K]. In float32, rounded once to the dtype that y is handed on in; the gradients are those of
`octavo.kernels.norm_backward`. gamma is the weight, or 1 + the weight where that is kept zero-centred. Kept for the
backward: x itself, which is mostly kept by others too, and eight bytes a row (four of RMSNorm).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.products import shaped
from octavo.functional.reference import norm_reference
from octavo.functional.shared_input import as_rows
from octavo.kernels.norm_backward import norm_backward
from octavo.kernels.norm_cast import Norm, norm_output

_NO_TANGENT = (
    "octavo.LayerNorm and octavo.RMSNorm have a forward-mode derivative for float64 alone: use torch.nn.LayerNorm or"
    " torch.nn.RMSNorm here"
)


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
    refuse_tangents(x, weight, bias, why=_NO_TANGENT)
    return norm_output(dense_rows(x), norm, weight, bias).output.reshape(x.shape)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Norm) -> Tensor:
        output, _, mean, rstd = norm_output(dense_rows(x), norm, weight, bias)
        keep_for_norm_gradients(ctx, x, norm, weight, bias, mean, rstd)
        return shaped(output, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "create_graph=True asks for the gradient of a gradient, which octavo.LayerNorm and octavo.RMSNorm have"
                " for float64 alone: use torch.nn.LayerNorm or torch.nn.RMSNorm here"
            )
        return *norm_gradients(ctx, dy), None


def keep_for_norm_gradients(
    ctx: Any, x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> None:
    """Keep what `norm_gradients` takes."""
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.norm, ctx.bias_dtype = norm, None if bias is None else bias.dtype


def norm_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias, the first three inputs of the function whose ctx it is; each in its own dtype."""
    x, weight, mean, rstd = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    dx, dweight, dbias = norm_backward(as_rows(dy), dense_rows(x), ctx.norm, weight, mean, rstd, needs)
    return (
        None if dx is None else dx.reshape(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(ctx.bias_dtype),
    )


def dense_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K] with neighbours in a row side by side: in another order their sums are rounded otherwise."""
    rows = as_rows(x)
    return rows if rows.stride(1) == 1 else rows.contiguous()
