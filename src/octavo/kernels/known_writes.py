"""Which arguments a Triton kernel writes to, worked out once for each of its variants.

The compiler must know it, and torch works it out by having Triton generate the kernel's intermediate code: anew for
each call in a graph, and three or four times for each of them. The casts of one transformer block cost seconds that
way. The answer follows from the kernel and from what its arguments are, so it is remembered by these; for Octavo's
kernels alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch._higher_order_ops.triton_kernel_wrap as wrap

# Of torch 2.11, and since 2.12; private, so neither is relied on to be there.
_ASKED = ("identify_mutated_tensors", "identify_accessed_tensors")


def remember_writes(*kernels: Any) -> None:
    """Have torch work out once a variant what these kernels write to."""
    _REMEMBERED.update(kernels)
    for name in _ASKED:
        asked = getattr(wrap, name, None)
        if asked is not None and not hasattr(asked, "answers"):
            setattr(wrap, name, remembering(asked))


def remembering(asked: Callable[..., Any]) -> Callable[..., Any]:
    """`asked(kernel, arguments by name, TMA descriptors)` that answers from memory where it can."""
    answers: dict[Hashable, Any] = {}

    @functools.wraps(asked)
    def answer(kernel: Any, arguments: dict[str, Any], descriptors: Any) -> Any:
        inner, configs = unwrapped(kernel)
        if descriptors or inner not in _REMEMBERED or any(config.kwargs for config in configs):
            return asked(kernel, arguments, descriptors)
        # (How many warps run it decides on nothing here.)
        key = (inner, *((name, _kind(value)) for name, value in arguments.items()))
        if key not in answers:
            answers[key] = asked(kernel, arguments, descriptors)
        known = answers[key]
        return list(known) if isinstance(known, list) else known

    answer.answers = answers  # type: ignore[attr-defined]
    return answer


_REMEMBERED: set[Any] = set()


def unwrapped(kernel: Any) -> tuple[Any, list[Any]]:
    """(the kernel itself, configurations with its options): torch wraps them around it, anew for each launch."""
    configs: list[Any] = []
    while hasattr(kernel, "configs"):
        configs += kernel.configs
        kernel = kernel.fn
    return kernel, configs


def _kind(value: Any) -> Hashable:
    """What of an argument may decide: the dtype of a tensor, a number itself, that it is not known yet."""
    if isinstance(value, (bool, int, float, str)) or value is None:
        return type(value), value
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, torch.dtype):
        return "tensor", dtype
    # An extent that is a symbol, or one of Triton's own constants (a dtype).
    return (type(value).__name__,) if hasattr(value, "free_symbols") or hasattr(value, "node") else ("", str(value))
