"""amax in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.scaling import COLUMN, ROW, TENSOR, Granularity


def amax_reference(x: Tensor, granularity: Granularity) -> Tensor:
    """As `octavo.kernels.amax.amax`; any device."""
    # 1. Magnitudes; what is not finite counts as 0, and so does what float32 cannot hold.  [M, K]
    if x.dtype == torch.float64:
        x = x.float()
    magnitude = torch.where(x.isfinite(), x.abs(), 0)
    if x.numel() == 0:
        shape = {TENSOR: (), ROW: (x.shape[0], 1), COLUMN: (1, x.shape[1])}[granularity]
        return x.new_zeros(shape, dtype=torch.float32)
    # 2. The largest, exact in any dtype, then in float32.  [M, K] -> [] | [M, 1] | [1, K]
    if granularity is TENSOR:
        return magnitude.amax().float()
    return magnitude.amax(dim=1 if granularity is ROW else 0, keepdim=True).float()


def amax_by_row_and_column_reference(x: Tensor, row: bool, column: bool) -> tuple[Tensor | None, Tensor | None]:
    """As `octavo.kernels.amax.amax_by_row_and_column`; any device."""
    return amax_reference(x, ROW) if row else None, amax_reference(x, COLUMN) if column else None
