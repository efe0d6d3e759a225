"""Which layers take the output of a normalisation: it and they know of each other without holding one another.

    normalisation -> Followers -> (weakly) layers                layer -> Behind -> Followers

A layer that is replaced goes, weights and all. A copy or a pickle of a normalisation alone has no layers; that of a
model finds them again, since each layer's `Behind` joins the copy of what it was behind.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from octavo.modules import FixedProduct, FP8LinearMixin

# What `octavo.conversion.converted.runs_plainly` is true of.
PlainLayer = FP8LinearMixin | FixedProduct
# Where a layer keeps what it is behind.
_BEHIND = "_behind_norms"


class Followers:
    """The layers behind one normalisation, in their order."""

    def __init__(self) -> None:
        self._layers: dict[int, weakref.ref[PlainLayer]] = {}

    def join(self, index: int, layer: PlainLayer) -> None:
        """Be told of a layer and its place among them."""
        self._layers[index] = weakref.ref(layer)

    def layers(self) -> list[PlainLayer]:
        """Those that still exist."""
        every = [self._layers[index]() for index in sorted(self._layers)]
        return [layer for layer in every if layer is not None]

    def __reduce__(self) -> Any:
        return Followers, ()


class Behind:
    """What a layer keeps of a normalisation before it."""

    def __init__(self, layer: PlainLayer, followers: Followers, index: int) -> None:
        self.__setstate__({"layer": layer, "followers": followers, "index": index})

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self.layer(), "followers": self.followers, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        layer: PlainLayer = state["layer"]
        self.layer, self.followers, self.index = weakref.ref(layer), state["followers"], state["index"]
        self.followers.join(self.index, layer)


def followed_by(layers: list[PlainLayer]) -> Followers:
    """The followers that these layers are, each of which is told."""
    followers = Followers()
    for index, layer in enumerate(layers):
        layer.__dict__.setdefault(_BEHIND, []).append(Behind(layer, followers, index))
    return followers


def part_from(followers: Followers) -> None:
    """Have the layers forget what they are behind."""
    for layer in followers.layers():
        kept = [one for one in layer.__dict__.pop(_BEHIND, ()) if one.followers is not followers]
        if kept:
            layer.__dict__[_BEHIND] = kept


def follow_nothing(module: nn.Module) -> None:
    """Have one module forget whatever it is behind."""
    module.__dict__.pop(_BEHIND, None)
