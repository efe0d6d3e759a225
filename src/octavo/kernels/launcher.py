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
from torch import Tensor


def specialization(*numbers: int) -> tuple[int, ...]:
    """What Triton compiles variants for in integer arguments: multiples of 16, the number 1, and more than 31 bits."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >> 31 > 0) for n in numbers)


class Key(tuple[Any, ...]):
    """A part of a key that is made once and looked up often: it knows its hash."""

    def __new__(cls, parts: tuple[Any, ...] = ()) -> Key:
        """Of its parts."""
        key = super().__new__(cls, parts)
        key._hash = tuple.__hash__(key)  # type: ignore[attr-defined]
        return key

    def __hash__(self) -> int:
        known: int = self._hash  # type: ignore[attr-defined]
        return known


class Launcher:
    """A kernel and its compiled variants by key.

    Args:
        kernel: a function made by `triton.jit`, whose every argument is positional.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[Hashable, Any] = {}

    def __call__(
        self,
        programs: int,
        key: Hashable,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launch `programs` programs (1 or more, of so many warps) on the current stream of the tensors' device.

        Args:
            programs: at least 1.
            key: equal for two calls only if Triton would take the same variant for both; device and warps aside.
            tensors, numbers, constants: all of the kernel's arguments, in this order.
            warps: per program.
        """
        device = tensors[0].device
        index = device.index
        if device.type == "cuda" and index != torch.cuda.current_device():
            with torch.cuda.device(index):
                self(programs, key, tensors, numbers, constants, warps)
            return
        full_key = (index, warps, key)
        variant = self._variants.get(full_key)
        if variant is None:
            # Under Triton's interpreter there is no variant to keep.
            variant = self._kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
            if variant is not None:
                self._variants[full_key] = variant
            return
        # Of a tensor Triton's launcher would ask the driver where it lies; an address it takes as it is.
        addresses = [tensor.data_ptr() for tensor in tensors]
        stream = torch._C._cuda_getCurrentRawStream(index)
        variant.run(
            programs, 1, 1, stream, variant.function, variant.packed_metadata, None, None, None,
            *addresses, *numbers, *constants,
        )  # fmt: skip
