"""`octavo.quantized_init`: layers built inside hold their weights in FP8 alone."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

from octavo.recipes import CurrentScaling, Recipe, check_recipe


class InitMode(NamedTuple):
    """How weights are made by layers built now."""

    recipe: Recipe
    keep_high_precision: bool


class _Current(threading.local):
    mode: InitMode | None = None


_CURRENT = _Current()


class quantized_init:
    """Context: layers built inside hold FP8 weights only, one byte an element, quantized once from their
        initialisation.

    Args:
        enabled: False builds ordinary layers, also inside an enabled context.
        recipe: decides format and granularity of the weights; `CurrentScaling()` if None.
        keep_high_precision: the initial values stay on the CPU beside the codes, as
            `parameter.get_high_precision_init_val()`, until `parameter.clear_high_precision_init_val()`: for an
            optimizer's master weights.
    """

    def __init__(self, enabled: bool = True, recipe: Recipe | None = None, keep_high_precision: bool = False) -> None:
        check_recipe(recipe)
        self.mode = InitMode(recipe or CurrentScaling(), keep_high_precision) if enabled else None
        self._outer: list[InitMode | None] = []

    def __enter__(self) -> quantized_init:
        self._outer.append(_CURRENT.mode)
        _CURRENT.mode = self.mode
        return self

    def __exit__(self, *error: Any) -> None:
        _CURRENT.mode = self._outer.pop()


def init_mode() -> InitMode | None:
    """The mode in force in this thread; None builds ordinary weights."""
    return _CURRENT.mode
