"""Mixtures of experts in plain PyTorch and in high precision, step by step: what their layers are measured against.

They take any floating dtype and compute in it; autograd goes through.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_linear_reference(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], splits: Sequence[int]
) -> Tensor:
    """One linear an expert -> [M, N]. x [M, K]; weights [N, K] each; biases [N] or None each; splits sum to M."""
    parts, start = [], 0
    for weight, bias, size in zip(weights, biases, splits, strict=True):
        # 1. The tokens of this expert.  [M, K] -> [m, K]
        part = x[start : start + size]
        # 2. [m, K] @ [K, N] -> [m, N]
        y = part @ weight.t()
        parts.append(y if bias is None else y + bias)
        start += size
    # 3. In the order in which they came.  [M, N]
    return torch.cat(parts)
