"""WeightBound: an upper bound of a weight's amax, from which casts take their scale without reading the weight first.

Who knows how far a weight can have moved raises the bound; who changes the weight otherwise is noticed by the version
counter, and the weight is measured again. The bound is written in place: compiled code and CUDA graphs read it where it
lies.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.amax import amax
from octavo.recipes import LinearSpecs
from octavo.scaling import TENSOR, as_matrix


class WeightBound:
    """The bound of one layer's weight.

    Args:
        layer: whose weight it is, which knows its `weight_parts`.
        exact: [1], in the dtype of the weight: the bound.
        amax: [1], float32: the same, for the casts.

    Attributes:
        keeps: whoever raises it, there as long as the bound is in use.
    """

    def __init__(self, layer: Any, exact: Tensor, amax: Tensor) -> None:
        self.exact, self.amax = exact, amax
        self.keeps: object | None = None
        self._layer = weakref.ref(layer)
        self._contents: list[tuple[int, int]] = []

    @property
    def layer(self) -> Any:
        """Whose weight it is; None if that is no more."""
        return self._layer()

    @torch.no_grad()
    def measure(self) -> None:
        """Take the amax of the weight as it is.

        Raises:
            RuntimeError: the weight has another device or dtype than the bound.
        """
        layer = self.layer
        parts = layer.weight_parts()
        for part in parts:
            if part.device != self.exact.device or part.dtype != self.exact.dtype:
                raise RuntimeError(
                    f"the weight of {layer.shown_name} is {part.dtype} on {part.device}, and its scale was predicted"
                    f" for {self.exact.dtype} on {self.exact.device}: remove() what octavo.predict_weight_scales gave"
                    " before the model is moved or cast, and call it again after"
                )
        with torch.inference_mode(False):
            largest = torch.stack([amax(as_matrix(part.detach())) for part in parts]).amax().reshape(1)
            # Past the version counter: a backward to come may have kept it.
            self.exact.data.copy_(largest)
            self.amax.data.copy_(largest)
        self.note(parts)

    def note(self, parts: list[Tensor]) -> None:
        """The weight is as the bound provides for."""
        self._contents = _contents(parts)

    def is_of(self, parts: list[Tensor]) -> bool:
        """True if the weight is what was noted: the same memory, with nothing written to it since."""
        return self._contents == _contents(parts)

    def follow(self, parts: list[Tensor]) -> None:
        """Measure the weight if it is not what was noted."""
        if self._contents != _contents(parts):
            self.measure()


def takes_bound(specs: LinearSpecs) -> bool:
    """True if the scale of a weight is one from its amax, of now or of the past, in both its uses."""
    spec = specs.weight
    alike = specs.weight_t is spec and spec.rounding == "nearest"
    return alike and spec.granularity is TENSOR and spec.scaling != "static"


def _contents(parts: list[Tensor]) -> list[tuple[int, int]]:
    return [(-1 if part.is_inference() else part._version, part.data_ptr()) for part in parts]
