"""Activation functions between two linear layers, forward and backward, and what is kept of their input.

    a = f(z), or f(first half of z) * second half of z        octavo.kernels.activations has them all

z [..., N], a [..., K], N = K or 2K of a gated function; float32, rounded once. Kept for the backward: z in its own
dtype, or as E4M3 codes with one scale a row: N + 4 bytes a token instead of 2 N in bf16. The gradient is then taken at
the decoded z; the forward is the same either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.products import shaped
from octavo.functional.shared_input import as_rows
from octavo.kernels.activation_backward_cast import activation_backward_output
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.activations import activated
from octavo.scaling import ROW
from octavo.tensor import CurrentQuantizer, QuantizeSpec

_STORED = CurrentQuantizer(QuantizeSpec(format=E4M3, granularity=ROW))


def activate(z: Tensor, activation: str, stored_fp8: bool = False) -> Tensor:
    """a [..., K] of z [..., N], of its dtype.

    Args:
        z: float32, bfloat16, float16; or float64, which stays float64 throughout.
        activation: its name.
        stored_fp8: keep z for the backward as codes.
    """
    if z.dtype == torch.float64:
        return activated(as_rows(z), activation).reshape(*z.shape[:-1], -1)
    if torch.is_grad_enabled():
        result: Tensor = _Activation.apply(z, activation, stored_fp8)
        return result
    refuse_tangents(z, why=f"{activation} has a forward-mode derivative for float64 alone")
    a = activation_output(as_rows(z), activation, z.dtype).output
    return a.reshape(*z.shape[:-1], a.shape[1])


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str, stored_fp8: bool) -> Tensor:
        rows = as_rows(z)
        a = activation_output(rows, activation, z.dtype).output
        if stored_fp8:
            ctx.save_for_backward(*stored(rows))
        else:
            ctx.save_for_backward(z, None)
        ctx.activation, ctx.shape, ctx.dtype = activation, z.shape, z.dtype
        return shaped(a, z.shape[:-1])

    @staticmethod
    def backward(ctx: Any, da: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"create_graph=True asks for the gradient of the gradient of {ctx.activation}, which exists for float64"
                " alone"
            )
        rows = (ctx.shape[:-1].numel(), ctx.shape[-1])
        kept, scale = ctx.saved_tensors
        z = decoded(kept, scale, rows, ctx.dtype)
        dz = activation_backward_output(as_rows(da), as_rows(z), ctx.activation, ctx.dtype).output
        return dz.reshape(ctx.shape), None, None


def stored(z: Tensor) -> tuple[Tensor, Tensor]:
    """z [M, N] as codes [M', N'] with a scale a row [M', 1]."""
    return _STORED(z, True, False).row_wise


def decoded(kept: Tensor, scale: Tensor | None, extents: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """What `stored` was given, [M, N] of `dtype`; a z that was kept as it is has no scale."""
    if scale is None:
        return kept
    rows, columns = extents
    return (kept.narrow(0, 0, rows).narrow(1, 0, columns).float() * scale.narrow(0, 0, rows)).to(dtype)
