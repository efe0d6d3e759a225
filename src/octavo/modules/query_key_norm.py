"""What keeps the products of queries and keys from growing: each head normalised (Henry et al., "Query-Key
Normalization for Transformers", 2020).

    L2Normalization    x / sqrt(sum of squares + eps)                   no parameters
    RMSNorm            x / sqrt(mean of squares + eps) * weight         one weight for all heads
    LayerNorm          (x - mean) / sqrt(variance + eps) * weight + bias
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octavo.modules.norm import LayerNorm, RMSNorm, check_epsilon

QK_NORMS = ("L2Normalization", "RMSNorm", "LayerNorm")


class L2Normalization(nn.Module):
    """x / sqrt(sum of squares + eps) over the last dimension, in float32, rounded once.

    Args:
        eps: added to the sum of squares.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        check_epsilon(eps)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Of x's shape and dtype.

        Args:
            x: [..., D].
        """
        wide = x if x.dtype is torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The epsilon."""
        return f"eps={self.eps}"


def query_key_norm(kind: str | None, channels: int, eps: float, zero_centered: bool, **place: Any) -> nn.Module | None:
    """The layer that normalises heads of `channels` features; None for none.

    Raises:
        ValueError: an unknown kind.
    """
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps)
    if kind == "RMSNorm":
        return RMSNorm(channels, eps, zero_centered_gamma=zero_centered, **place)
    if kind == "LayerNorm":
        return LayerNorm(channels, eps, zero_centered_gamma=zero_centered, **place)
    raise ValueError(f"qk_norm_type is {kind!r}: expected None or one of {', '.join(QK_NORMS)}")
