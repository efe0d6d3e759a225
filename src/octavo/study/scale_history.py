"""Amax and scale over time: what the casts of a few layers saw at some steps of training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from octavo.inspection import watch
from octavo.modules import FP8LinearMixin
from octavo.study.record import Row

_MOST_LAYERS = 6


def watched_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Up to six FP8 layers, evenly chosen over the model's depth."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, FP8LinearMixin)]
    return dict(layers[:: max(1, -(-len(layers) // _MOST_LAYERS))])


@contextmanager
def scale_history(model: nn.Module, method: str, step: int, every: int) -> Iterator[list[Row]]:
    """Watch the forward and backward inside at every `every`-th step; the list holds the rows at the exit.

    A watched step waits for the device at each cast.
    """
    rows: list[Row] = []
    if step % every:
        yield rows
        return
    with ExitStack() as stack:
        watches = {name: stack.enter_context(watch(layer)) for name, layer in watched_layers(model).items()}
        yield rows
    for name, seen in watches.items():
        for key, figures in seen.statistics.items():
            rows.append(
                {
                    "kind": "scale_history",
                    "method": method,
                    "step": step,
                    "layer": name,
                    "operand": key[1],
                    "amax": figures.amax,
                    "scale": seen.scales[key],
                }
            )
