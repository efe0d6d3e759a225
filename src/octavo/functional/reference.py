"""The fused layers in plain PyTorch and in high precision, step by step: what they are measured against.

They take any floating dtype and compute in it, so that float64 gives a reference for float32; autograd goes through.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.activations import activated
from octavo.kernels.norm_cast import Norm


def norm_reference(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """LayerNorm or RMSNorm of rows -> [..., K]. x [..., K]; weight, bias [K] or None."""
    # 1. Deviations from the mean of each row; RMSNorm: from 0.  [..., K]
    centred = x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x
    # 2. In units of their root mean square.  [..., K]
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + norm.epsilon)
    # 3. Scaled and shifted.  [..., K]
    if weight is not None:
        y = y * (weight + 1 if norm.zero_centered else weight)
    return y if bias is None else y + bias


def norm_linear_reference(
    x: Tensor,
    norm: Norm,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(y [..., N], n [..., K]). x [..., K]; norm_weight, norm_bias [K]; weight [N, K]; bias [N] or None."""
    # 1. [..., K] -> [..., K]
    n = norm_reference(x, norm, norm_weight, norm_bias)
    # 2. [..., K] @ [K, N] -> [..., N]
    y = n @ weight.t()
    return y if bias is None else y + bias, n


def norm_mlp_reference(
    x: Tensor,
    norm: Norm,
    activation: str,
    norm_parameters: tuple[Tensor | None, Tensor | None],
    fc1: tuple[Tensor, Tensor | None],
    fc2: tuple[Tensor, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """(y [..., K'], n [..., K]).

    Args:
        x: [..., K].
        norm: which normalisation.
        activation: its name, see `octavo.kernels.activations`.
        norm_parameters: weight and bias, [K] each or None.
        fc1: weight [N, K] and bias [N] or None; N = F, or 2F of a gated activation.
        fc2: weight [K', F] and bias [K'] or None.
    """
    # 1. and 2. [..., K] -> [..., N]
    z, n = norm_linear_reference(x, norm, *norm_parameters, *fc1)
    # 3. [..., N] -> [..., F]
    a = activated(z.reshape(z.shape[:-1].numel(), z.shape[-1]), activation)
    # 4. [..., F] @ [F, K'] -> [..., K']
    weight, bias = fc2
    y = (a @ weight.t()).reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias, n
