"""Memory that a kernel is about to write, without the price of `torch.empty`.

What `torch.empty` and `Tensor.new_empty` do before they allocate (finding the overload, the dispatcher's ways to every
kind of tensor and mode) takes longer than the allocation. Inductor's compiled code has an entry behind all of that,
which is taken here. It allocates on the current device, knows plain tensors only, and leaves memory as it is even
where torch is told to fill it: each kernel writes all of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Called with shape, strides and dtype.
New = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def new_on(index: int) -> New:
    """What makes uninitialised tensors on CUDA device `index`, the current one; -1 stands for the CPU."""
    if index < 0:
        return _new_on_cpu
    new: New = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
    return new


def _new_on_cpu(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
