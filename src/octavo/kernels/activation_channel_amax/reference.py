"""activation_channel_amax in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.activations import activated
from octavo.kernels.amax.reference import amax_reference
from octavo.scaling import COLUMN


def activation_channel_amax_reference(x: Tensor, activation: str, through: torch.dtype | None = None) -> Tensor:
    """As `octavo.kernels.activation_channel_amax.activation_channel_amax`; any device."""
    # 1. The function in float32, as a separate activation would have handed it on.  [M, K] or [M, 2K] -> [M, K]
    y = activated(x.float(), activation)
    if through is not None:
        y = y.to(through)
    # 2. The amax of each column.  [M, K] -> [K]
    return amax_reference(y, COLUMN).reshape(-1)
