"""BoundTable: the bounds of all weights of one device and dtype, raised together after each optimizer step.

    B <- min(round(round(B * factor) + added), largest finite number)        in the dtype of the weights

Rounding is monotone, and a weight's own update rounds to the same dtype: |w| <= B before a step gives |w| <= B after.
A weight that is finite is within the largest number; a bound beyond it would give a scale that makes codes of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from octavo.kernels import SCALE_ALIGNMENT
from octavo.optim.step_bound import Step
from octavo.runtime import WeightBound

# In the place of a param group: no step moves the weight.
FROZEN = -1
# Or: its parts lie in several, or of its steps no bound is known: it is measured after each step.
MEASURED = -2


class BoundTable:
    """Bounds of weights alike.

    Args:
        layers: of one device and dtype, those of one param group side by side: one launch raises neighbours.
        groups: of each layer, the index of the param group that its weight is in, FROZEN or MEASURED.

    Attributes:
        groups: those of the step that was seen last.
        dtype, device: of the weights.
    """

    def __init__(self, layers: Sequence[Any], groups: Sequence[int]) -> None:
        part = layers[0].weight_parts()[0]
        self.dtype: torch.dtype = part.dtype
        self.device: torch.device = part.device
        self._largest = torch.finfo(part.dtype).max
        gap = SCALE_ALIGNMENT // torch.float32.itemsize
        self._exact = torch.zeros(len(layers), dtype=part.dtype, device=part.device)
        self._amax = torch.zeros(len(layers), gap, dtype=torch.float32, device=part.device)
        self.bounds = [
            WeightBound(layer, self._exact[row : row + 1], self._amax[row, :1]) for row, layer in enumerate(layers)
        ]
        for bound in self.bounds:
            # It stays where it is, and may be written to: what torch._dynamo.mark_static_address tells the compiler.
            bound.amax._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
        self.groups = list(groups)

    @torch.no_grad()
    def advance(self, steps: Mapping[int, Step]) -> None:
        """Raise the bounds by one step, given by group; nothing waits for the device."""
        for group, begin, end in _runs(self.groups):
            step, rows = steps[group], self._exact[begin:end]
            if isinstance(step.factor, torch.Tensor) or step.factor != 1:
                rows.mul_(step.factor)
            rows.add_(step.added).clamp_(max=self._largest)
        self._amax[:, 0].data.copy_(self._exact)


def _runs(groups: Sequence[int]) -> list[tuple[int, int, int]]:
    """(group, begin, end) of neighbouring rows of one group."""
    runs, begin = [], 0
    for group, rows in groupby(groups):
        end = begin + len(list(rows))
        if group >= 0:
            runs.append((group, begin, end))
        begin = end
    return runs
