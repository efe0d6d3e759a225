"""`octavo.cached_weights`: the weights of a whole model cast once for all micro-batches of a step.

What `cached_weight="reuse"` does for one call of one layer, for every layer that runs within. The layers of a converted
model are called by code that knows no such argument.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# One for all threads: a recomputation runs in autograd's.
_USERS: list[weakref.WeakSet[Any]] = []


@contextmanager
def cached_weights() -> Iterator[None]:
    """Context: each layer casts its weight in the first call, and keeps the codes until the context ends.

    For the micro-batches of one step, forward and backward. A weight that an optimizer or an operation in place changes
    is cast anew; a write through `weight.data` leaves no trace and is not noticed, as under torch.autocast. Codes in
    both layouts take two bytes a parameter; where no gradients are computed, one. Compiled code casts in every call.
    """
    users: weakref.WeakSet[Any] = weakref.WeakSet()
    _USERS.append(users)
    try:
        yield
    finally:
        # The very set: two that hold the same layers compare equal.
        _USERS[:] = [one for one in _USERS if one is not users]
        for layer in list(users):
            layer.forget_cached_weight()


def caches_weights(layer: Any) -> bool:
    """True within `cached_weights`; the layer is told when it ends (`forget_cached_weight`)."""
    if not _USERS:
        return False
    _USERS[-1].add(layer)
    return True
