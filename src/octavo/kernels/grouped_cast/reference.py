"""grouped_cast in plain PyTorch: the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import Format, cast_float32
from octavo.kernels.grouped_cast.layout import Groups
from octavo.kernels.layout import padded


def grouped_cast_reference(
    x: Tensor,
    groups: Groups,
    format: Format,
    by_row: Tensor | None,
    by_column: Tensor | None,
    inf_to_nan: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """As `octavo.kernels.grouped_cast.grouped_cast`; any device."""
    columns, bits = x.shape[1], torch.uint8
    # 1. float32; of a gradient, inf counts as NaN.  Finite overflow of the products below still saturates.
    x32 = x.float()
    if inf_to_nan:
        x32 = x32.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
    fill = (0, padded(columns) - columns)
    codes = codes_t = None
    # 2. Each row by its own multiplier.  [M, K] -> [M, K']
    if by_row is not None:
        codes = torch.nn.functional.pad(cast_float32(x32 * by_row, format).view(bits), fill).contiguous()
    # 3. Each entry by that of its group and column, at the place of its row.  [M, K] -> [C, K'] -> [K', C]
    if by_column is not None:
        values = torch.nn.functional.pad(cast_float32(x32 * by_column[groups.group], format).view(bits), fill)
        spread = torch.zeros((groups.source.shape[0], values.shape[1]), dtype=bits, device=x.device)
        codes_t = spread.index_copy_(0, groups.position, values).t().contiguous()
    return (
        None if codes is None else codes.view(format.dtype),
        None if codes_t is None else codes_t.view(format.dtype),
    )


def column_amax_reference(x: Tensor, groups: Groups) -> Tensor:
    """As `octavo.kernels.grouped_cast.column_amax`; any device."""
    # 1. Magnitudes; what is not finite counts as 0, and so does what float32 cannot hold.  [M, K]
    x32 = x.float()
    magnitude = torch.where(x32.isfinite(), x32.abs(), 0.0)
    # 2. The largest of each column within its group.  [M, K] -> [E, K]
    index = groups.group[:, None].expand(x.shape)
    return magnitude.new_zeros((groups.ends.shape[0], x.shape[1])).scatter_reduce_(0, index, magnitude, "amax")
