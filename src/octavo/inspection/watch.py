"""`watch`: what FP8 does to each operand of each layer, while a model runs.

Each layer's quantizers are wrapped for as long as the context lasts; outside of it nothing of this is there, and
nothing costs anything. Watching synchronises with the device at every cast: for looking, not for training at speed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.formats import format_of
from octavo.inspection.statistics import Statistics, cast_statistics
from octavo.modules import FP8LinearMixin
from octavo.recipes import OperandName
from octavo.tensor import Operand, Quantizer


class watch:
    """Context: collects `Statistics` of every cast of a model's FP8 layers.

        with octavo.inspection.watch(model) as seen:
            model(x).sum().backward()
        print(seen)

    Attributes:
        statistics: {(layer, operand): the last cast's figures}.
        scales: {(layer, operand): the last cast's scale, the largest of several}.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.statistics: dict[tuple[str, str], Statistics] = {}
        self.scales: dict[tuple[str, str], float] = {}

    def __enter__(self) -> watch:
        for name, layer in _layers(self.model):
            layer.observer = functools.partial(self._wrap, name)
        return self

    def __exit__(self, *error: Any) -> None:
        for _, layer in _layers(self.model):
            layer.observer = None

    def _wrap(self, layer: str, operand: OperandName, quantizer: Quantizer) -> Quantizer:
        def watched(x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
            if torch.compiler.is_compiling():
                raise RuntimeError("octavo.inspection.watch looks at eager code only: run the model uncompiled")
            result = quantizer(x, rowwise, columnwise)
            self._record((layer, operand), x, result)
            return result

        return watched

    def _record(self, key: tuple[str, str], x: Tensor, operand: Operand) -> None:
        codes, scale, matrix = operand.codes, operand.scale, x
        if codes is None:
            codes, scale, matrix = operand.codes_t, operand.scale_t, x.t()
        if codes is None or scale is None:
            return
        rows, columns = matrix.shape
        shown = scale[:rows] if scale.dim() else scale
        self.statistics[key] = cast_statistics(matrix, codes[:rows, :columns], shown, format_of(codes.dtype))
        self.scales[key] = scale.max().item()

    def __str__(self) -> str:
        lines = [
            f"{'layer':<40} {'operand':<12} {'amax':>10} {'scale':>10} {'underflow':>9} {'saturated':>9} {'SQNR':>8}"
        ]
        for (layer, operand), figures in self.statistics.items():
            lines.append(
                f"{layer:<40} {operand:<12} {figures.amax:>10.3g} {self.scales[layer, operand]:>10.3g}"
                f" {figures.underflow:>9.2%} {figures.saturation:>9.2%} {figures.sqnr_db:>5.1f} dB"
            )
        return "\n".join(lines)


def _layers(model: nn.Module) -> Iterator[tuple[str, FP8LinearMixin]]:
    for name, module in model.named_modules():
        if isinstance(module, FP8LinearMixin):
            yield name or "(root)", module
