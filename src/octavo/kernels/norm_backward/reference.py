"""norm_backward in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import normalised

# dx, dweight, dbias.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def norm_backward_reference(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """As `octavo.kernels.norm_backward.norm_backward`; any device."""
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
        dx = (across * rstd[:, None]).to(torch.float32 if x.dtype == torch.float64 else x.dtype)
    return dx, dweight, dbias
