"""cast_transpose in plain PyTorch: the definition."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import Format, cast_float32
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.layout import pad_matrix
from octavo.scaling import TENSOR

_BITS = torch.uint8


def cast_transpose_reference(
    x: Tensor, format: Format, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `octavo.kernels.cast_transpose.cast_transpose`; any device."""
    # 1. The amax, of what came in.  [M, K] -> []
    amax = amax_reference(x, TENSOR)
    # 2. float32; of a gradient, inf counts as NaN.  Finite overflow of the product below still saturates.
    x32 = x.float()
    if inf_to_nan:
        x32 = x32.nan_to_num(nan=math.nan, posinf=math.nan, neginf=math.nan)
    # 3. Scale, cast, fill up.  [M, K] -> [M', K']
    codes = codes_t = None
    if multiplier is not None:
        # What need not be padded has the strides of x until here.
        codes = pad_matrix(cast_float32(x32 * multiplier, format).view(_BITS)).contiguous().view(format.dtype)
    # 4. The other layout: the same codes, or, with scales of its own, codes of its own.  [M, K] -> [K', M']
    if multiplier_t is not None:
        if codes is not None and multiplier_t is multiplier:
            codes_t = codes.t().clone(memory_format=torch.contiguous_format)
        else:
            transposed = cast_float32((x32 * multiplier_t).t().contiguous(), format)
            codes_t = pad_matrix(transposed.view(_BITS)).view(format.dtype)
    # 5. Codes of one layout never share memory with x or with the other.
    return codes, codes_t, amax
