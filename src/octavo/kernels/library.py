"""Kernels as operators of torch.library, for the compiler alone.

Eager code calls a kernel's launcher directly: the dispatcher's way to a Python operator costs more than a small kernel.
While Dynamo traces, the same call goes through an operator, which is opaque to the compiler, so that compiled code runs
the very kernels that eager code runs and its casts round the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("octavo", "DEF")


def register(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], *, random: bool = False
) -> Callable[..., Any]:
    """Define the operator `octavo::<schema>` for every device, and return it.

    Args:
        schema: as in "amax(Tensor x, str granularity) -> Tensor".
        implementation: the launcher, on real tensors.
        fake: the same signature on tensors without data, giving outputs of the right shape, dtype and device.
        random: it draws from a generator, so that the compiler may not compute it twice.
    """
    _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
    name = schema.partition("(")[0]
    torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(implementation)
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.octavo, name).default
    return operator
