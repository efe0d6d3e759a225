"""ObserverChain: several observers of one layer, of which each comes and goes by itself, in any order."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.modules import FP8LinearMixin
from octavo.recipes import OperandName
from octavo.runtime import Observer
from octavo.tensor import Quantizer


@dataclass(frozen=True, eq=False)
class ObserverChain:
    """Calls observers one after another, each with what the one before has made of the quantizer.

    It does not change: a layer whose observers change has another chain, which tells it that its last plan is out of
    date.
    """

    observers: tuple[Observer, ...]

    def __call__(self, operand: OperandName, quantizer: Quantizer) -> Quantizer:
        """The quantizer as all of them wrap it."""
        for observer in self.observers:
            quantizer = observer(operand, quantizer)
        return quantizer


def add_observer(layer: FP8LinearMixin, observer: Observer) -> None:
    """Have a layer call this observer after those that it has."""
    layer.observer = _joined((*_observers_of(layer), observer))


def remove_observer(layer: object, observer: Observer) -> None:
    """Take one observer off a layer and leave the others; nothing happens if it is gone, as after `unconvert`."""
    if isinstance(layer, FP8LinearMixin):
        before = _observers_of(layer)
        left = tuple(one for one in before if one is not observer)
        if len(left) < len(before):
            layer.observer = _joined(left)
            # It holds the observer, and with that whoever watched: the model would not go until a garbage collection.
            layer.delayed_state.plan = None


def _observers_of(layer: FP8LinearMixin) -> tuple[Observer, ...]:
    if layer.observer is None:
        return ()
    return layer.observer.observers if isinstance(layer.observer, ObserverChain) else (layer.observer,)


def _joined(observers: tuple[Observer, ...]) -> Observer | None:
    """One that does what all do: None of none, itself of one."""
    if len(observers) > 1:
        return ObserverChain(observers)
    return observers[0] if observers else None
