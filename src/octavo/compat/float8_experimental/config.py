"""Switches of float8_experimental, read when layers are swapped.

    enable_amax_init               True: scales come from the live data until the first sync; False: they are 1.
    enable_pre_and_post_forward    True: a second training forward without a sync between is an error.

A name that this module does not have cannot be set: it would do nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType

enable_amax_init: bool = True
enable_pre_and_post_forward: bool = True

_SWITCHES = ("enable_amax_init", "enable_pre_and_post_forward")


class _Config(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("__"):
            if name not in _SWITCHES:
                raise NotImplementedError(f"float8_experimental.config.{name}: Octavo has {', '.join(_SWITCHES)}")
            if not isinstance(value, bool):
                raise ValueError(f"float8_experimental.config.{name} is {value!r}: expected True or False")
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Config
