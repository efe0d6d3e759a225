"""`octavo.predict_weight_scales`: the scale of a weight from what the optimizer can have done, not from the weight.

A weight changes by the optimizer's steps alone, and a step of Adam or AdamW moves no element by more than lr * c (see
`step_bound`). So after a measurement

    amax_t <= amax_0 + c * (lr_1 + ... + lr_t)

and a scale that provides for the right side never saturates. The bound is raised on the device after each step, and the
weight measured anew every so many steps. In between a cast reads the weight once, where current scaling reads it twice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.kernels import amax
from octavo.modules import FP8LinearMixin
from octavo.optim.bound_table import FROZEN, MEASURED, BoundTable
from octavo.optim.late_answer import LateAnswer
from octavo.optim.predictable_layers import group_indices, group_of, predictable_layers, remedies
from octavo.optim.step_bound import NoBoundError, Step, StepBound, adam_step, check_known, given_step, larger
from octavo.runtime import WeightBound
from octavo.runtime.given_model import check_model
from octavo.scaling import as_matrix
from octavo.tensor import stays_in_place, warn_user


def predict_weight_scales(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, every: int = 100, step_bound: StepBound | None = None
) -> PredictedWeightScales:
    """Predict the scales of the weights of `model` from the steps of `optimizer`, and measure them seldom.

        octavo.convert(model, CurrentScaling())
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
        predicted = octavo.predict_weight_scales(model, optimizer, every=100)

    For layers whose recipe has one scale a tensor of the weight, current or delayed; under another one the recipe's own
    way goes on. With delayed scaling weights have no history meanwhile, and no margin: a bound needs none. Learning
    rates are read from the param groups at each step. A weight that changed otherwise (`load_state_dict`, an edit,
    another optimizer) is measured anew at its next forward, in compiled code at the next step: call `measure()` after
    an edit there. A write through `weight.data` leaves no trace; call `measure()` as well. A frozen weight that is
    trained later follows its param group; where no bound of that is known, it is measured after each step from then on,
    with a warning.

    Args:
        model: converted, on its device and in its dtype.
        optimizer: `torch.optim.Adam` or `AdamW`, holding the weights; the one inside if something is around it.
        every: how many steps until the weights are measured anew.
        step_bound: of another optimizer, a function of a param group: the largest change of an element in one step, a
            number or a tensor of one; None of a group without a bound, into which weights are thawed later. NaN and inf
            are refused, at this call and on the CPU. Of a tensor on a GPU that would wait for it: a later step whose
            bound is NaN or inf there counts as 0, and a step or so later its weights are measured, with a warning.

    Returns:
        which layers are predicted and which are not; it measures at once, and ends the prediction.

    Raises:
        TypeError: no module, no optimizer.
        ValueError: `every` is no integer of 1 or more; the optimizer, or a group of weights, has no known bound; no
            layer can be predicted.
    """
    check_model(model, "octavo.predict_weight_scales")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"octavo.predict_weight_scales: optimizer is a {type(optimizer).__name__}: expected a"
            " torch.optim.Optimizer; of a wrapper, the one inside"
        )
    if type(every) is not int or every < 1:
        raise ValueError(f"every is {every!r}: expected how many steps until weights are measured anew, 1 or more")
    if not (step_bound is None or callable(step_bound)):
        raise ValueError(f"step_bound is {step_bound!r}: expected a function of a param group, or None")
    if step_bound is None:
        check_known(optimizer)
    return PredictedWeightScales(model, optimizer, every, step_bound)


class PredictedWeightScales:
    """What `octavo.predict_weight_scales` gives.

    Attributes:
        layers: names of the layers whose scales are predicted.
        left: names of the others, and why their weights are measured; those that were predicted before among them.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, every: int, step_bound: StepBound | None
    ) -> None:
        """As `predict_weight_scales`, whose arguments they are."""
        self._every, self._step_bound, self._steps = every, step_bound, 0
        self._optimizer = weakref.ref(optimizer)
        # Of each weight whose steps have a bound, those of its moments.
        self._betas: dict[WeightBound, tuple[Any, Any]] = {}
        self._edited: list[WeightBound] = []
        self._before: list[_Seen] = []
        self._asked: list[_Asked] = []
        self._over = False
        self.layers, self.left, rows = predictable_layers(model, optimizer)
        if not rows:
            why = "; ".join(f"{name or '(root)'}: {reason}" for name, reason in list(self.left.items())[:3])
            remedy = remedies(self.left.values() or [""])
            raise ValueError(
                f"octavo.predict_weight_scales: no layer of this {type(model).__name__} can be predicted"
                f"{f' ({why})' if why else ''}{f': {remedy}' if remedy else ''}"
            )
        self._tables = [BoundTable(*zip(*some, strict=True)) for some in rows]
        self._names = dict(zip((bound for table in self._tables for bound in table.bounds), self.layers, strict=True))
        for table in self._tables:
            for group in {index for index in table.groups if index >= 0}:
                self._check_bound(optimizer, group, table)
        self._look(optimizer)
        self.measure()
        for bound, layer in self._followed():
            layer.delayed_state.predict_weight(bound)
            # Who moves the weight when this optimizer is gone must still be noticed.
            bound.keeps = self
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        _PREDICTIONS.add(self)

    def __repr__(self) -> str:
        every = "every step" if self._every == 1 else f"every {self._every} steps"
        layers = f"{len(self.layers)} layer{'s' if len(self.layers) != 1 else ''} predicted"
        what = "ended" if self._over else f"{layers}, measured {every}, {len(self.left)} left"
        return f"{type(self).__name__}({what})"

    def measure(self) -> None:
        """Measure all weights now, as after an edit that leaves no trace."""
        for bound, _ in self._followed():
            bound.measure()

    def slack(self) -> dict[str, float]:
        """How many bits each scale leaves unused, log2(bound / amax), by layer; waits for the device."""
        found = {}
        for bound, layer in self._followed():
            largest = max(float(amax(as_matrix(part.detach()))) for part in layer.weight_parts())
            found[self._names[bound]] = math.log2(float(bound.amax) / largest) if largest else 0.0
        return found

    def remove(self) -> None:
        """End the prediction: weights are scaled as their recipes say, with what delayed scaling knew forgotten."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        _PREDICTIONS.discard(self)
        self._end()

    def _end(self) -> None:
        # The hooks stay where they are: an optimizer that is going through them suffers no change.
        self._over = True
        for bound, layer in self._followed():
            if layer.delayed_state.weight_bound is bound:
                layer.delayed_state.predict_weight(None)

    def _followed(self) -> Iterator[tuple[WeightBound, Any]]:
        """The bounds, each with its layer, of those that are still there and still FP8 layers."""
        for table in self._tables:
            for bound in table.bounds:
                layer = bound.layer
                if isinstance(layer, FP8LinearMixin):
                    yield bound, layer

    def _look(self, optimizer: torch.optim.Optimizer) -> list[_Seen]:
        """What a step would do to each table as things are; if there is no telling nothing, and the prediction ends."""
        indices, seen = group_indices(optimizer), []
        for table in self._tables:
            groups = [self._group(bound, indices) for bound in table.bounds]
            if self._betas_changed(optimizer, table, groups):
                self._end()
                return []
            steps = {}
            for index in dict.fromkeys(group for group in groups if group >= 0):
                try:
                    steps[index] = self._step(optimizer, index, table)
                except NoBoundError as error:
                    groups = self._without_bound(table, groups, index, str(error))
            self._note_betas(optimizer, table, groups)
            seen.append(_Seen(groups, steps))
        return seen

    def _group(self, bound: WeightBound, indices: dict[int, int]) -> int:
        """The group of a weight; MEASURED for good once it was in one without a bound, which its moments are of."""
        group = group_of(bound.layer, indices)
        return MEASURED if group >= 0 and self._names[bound] in self.left else group

    def _check_bound(self, optimizer: torch.optim.Optimizer, index: int, table: BoundTable) -> None:
        """Refuse a group without a bound, before anything is changed."""
        try:
            self._step(optimizer, index, table, waits=True)
        except NoBoundError as error:
            raise NoBoundError(
                f"octavo.predict_weight_scales: no bound is known of the steps of param group {index}: {error}"
            ) from None

    def _step(self, optimizer: torch.optim.Optimizer, index: int, table: BoundTable, waits: bool = False) -> Step:
        group = optimizer.param_groups[index]
        if self._step_bound is not None:
            return given_step(self._step_bound, group, index, table.dtype, table.device, waits)
        return adam_step(group, table.dtype)

    def _asking(self, step: Step, table: BoundTable, group: int) -> Step:
        """A step of a given bound, which counts as 0 if it is NaN or inf on the device; the host learns that later."""
        if self._step_bound is None or not isinstance(step.added, Tensor):
            return step
        self._asked.append(_Asked(LateAnswer(step.added), table, group))
        return step._replace(added=step.added.nan_to_num(nan=0.0, posinf=0.0))

    def _learn(self) -> None:
        """Measure what has been moved by a step that turns out to have no bound, with a warning."""
        asked, self._asked = self._asked, []
        for one in asked:
            if not one.answer.has_come():
                self._asked.append(one)
            elif not one.answer.is_finite:
                for bound, group in zip(one.table.bounds, one.table.groups, strict=True):
                    if group == one.group and isinstance(bound.layer, FP8LinearMixin):
                        bound.measure()
                # Python shows the warning of one line of code once.
                warn_user(
                    f"octavo.predict_weight_scales: step_bound returned a tensor that is NaN or inf for param group"
                    f" {one.group}, in a step before this one. It was counted as 0, so that large weights of that group"
                    " may have saturated since; they are measured again now. Return a finite number of 0 or more, or"
                    " None where there is no bound"
                )

    def _without_bound(self, table: BoundTable, groups: list[int], index: int, why: str) -> list[int]:
        """The groups of a table with MEASURED for one; a warning is given of each of its weights, once."""
        anew = "make the optimizer anew with a bound for this group" if self._step_bound is None else "give it a bound"
        for bound, group, before in zip(table.bounds, groups, table.groups, strict=True):
            if group != index:
                continue
            name = self._names[bound]
            self.layers.remove(name)
            self.left[name] = f"no bound is known of the steps of param group {index}: {why}"
            warn_user(
                f"octavo.predict_weight_scales: the weight of {name or '(root)'}"
                f" {'was frozen, and is trained now' if before == FROZEN else 'is trained'} in param group {index}, of"
                f" whose steps no bound is known: {why}. It is measured after each step from now on, which reads it"
                " once more; the other weights stay predicted. To have it predicted too, remove() the prediction,"
                f" {anew}, and call it anew"
            )
        return [MEASURED if group == index else group for group in groups]

    def _betas_changed(self, optimizer: torch.optim.Optimizer, table: BoundTable, groups: list[int]) -> bool:
        """True, with a warning, if a weight has moments of two kinds."""
        for bound, group in zip(table.bounds, groups, strict=True):
            before = self._betas.get(bound)
            if group < 0 or before is None:
                continue
            now = _betas_of(optimizer.param_groups[group])
            if before != now:
                warn_user(
                    f"octavo.predict_weight_scales: betas and eps changed from {before} to {now}, and no bound is known"
                    " of moments of both: the weights' scales are measured from now on. Call it anew where the"
                    " optimizer is made anew"
                )
                return True
        return False

    def _note_betas(self, optimizer: torch.optim.Optimizer, table: BoundTable, groups: list[int]) -> None:
        """Keep those of which there is a bound, of the moments that each weight will have."""
        for bound, group in zip(table.bounds, groups, strict=True):
            if group >= 0 and self._step_bound is None:
                self._betas.setdefault(bound, _betas_of(optimizer.param_groups[group]))

    def _before_step(self, optimizer: Any, *arguments: Any) -> None:
        if self._over:
            return
        if stays_in_place():
            raise RuntimeError(
                "octavo.predict_weight_scales: the optimizer's step is being captured in a CUDA graph, and its replays"
                " would move the weights past their bounds unseen: leave the step out of the graph, or remove() the"
                " prediction first"
            )
        # After the step before all others: what those change is none of the step's.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)
        self._learn()
        self._edited = [bound for bound, layer in self._followed() if not bound.is_of(layer.weight_parts())]
        self._before = self._look(optimizer)

    def _after_step(self, optimizer: Any, *arguments: Any) -> None:
        if self._over:
            return
        before, now = self._before, self._look(optimizer)
        if not now:
            return
        self._before = []
        self._steps += 1
        regrouped = [one.groups for one in before] != [one.groups for one in now]
        for table, seen in zip(self._tables, now, strict=True):
            table.groups = seen.groups
        if self._steps % self._every == 0 or regrouped:
            self.measure()
            return
        for table, first, second in zip(self._tables, before, now, strict=True):
            # Whatever changed a rate in between, the step took one of the two.
            steps = {group: larger(step, second.steps[group]) for group, step in first.steps.items()}
            table.advance({group: self._asking(step, table, group) for group, step in steps.items()})
            for bound, group in zip(table.bounds, table.groups, strict=True):
                # What no group has was not moved by this step: a change of it is somebody else's.
                if group >= 0:
                    bound.note(bound.layer.weight_parts())
                elif group == MEASURED:
                    bound.measure()
        for bound in self._edited:
            bound.measure()

    def after_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """What another optimizer moved is measured."""
        if self._over or optimizer is self._optimizer():
            return
        moved = group_indices(optimizer)
        for bound, layer in self._followed():
            if any(id(part) in moved for part in layer.weight_parts()):
                bound.measure()


class _Seen(NamedTuple):
    """What a step does to a table: the group of each row, and the step of each group."""

    groups: list[int]
    steps: dict[int, Step]


class _Asked(NamedTuple):
    """Whether the bound of one step was finite: of a param group, for the weights of a table."""

    answer: LateAnswer
    table: BoundTable
    group: int


def _betas_of(group: dict[str, Any]) -> tuple[Any, Any]:
    """What moments depend on, and how they are used; betas alike whether they are a tuple or a list."""
    return tuple(group["betas"]), group["eps"]


# Those that are alive, for what is called after the steps of all optimizers: it is there once, and holds nothing.
_PREDICTIONS: weakref.WeakSet[PredictedWeightScales] = weakref.WeakSet()


def _after_any_step(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    for prediction in list(_PREDICTIONS):
        prediction.after_step_of(optimizer)


register_optimizer_step_post_hook(_after_any_step)
