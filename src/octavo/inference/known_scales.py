"""Static scales whose values the host knows: layers with equal ones take one cast of the input that they share.

Whether two tensors hold the same number only the device can say, and a layer that runs does not wait for it. So the
value is noted where a scale is given or loaded, and is known as long as the tensor is the same and nobody has written
to it since.
"""

from __future__ import annotations

import sys
import weakref
from typing import NamedTuple

import torch
from torch import Tensor


class _Noted(NamedTuple):
    scale: weakref.ref[Tensor]
    version: int
    text: str


class KnownScales:
    """The values of a layer's scales, by the names of their buffers."""

    def __init__(self) -> None:
        self._noted: dict[str, _Noted] = {}

    def note(self, name: str, scale: Tensor, value: float) -> None:
        """Know that a scale [] has this value."""
        self._note(name, scale, _text(torch.tensor(value, dtype=torch.float32)))

    def read(self, name: str, scale: Tensor) -> None:
        """Ask a scale [] for its value; this waits for its device."""
        if type(scale) is Tensor and not scale.is_meta:
            self._note(name, scale, _text(scale))

    def text(self, name: str, scale: Tensor) -> str | None:
        """One object for all scales of one value; None if the value is not known."""
        noted = self._noted.get(name)
        if noted is None or noted.scale() is not scale or noted.version != scale._version:
            return None
        return noted.text

    def texts(self, scales: dict[str, Tensor | None]) -> dict[str, str]:
        """Of these scales, those that are known."""
        found = {name: self.text(name, scale) for name, scale in scales.items() if scale is not None}
        return {name: text for name, text in found.items() if text is not None}

    def follow(self, scales: dict[str, Tensor | None], texts: dict[str, str]) -> None:
        """Know the same values of other tensors, copies of those that `texts` was of."""
        for name, text in texts.items():
            scale = scales.get(name)
            if scale is not None:
                self._note(name, scale, text)

    def _note(self, name: str, scale: Tensor, text: str) -> None:
        # A tensor of inference_mode does not tell whether it was written to.
        if scale.is_inference():
            self._noted.pop(name, None)
        else:
            self._noted[name] = _Noted(weakref.ref(scale), scale._version, sys.intern(text))


def _text(scale: Tensor) -> str:
    return float(scale.item()).hex()
