"""Launching a Triton kernel again and again without asking Triton each time which variant the arguments call for.

`kernel[grid](...)` inspects every argument at every call, which takes longer than a small kernel runs. A caller that
knows what decides (dtypes, flags, which numbers are multiples of 16) gives it as a key, and the compiled variant is
found by that. The price: a key that leaves something out would launch the wrong variant, so a kernel marks whatever is
not in the key as `do_not_specialize`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


def specialization(*numbers: int) -> tuple[int, ...]:
    """What Triton compiles variants for in integer arguments: multiples of 16, the number 1, and more than 31 bits."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >> 31 > 0) for n in numbers)


class Launcher:
    """A kernel and its compiled variants by key.

    Args:
        kernel: a function made by `triton.jit`, whose every argument is positional.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[Hashable, Any] = {}

    def __call__(self, programs: int, device: torch.device, key: Hashable, arguments: tuple[Any, ...], warps: int) -> None:
        """Launch `programs` programs on the current stream of `device`.

        Args:
            programs: at least 1.
            device: where all tensors lie.
            key: equal for two calls only if Triton would take the same variant for both.
            arguments: all of the kernel's, constants included, in order.
            warps: per program; part of the key by the caller's doing.
        """
        index = device.index
        if index is not None and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(programs, device, key, arguments, warps)
            return
        variant = self._variants.get((index, key))
        if variant is None:
            # Under Triton's interpreter there is no variant to keep.
            variant = self._kernel[(programs,)](*arguments, num_warps=warps)
            if variant is not None:
                self._variants[index, key] = variant
            return
        variant[(programs, 1, 1)](*arguments, stream=torch._C._cuda_getCurrentRawStream(index))
