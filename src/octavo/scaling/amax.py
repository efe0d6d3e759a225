"""amax: the largest finite magnitude of each block that shares a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.scaling.granularity import Granularity, blocks


def block_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """amax of a matrix [M, K] by block -> float32 [tall, wide], finite and >= 0.

    inf and NaN are left out (a single one would otherwise decide the scale of all); a block without a finite value, or
    without any, has amax 0.
    """
    magnitude = x.abs().float()
    finite = torch.where(magnitude.isfinite(), magnitude, 0.0)
    if x.numel() == 0:
        return finite.new_zeros(granularity.scale_shape((x.shape[0], x.shape[1])))
    return blocks(finite, granularity).amax(dim=(1, 3))
