"""FieldsByName: frozen data whose constructor says which fields there are, and, by `needs`, which it was not given."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Own = TypeVar("Own", bound="FieldsByName")
Kind = TypeVar("Kind", bound=type)
Result = TypeVar("Result")


class FieldsByName:
    """Of a keyword-only dataclass: refuses what is no field of it, and names the field that may be meant.

    Here and not in `__init__`, which the dataclass writes: a class says that it derives from this one, and no more.
    Copies and unpickled instances are made without arguments, so nothing is looked at then.
    """

    def __new__(cls: type[Own], *values: Any, **fields: Any) -> Own:
        """An instance, before its fields are set.

        Raises:
            TypeError: a value without a name, or a name that is no field's.
        """
        if _takes_names_alone(cls):
            if values:
                raise TypeError(
                    f"{cls.__name__} takes no values without a name, found {', '.join(map(repr, values))}: fields are"
                    f" given by name, such as {cls.__name__}({cls.field_names()[0]}=...); its fields are"
                    f" {', '.join(cls.field_names())}"
                )
            known = _field_names(cls)
            for name in fields:
                if name not in known:
                    raise TypeError(cls.no_field(name))
        return super().__new__(cls)

    @classmethod
    def field_names(cls) -> list[str]:
        """Of the constructor: first those that no class has which this one derives from."""
        return list(_field_names(cls))

    @classmethod
    def no_field(cls, name: str) -> str:
        """What to say of a name that is no field's."""
        known = cls.field_names()
        message, fields = f"{cls.__name__} has no field {name!r}", f"Its fields are: {', '.join(known)}"
        others = [other.__name__ for other in cls._kin() if name in other.field_names()]
        if others:
            return f"{message}: that is a field of {', '.join(others)}. {fields}"
        close = difflib.get_close_matches(name, known, n=1)
        return f"{message}: did you mean {close[0]}? {fields}" if close else f"{message}. {fields}"

    @classmethod
    def _kin(cls) -> list[type[FieldsByName]]:
        """The others that stand beside it: derived from what it is derived from, in the same package."""
        bases = [base for base in cls.__mro__[1:] if issubclass(base, FieldsByName) and base is not FieldsByName]
        kin = [(base, other) for base in bases for other in base.__subclasses__() if other is not cls]
        return [other for base, other in kin if _package(other) == _package(base)]


def needs(what: Callable[[list[str]], str]) -> Callable[[Kind], Kind]:
    """Decorator above that of a keyword-only dataclass: says which of the fields without a default are missing.

    In `__init__`, since a copy or an unpickled instance is made without arguments, and then not initialised.

    Args:
        what: of the names that are missing, what is to be given.
    """

    def decorate(kind: Kind) -> Kind:
        initialise: Any = kind.__init__  # type: ignore[misc]
        parameters = inspect.signature(initialise).parameters.values()
        required = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty]

        @functools.wraps(initialise)
        def initialise_if_complete(self: Any, *values: Any, **fields: Any) -> None:
            missing = [name for name in required if name not in fields]
            if missing:
                raise TypeError(f"{type(self).__name__} needs {what(missing)}")
            initialise(self, *values, **fields)

        kind.__init__ = initialise_if_complete  # type: ignore[misc]
        return kind

    return decorate


def _cached(look: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """To look into a constructor takes longer than to call it. (mypy takes no class for hashable, so Any.)"""
    return functools.cache(look)


@_cached
def _field_names(kind: Any) -> tuple[str, ...]:
    names = list(inspect.signature(kind.__init__).parameters)[1:]
    inherited = {name for base in kind.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
    return tuple(sorted(names, key=inherited.__contains__))


@_cached
def _takes_names_alone(kind: Any) -> bool:
    """False for a class derived from one of these that has a constructor of its own."""
    parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
    return all(one.kind is inspect.Parameter.KEYWORD_ONLY for one in parameters)


def _package(kind: type) -> str:
    return kind.__module__.rpartition(".")[0]
