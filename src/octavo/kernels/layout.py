"""The layout that FP8 matrix units ask for: K-major operands whose extents are multiples of 16.

Codes leave every cast in a buffer rounded up to that multiple in both dimensions, the rest zero. A zero adds nothing
to a product, so any token count and any feature count works, and no kernel has a second pass only to pad.
"""

from __future__ import annotations

import torch
from torch import Tensor

# torch._scaled_mm (cuBLASLt) refuses extents that are no multiple of this.
ALIGNMENT = 16

# Bytes. cuBLASLt refuses the scale of an operand that is not aligned to it (seen on torch 2.11 with CUDA 13.0).
SCALE_ALIGNMENT = 16


def padded(extent: int) -> int:
    """`extent` rounded up to the alignment."""
    return (extent + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def pad_matrix(x: Tensor, value: float = 0.0) -> Tensor:
    """A matrix [M, K] as [padded(M), padded(K)], filled up with `value`; x itself where nothing is missing."""
    rows, columns = padded(x.shape[0]) - x.shape[0], padded(x.shape[1]) - x.shape[1]
    if not (rows or columns):
        return x
    return torch.nn.functional.pad(x, (0, columns, 0, rows), value=value)


def pad_row_scale(scale: Tensor) -> Tensor:
    """A scale [M, 1] as [padded(M), 1], filled up with ones; a scale of a whole tensor stays as it is."""
    # Whether there is anything to fill up is not asked while compiling: each answer would be a graph of its own.
    if scale.dim() == 0 or (scale.shape[0] % ALIGNMENT == 0 and not torch.compiler.is_compiling()):
        return scale
    missing = padded(scale.shape[0]) - scale.shape[0]
    return torch.nn.functional.pad(scale, (0, 0, 0, missing), value=1.0)
