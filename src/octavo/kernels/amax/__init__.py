"""amax: one read of a matrix, the largest finite magnitude of the whole, of each row, or of each column.

Price: a pass over memory of its own (2 bytes an element in bf16), which delayed scaling does without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons, uses_triton
from octavo.scaling import COLUMN, ROW, TENSOR, Granularity, granularity_named


def amax(x: Tensor, granularity: Granularity = TENSOR) -> Tensor:
    """Largest finite magnitude of a matrix x [M, K], any floating dtype and strides.

    Returns:
        float32: [] for TENSOR, [M, 1] for ROW, [1, K] for COLUMN. inf and NaN are left out; 0 where nothing is left.
        float64 is rounded to float32 first, and what is infinite then is left out too.

    Raises:
        ValueError: x is no floating-point matrix, or the granularity another one.
    """
    if torch.compiler.is_compiling():
        result: Tensor = _operator(x, granularity.name)
        return result
    return _launch(x, granularity)


def unsupported_reasons(x: Tensor) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return device_reasons(x.device)


def _launch(x: Tensor, granularity: Granularity) -> Tensor:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"amax takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}")
    if granularity not in (TENSOR, ROW, COLUMN):
        raise ValueError(
            f"amax by tensor, row or column, found granularity {granularity.name}: use scaling.block_amax for blocks"
        )
    if uses_triton(x) and x.numel():
        from octavo.kernels.amax.triton_kernel import amax_triton

        return amax_triton(x, granularity)
    return amax_reference(x, granularity)


def _fake(x: Tensor, granularity: str) -> Tensor:
    shape = {"tensor": (), "row": (x.shape[0], 1), "column": (1, x.shape[1])}[granularity]
    return x.new_empty(shape, dtype=torch.float32)


_operator = register(
    "amax(Tensor x, str granularity) -> Tensor",
    lambda x, granularity: _launch(x, granularity_named(granularity)),
    _fake,
)

__all__ = ["amax", "amax_reference", "unsupported_reasons"]
