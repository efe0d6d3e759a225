"""`watch`: what FP8 does to each operand of each layer, while a model runs.

Each layer's quantizers are wrapped for as long as the context lasts; outside of it nothing of this is there, and
nothing costs anything. Watching synchronises with the device at every cast: for looking, not for training at speed.
A compiled model is refused. A function that was compiled around the model breaks its graph at every watched layer, and
may keep those breaks; under `fullgraph=True` it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.inspection.observer_chain import add_observer, remove_observer
from octavo.inspection.statistics import Statistics, operand_statistics
from octavo.modules import FP8LinearMixin
from octavo.recipes import OperandName
from octavo.runtime import Observer
from octavo.tensor import Operand, Quantizer

_COMPILED = "octavo.inspection.watch looks at eager code only: watch and run the model uncompiled"


class watch:
    """Context: collects `Statistics` of every cast of a model's FP8 layers.

        with octavo.inspection.watch(model) as seen:
            model(x).sum().backward()
        print(seen)

    Contexts nest, each with its own figures. A gradient is seen wherever its backward runs, if the forward ran inside.

    Attributes:
        statistics: {(layer, operand): the last cast's figures}.
        scales: {(layer, operand): the last cast's scale, the largest of several}.

    Raises:
        ValueError: at the entry, if the model has no FP8 layer, or is compiled.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.statistics: dict[tuple[str, str], Statistics] = {}
        self.scales: dict[tuple[str, str], float] = {}
        self._placed: list[list[tuple[FP8LinearMixin, Observer]]] = []

    def __enter__(self) -> watch:
        layers = list(_layers(self.model))
        if not layers:
            raise ValueError(f"{type(self.model).__name__} has no FP8 layer to watch: octavo.convert(model) makes some")
        if is_compiled(self.model):
            raise ValueError(f"{type(self.model).__name__} is compiled: {_COMPILED}")
        placed = [(layer, torch.compiler.disable(self._observer(name), reason=_COMPILED)) for name, layer in layers]
        for layer, observer in placed:
            add_observer(layer, observer)
        self._placed.append(placed)
        return self

    def __exit__(self, *error: Any) -> None:
        for layer, observer in self._placed.pop():
            remove_observer(layer, observer)

    def _observer(self, layer: str) -> Observer:
        def observe(operand: OperandName, quantizer: Quantizer) -> Quantizer:
            watched = watched_quantizer(quantizer, lambda x, result: self._record((layer, operand), x, result))
            disabled: Quantizer = torch.compiler.disable(watched, reason=_COMPILED)
            return disabled

        return observe

    def _record(self, key: tuple[str, str], x: Tensor, operand: Operand) -> None:
        seen = operand_statistics(x, operand)
        if seen is not None:
            self.statistics[key], self.scales[key] = seen

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


def watched_quantizer(inner: Quantizer, record: Callable[[Tensor, Operand], None]) -> Quantizer:
    """A quantizer that does what `inner` does, and tells `record` of each matrix [M, K] and the operand made of it."""

    def watched(x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        result = inner(x, rowwise, columnwise, column_sum)
        record(x, result)
        return result

    return watched


def is_compiled(model: nn.Module) -> bool:
    """True if the model or a part of it runs compiled."""
    return any("_orig_mod" in module._modules or module._compiled_call_impl for module in model.modules())


def _layers(model: nn.Module) -> Iterator[tuple[str, FP8LinearMixin]]:
    for name, module in model.named_modules():
        if isinstance(module, FP8LinearMixin):
            yield name or "(root)", module
