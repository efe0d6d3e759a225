"""Options of layers that have many: one that a layer does not have is refused with those that it has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

_Options = ParamSpec("_Options")
_Layer = TypeVar("_Layer", bound=nn.Module)


def names_its_options(
    init: Callable[Concatenate[_Layer, _Options], None],
) -> Callable[Concatenate[_Layer, _Options], None]:
    """Have a layer's `__init__` raise a TypeError that lists its options, for a keyword that is none of them."""
    known = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: _Layer, /, *args: Any, **options: Any) -> None:
        for name, value in options.items():
            if name not in known:
                raise TypeError(
                    f"a {type(self).__name__} has no option {name} (given: {value!r}): it takes {', '.join(known)}"
                )
        init(self, *args, **options)

    return checked
