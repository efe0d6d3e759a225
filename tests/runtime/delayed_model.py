"""Delayed scaling of one operand, written from the rule alone in float64 and lists: what the layers are held to."""

from __future__ import annotations

import math

import numpy


class OperandModel:
    """The past (newest last), what is gathered now, and the scale."""

    def __init__(self, length: int, format_max: float, margin: int = 0) -> None:
        self.past = [0.0] * (length - 1)
        self.format_max, self.margin = format_max, margin
        self.gathered = 0.0
        self.scale = 1.0

    def gather(self, values: object) -> None:
        """The largest finite magnitude of one cast joins by max."""
        magnitude = numpy.abs(numpy.asarray(values, dtype=numpy.float64)).ravel()
        finite = magnitude[numpy.isfinite(magnitude)]
        self.gathered = max(self.gathered, float(finite.max()) if finite.size else 0.0)

    def update(self) -> None:
        """The end of a step."""
        last, self.gathered = self.gathered, 0.0
        if last == 0 or not math.isfinite(last):
            return
        amax = max([last, *self.past])
        self.scale = float(numpy.float32(amax * 2.0**self.margin / self.format_max))
        self.past = [*self.past, last][1:] if self.past else []

    @property
    def history(self) -> list[float]:
        """As a state dict has it: position 0 is what is gathered."""
        return [self.gathered, *self.past]
