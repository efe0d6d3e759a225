"""Launching a Triton kernel again and again without asking Triton each time which variant the arguments call for.

`kernel[grid](...)` inspects every argument at every call, which takes longer than a small kernel runs. A caller that
knows what decides (dtypes, flags, which numbers are multiples of 16) gives it as a key, and the compiled variant is
found by that. The price: a key that leaves something out would launch the wrong variant, so a kernel marks whatever is
not in the key as `do_not_specialize`.

A variant is entered where Triton's own launcher enters C. What that launcher does before, in Python, is to allocate
scratch memory for kernels that want some: of one that does, or in a version of Triton that is not known here, the
launcher itself is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from operator import methodcaller
from typing import Any, ClassVar

import torch
from torch import Tensor

_address = methodcaller("data_ptr")
_MOST_PREPARED = 1024
# What launches a compiled variant, and arguments that it takes.
Entry = tuple[Callable[..., Any], tuple[Any, ...]]
# Whose launcher `_entry` knows.
_TRITON = "3.6."


def specialization(*numbers: int) -> tuple[int, ...]:
    """What Triton compiles variants for in integer arguments: multiples of 16, the number 1, and more than 31 bits."""
    return tuple((n % 16 == 0) + 2 * (n == 1) + 4 * (n >> 31 > 0) for n in numbers)


def common_alignment(*numbers: Any) -> int:
    """The largest power of two up to 16 that divides all of these extents and strides, and is none of them.

    A kernel takes them in units of it and multiplies: so the compiler knows what it may read at once, of a row of 8184
    elements too, where Triton by itself knows multiples of 16 alone. Of numbers that are not known yet, in traced
    code, and of more than 31 bits, whose product the kernel would not hold, it is 1. None becomes a 1 by it, of which
    Inductor would make a constant (`octavo.kernels.triton_support.one_column_reasons`).
    """
    if not all(isinstance(number, int) and number >> 31 == 0 for number in numbers):
        return 1
    return next((a for a in (16, 8, 4, 2) if all(n % a == 0 and n != a for n in numbers)), 1)


class WithOptions:
    """A kernel that is compiled with options of Triton's, for `Launcher`."""

    def __init__(self, kernel: Any, **options: Any) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._kernel[grid], **self._options)


class Key:
    """A key that is made once and looked up often: of equal parts there is one, which is told by its identity."""

    __slots__ = ("parts",)
    _known: ClassVar[dict[tuple[Any, ...], Key]] = {}

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    @classmethod
    def of(cls, *parts: Any) -> Key:
        """The one key of these parts."""
        return cls._known.setdefault(parts, cls(parts))


class Prepared(dict[Hashable, Any]):
    """What was made ready for calls, by what decides on it. A training makes the same few calls again and again."""

    def keep(self, key: Hashable, made: Any) -> Any:
        """Keep what was made for a key, and return it; who has a thousand begins anew."""
        if len(self) >= _MOST_PREPARED:
            self.clear()
        self[key] = made
        return made


class Launcher:
    """A kernel and its compiled variants by key.

    Args:
        kernel: a function made by `triton.jit`, whose every argument is positional.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._variants: dict[Hashable, Entry] = {}

    def __call__(
        self,
        programs: int,
        key: Hashable,
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> Entry | None:
        """Launch `programs` programs (1 or more, of so many warps) on the current stream of the tensors' device.

        What `_entry` gives of the variant is returned; None under Triton's interpreter.

        Args:
            programs: at least 1.
            key: equal for two calls only if Triton would take the same variant for both; device and warps aside.
            tensors, numbers, constants: all of the kernel's arguments, in this order.
            warps: per program.
        """
        index = tensors[0].get_device()
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(programs, key, tensors, numbers, constants, warps)
        full_key = (index, warps, key)
        entry = self._variants.get(full_key)
        if entry is None:
            # Under Triton's interpreter there is no variant to keep.
            variant = self._kernel[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
            if variant is None:
                return None
            entry = self._variants[full_key] = _entry(variant)
            return entry
        _enter(entry, index, programs, tensors, numbers, constants)
        return entry


class Launch:
    """A launch that is made again and again, with other tensors and nothing else changed.

    Args:
        launcher: of the kernel.
        index: the CUDA device of the tensors.
        programs, key, numbers, constants, warps: as of `Launcher`.
    """

    __slots__ = ("_constants", "_entry", "_index", "_key", "_launcher", "_numbers", "_programs", "_warps")

    def __init__(
        self,
        launcher: Launcher,
        index: int,
        programs: int,
        key: Hashable,
        numbers: tuple[int, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        self._launcher, self._index, self._programs, self._key = launcher, index, programs, key
        self._numbers, self._constants, self._warps = numbers, constants, warps
        self._entry: Entry | None = None

    def __call__(self, tensors: tuple[Tensor, ...]) -> None:
        """Launch on the current stream of the device, which must be the current one."""
        if self._entry is None:
            self._entry = self._launcher(
                self._programs, self._key, tensors, self._numbers, self._constants, self._warps
            )
        else:
            _enter(self._entry, self._index, self._programs, tensors, self._numbers, self._constants)


def _enter(
    entry: Entry, index: int, programs: int, tensors: Any, numbers: tuple[int, ...], constants: tuple[Any, ...]
) -> None:
    """Launch a variant on the current stream of device `index`."""
    launch, about = entry
    stream = torch._C._cuda_getCurrentRawStream(index)
    # Of a tensor the launcher would ask the driver where it lies; an address it takes as it is.
    launch(programs, 1, 1, stream, *about, *map(_address, tensors), *numbers, *constants)


def _entry(variant: Any) -> Entry:
    """What launches a compiled variant, and the arguments between the stream and those of the kernel.

    These end with Triton's metadata of a launch and its two hooks, none of which there is.
    """
    run, about = variant.run, (variant.packed_metadata, None, None, None)
    kind = type(run)
    if (kind.__module__, kind.__name__) == ("triton.backends.nvidia.driver", "CudaLauncher"):
        from triton import __version__

        if __version__.startswith(_TRITON) and run.global_scratch_size == run.profile_scratch_size == 0:
            flags = run.launch_cooperative_grid, run.launch_pdl
            return run.launch, (variant.function, *flags, None, None, *about)
    return run, (variant.function, *about)
