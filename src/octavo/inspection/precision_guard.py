"""`PrecisionGuard`: moves a layer to high precision in the middle of a run, when what FP8 does to it leaves bounds.

Every so many steps one step is watched: each cast of each FP8 layer is looked at, as `watch` does, and the worst of an
operand's figures are held against `PrecisionBounds`. All other steps run as if nobody watched.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.inspection.eager_steps import begin_eager, end_eager
from octavo.inspection.layer_probe import OperandFigures, operand_figures
from octavo.inspection.observer_chain import add_observer, remove_observer
from octavo.inspection.precision_table import BESIDE_OUTLIERS, PrecisionBounds
from octavo.inspection.watch import watched_quantizer
from octavo.modules import FP8LinearMixin
from octavo.modules.grouped_linear import Expert
from octavo.recipes import OperandName
from octavo.runtime import Observer, agreed_maximum
from octavo.runtime.given_model import check_model
from octavo.tensor import Operand, Quantizer

_OTHERS = "it goes with an expert of the same layer, or left the bounds on another rank"
_WIDER = "give wider bounds=octavo.inspection.PrecisionBounds"
_FINER = "or finer scales by an override of the recipe (RowwiseScaling, BlockScaling)"


class PrecisionGuard:
    """Watches every `every`-th step of a training, and moves layers that do not bear FP8 any more to high precision.

        octavo.convert(model, DelayedScaling())
        guard = octavo.PrecisionGuard(model, every=200)
        for batch in batches:
            loss_of(model, batch).backward()
            octavo.update_scales(model)
            optimizer.step()
            guard.step()                     # once a step; a warning names each layer that it moves, and why

    A layer that was moved runs in high precision under every recipe and context, until `release`, or until it is
    converted again. A watched step runs eagerly, functions that are compiled included (`torch.compiler.set_stance`),
    and waits for the device at each cast; a layer that moves is compiled anew once. With several ranks all move the
    same layers, as long as all call `step` as often.

    What is watched are casts, not products. A CUDA graph runs no Python: of `octavo.make_graphed_callables` the layers
    run themselves in a watched step, and from a move on; a graph captured by hand is not seen, of which a warning is
    given, and goes on doing what was captured. Which layers were moved is no part of the model's state dict: save
    `guard.state_dict()` beside it. It is a context too, whose exit is `remove()`; without, call that where an exception
    ends a run, or compiled functions may go on running eagerly.

    Args:
        model: with FP8 layers.
        bounds: what operands may lose; `octavo.inspection.PrecisionBounds()` if None.
        every: which steps are watched: the `every`-th, the one after as many again, and so on.
        patience: in how many watched steps in a row a layer must leave the bounds before it moves.
        group: the process group that moves the same layers; the default group if None.

    Attributes:
        moved: names of the layers in high precision, and why; one that was converted again is taken out by `step`.
        figures: of the last watched step, by (layer, operand), the worst of its casts.

    Raises:
        TypeError: the model is no module.
        ValueError: it has no FP8 layer; `every` or `patience` is no integer of 1 or more; no bounds.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        bounds: PrecisionBounds | None = None,
        every: int = 100,
        patience: int = 1,
        group: object | None = None,
    ) -> None:
        check_model(model, "octavo.PrecisionGuard")
        for name, count in (("every", every), ("patience", patience)):
            if type(count) is not int or count < 1:
                raise ValueError(f"{name} is {count!r}: expected a number of steps, an integer of 1 or more")
        if not (bounds is None or isinstance(bounds, PrecisionBounds)):
            raise ValueError(f"bounds is {bounds!r}: expected an octavo.inspection.PrecisionBounds, or None")
        self._layers: dict[str, Any] = {
            name: layer for name, layer in model.named_modules() if isinstance(layer, FP8LinearMixin)
        }
        if not self._layers:
            raise ValueError(f"{type(model).__name__} has no FP8 layer to guard: octavo.convert(model) makes some")
        self._bounds, self._every, self._patience, self._group = bounds or PrecisionBounds(), every, patience, group
        self._steps = 0
        self._outside = dict.fromkeys(self._layers, 0)  # watched steps in a row outside of the bounds
        self._observers: dict[str, Observer] = {}
        self._watching = self._ended = False
        self._saw_nothing = False
        self.moved: dict[str, str] = {}
        self.figures: dict[tuple[str, str], OperandFigures] = {}
        self._watch_next()

    def step(self) -> list[str]:
        """Note the end of a step -> names of the layers that move to high precision now.

        Call it once a step, after its last backward and before the next forward.
        """
        watched = self._watching
        self._forget_brought_back()
        self._stop_watching()
        self._steps += 1
        moving = self._judged() if watched else []
        self._watch_next()
        return moving

    def release(self, *names: str) -> None:
        """Bring layers back into FP8; all that were moved if none is named. Delayed scaling measures them anew.

        After `remove` too. A layer that `octavo.unconvert` has turned back meanwhile stays as it is.

        Raises:
            ValueError: a layer that was not moved; none is brought back then.
        """
        for name in names:
            if name not in self.moved:
                moved = f"; moved are: {', '.join(map(repr, self.moved))}" if self.moved else ": no layer was"
                raise ValueError(f"{name!r} was not moved{moved}")
        for name in dict.fromkeys(names or self.moved):
            layer = self._layers[name]
            if _is_moved(layer):
                layer.delayed_state.high_precision = False
                layer.delayed_state.measure_next()
            self._outside[name] = 0
            del self.moved[name]

    def remove(self) -> None:
        """Watch no more. Layers that were moved stay so; `release` brings them back, now or later."""
        self._stop_watching()
        self._ended = True
        # What `release` needs.
        self._layers = {name: self._layers[name] for name in self.moved}

    def __enter__(self) -> PrecisionGuard:
        return self

    def __exit__(self, *error: Any) -> None:
        self.remove()

    def state_dict(self) -> dict[str, Any]:
        """How many steps there were, and which layers were moved, why."""
        self._forget_brought_back()
        return {"steps": self._steps, "moved": dict(self.moved), "outside": dict(self._outside)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken: its layers are moved, others are not.

        Raises:
            ValueError: a layer that this model has not.
        """
        for name in state["moved"]:
            if not isinstance(self._layers.get(name), FP8LinearMixin):
                raise ValueError(
                    f"the state moves {name!r}, which is no FP8 layer of this model: convert it as it was when the"
                    " state was saved"
                )
        self._stop_watching()
        self.release()
        self._steps = state["steps"]
        self._outside |= {name: count for name, count in state["outside"].items() if name in self._layers}
        for name, reason in state["moved"].items():
            self._move(name, reason)
        self._watch_next()

    def _watch_next(self) -> None:
        """Watch the step that begins now, if it is its turn."""
        if (self._steps + 1) % self._every or self._ended:
            return
        self.figures = {}
        self._watching = True
        begin_eager(self)
        for name, layer in self._layers.items():
            if _runs_in_fp8(layer):
                self._observers[name] = self._observer(name)
                add_observer(layer, self._observers[name])

    def _stop_watching(self) -> None:
        for name, observer in self._observers.items():
            remove_observer(self._layers[name], observer)
        self._observers = {}
        self._watching = False
        end_eager(self)

    def _observer(self, name: str) -> Observer:
        def record(operand: OperandName) -> Callable[[Tensor, Operand], None]:
            def note(x: Tensor, result: Operand) -> None:
                seen = operand_figures(operand, x, result)
                if seen is not None:
                    self.figures[name, operand] = seen.worst(self.figures.get((name, operand)))

            return note

        def observe(operand: OperandName, quantizer: Quantizer) -> Quantizer:
            return watched_quantizer(quantizer, record(operand))

        return observe

    def _judged(self) -> list[str]:
        """Move the layers that a watched step has found outside of the bounds -> their names."""
        reasons: dict[str, str] = {}
        for (name, _), figures in self.figures.items():
            for sentence in self._bounds.broken_by(figures):
                reasons[name] = f"{reasons[name]}; {sentence}" if name in reasons else sentence
        self._notice_unseen()
        for name in self._outside:
            self._outside[name] = self._outside[name] + 1 if name in reasons else 0
        moving = self._agreed([name for name, count in self._outside.items() if count >= self._patience])
        for name in moving:
            self._move(name, reasons.get(name, _OTHERS))
            warnings.warn(
                f"octavo.PrecisionGuard: {name or '(root)'} runs in high precision from step {self._steps + 1} on:"
                f" {self.moved[name]}. {_remedy(self.moved[name])}; guard.release({name!r}) brings it back",
                stacklevel=3,
            )
        return moving

    def _agreed(self, names: list[str]) -> list[str]:
        """The layers that some rank wants to move, experts of one layer together: they run as one."""
        owners = [layer.owner for name in names if isinstance(layer := self._layers[name], Expert)]
        chosen = [
            name in names or (isinstance(layer, Expert) and any(layer.owner is owner for owner in owners))
            for name, layer in self._layers.items()
        ]
        device = next(iter(self._layers.values())).weight.device
        flags = agreed_maximum(torch.tensor(chosen, dtype=torch.float32, device=device), self._group).tolist()
        return [
            name
            for (name, layer), flag in zip(self._layers.items(), flags, strict=True)
            if flag and _runs_in_fp8(layer)
        ]

    def _move(self, name: str, reason: str) -> None:
        self.moved[name] = reason
        self._layers[name].delayed_state.high_precision = True

    def _forget_brought_back(self) -> None:
        """Forget what was moved and does not run in high precision any more: it was converted again, or back."""
        for name in list(self.moved):
            if not _is_moved(self._layers[name]):
                del self.moved[name]
                self._outside[name] = 0

    def _notice_unseen(self) -> None:
        if not self.figures and not self._saw_nothing and any(map(_runs_in_fp8, self._layers.values())):
            self._saw_nothing = True
            warnings.warn(
                "octavo.PrecisionGuard: in the step that was watched no FP8 layer has cast anything. FP8 was off, the"
                " model did not run between two calls of guard.step(), or it ran in a CUDA graph captured by hand,"
                " whose replays nobody can watch: watch before capturing, or use octavo.make_graphed_callables",
                stacklevel=4,
            )


def _remedy(reason: str) -> str:
    """What keeps a layer in FP8 that has left the bounds for that reason."""
    if BESIDE_OUTLIERS not in reason:
        return f"To keep it in FP8 {_WIDER}(...), {_FINER}"
    # A row or a block that holds an outlier has its scale by it.
    bounds = "..." if "; " in reason else "rest_sqnr_db=..."
    return f"To keep it in FP8 all the same {_WIDER}({bounds}); finer scales do not help against outlier channels"


def _is_moved(layer: nn.Module) -> bool:
    """True for an FP8 layer that runs in high precision; one that was converted back is no FP8 layer any more."""
    return isinstance(layer, FP8LinearMixin) and layer.delayed_state.high_precision


def _runs_in_fp8(layer: nn.Module) -> bool:
    """True for an FP8 layer that was not moved, by whomever."""
    return isinstance(layer, FP8LinearMixin) and not layer.delayed_state.high_precision
