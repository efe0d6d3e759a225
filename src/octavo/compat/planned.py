"""Names that belong to a library but are not built here yet: they can be imported, and say so when they are used.

`isinstance` checks against such a class work, and find nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn


def refuse(name: str) -> NoReturn:
    """Raise NotImplementedError for `name`."""
    raise NotImplementedError(f"{name} is not built yet in Octavo; docs/compat.md lists what is")


def planned_class(name: str) -> type[nn.Module]:
    """A class called like the last part of `name` that cannot be constructed."""

    def construct(self: object, *args: Any, **kwargs: Any) -> None:
        refuse(name)

    short = name.rpartition(".")[2]
    return type(short, (nn.Module,), {"__init__": construct, "__doc__": f"{name}: not built yet."})


def planned_function(name: str) -> Callable[..., Any]:
    """A function called like the last part of `name` that cannot be called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse(name)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    call.__doc__ = f"{name}: not built yet."
    return call
