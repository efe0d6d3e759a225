"""Who needs eager steps: the stance of torch's compiler is one for the whole process, and several may watch at once.

The first who comes sets it and keeps what was before, the last who goes restores that, in whatever order they come and
go.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

# Weakly held: one that is gone for good needs no eager steps any more.
_WATCHERS: weakref.WeakSet[Any] = weakref.WeakSet()
_CHANGING = threading.Lock()
_SET: list[Any] = []  # the stance that was set, which knows what was before; empty while nobody watches


def begin_eager(watcher: object) -> None:
    """Run compiled functions eagerly until `end_eager` of this watcher, and of all others."""
    with _CHANGING:
        _WATCHERS.add(watcher)
        # Set anew for each: somebody may have changed it in between.
        stance = torch.compiler.set_stance("force_eager")
        if not _SET:
            _SET.append(stance)


def end_eager(watcher: object) -> None:
    """This watcher needs eager steps no more; nothing happens if it did not."""
    with _CHANGING:
        _WATCHERS.discard(watcher)
        if _SET and not _WATCHERS:
            _SET.pop().__exit__(None, None, None)
