"""The last step of a product: its bias, and the one rounding of its output."""

from __future__ import annotations

import torch
from torch import Tensor


def with_bias(out: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """out [M, N] in float32, a bias [N] added in float32 -> [M, N] of `dtype`."""
    return (out if bias is None else out + bias.float()).to(dtype)
