"""The end of a step: one update of all delayed-scaling states that took part.

Which layers took part is noted by their forward; whether an operand changes is decided on the device (an amax
of 0 changes nothing), so nothing synchronises. With several ranks all amaxes agree first, by one
all-reduce MAX over one tensor that holds them all.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from itertools import compress
from operator import is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.kernels import SCALE_ALIGNMENT, delayed_update
from octavo.recipes import DelayedUpdate, Recipe
from octavo.runtime.given_model import check_model
from octavo.runtime.layer_state import LayerState, registered_states, states_of
from octavo.runtime.weight_bound import takes_bound
from octavo.tensor import (
    OperandState,
    StepRule,
    close_captured_step,
    close_step,
    histories_of,
    is_captured,
    stays_in_place,
)


class Agreement(Protocol):
    """How amaxes agree across ranks; `octavo.distributed` sets the real one."""

    def needed(self, group: object | None) -> bool:
        """True if there is more than one rank to agree with."""
        ...

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        """The maximum over the group of a vector of amaxes."""
        ...


class Alone:
    """One process: nothing to agree on."""

    def needed(self, group: object | None) -> bool:
        """Never."""
        return False

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        """The amaxes themselves."""
        return amaxes


class _Collective:
    """Holds the agreement in force."""

    agreement: Agreement = Alone()


def set_agreement(agreement: Agreement) -> None:
    """Say how amaxes agree across ranks."""
    _Collective.agreement = agreement


def agreed_maximum(values: Tensor, group: object | None) -> Tensor:
    """The maximum over the group of a vector [n], float32; of one process the vector itself."""
    agreement = _Collective.agreement
    return agreement.reduce(values, group) if agreement.needed(group) else values


class _Rule(NamedTuple):
    """What the operands of one update have in common."""

    device: torch.device
    update: DelayedUpdate


# Operands of one format, with its largest value.
_OfFormat = tuple[float, list[OperandState]]
# By rule, then by the largest value of their format.
_Grouped = dict[_Rule, dict[float, list[OperandState]]]


class _Update(NamedTuple):
    """One update: operands of one format or of two, by how they are updated.

    Attributes:
        rule, by: what they have in common, and that in the words of an update.
        operands, maxima: and the largest value of each one's format.
    """

    rule: _Rule
    by: StepRule
    operands: list[OperandState]
    maxima: list[float]


def end_step(context: object, group: object | None = None, recipe: Recipe | None = None) -> None:
    """Update the states of all layers that ran in `context` since their last update.

    With several ranks, of all layers, since one rank may have skipped some, or all: those that have not run here yet
    follow `recipe`, the context's. All ranks must have built the same layers in the same order; copies of a model count
    from their own first training forward on, so that one rank alone may keep some for evaluation.
    """
    if _Collective.agreement.needed(group):
        states = [state for state in registered_states() if state.takes_part]
    else:
        states, recipe = [state for state in registered_states() if state.context is context], None
    # Scales that were calibrated under inference_mode must still serve a training.
    leaves = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    with torch.inference_mode(False) if leaves else nullcontext():
        update_states(states, group, recipe)


def update_scales(model: nn.Module, group: object | None = None) -> None:
    """End a step of delayed scaling: new scales for the next step from the amaxes of this one.

    Call it once a step, for converted models that run without `octavo.autocast` (which does it by itself): after the
    backward, before or after `optimizer.step()`.

    Args:
        model: the model whose layers are updated.
        group: the process group over which amaxes agree; the default group if None and torch.distributed is set up.

    With other recipes it does nothing. Of a model that holds no layer of Octavo's it warns.

    Raises:
        TypeError: no module.
    """
    check_model(model, "octavo.update_scales")
    states = list(states_of(model))
    if not states and not torch.compiler.is_compiling() and any(True for _ in model.parameters()):
        # Python shows the warning of one line of code once.
        warnings.warn(
            f"octavo.update_scales: this {type(model).__name__} holds no layer of Octavo's, and there are no scales to"
            " update: give the model that octavo.convert(model, DelayedScaling()) changed",
            stacklevel=2,
        )
    update_states(states, group)


def update_states(states: list[LayerState], group: object | None, otherwise: Recipe | None = None) -> None:
    """One update of these states; `otherwise` is the recipe of those that have not run."""
    # A layer that has not run has no name by which an override could be looked up.
    if otherwise is not None and (otherwise.delayed is None or otherwise.overrides):
        otherwise = None
    updates = _updates(states, otherwise)
    for state in states:
        state.context = None
        state.stale_steps = 0
    agreed = _agreed(states, updates, group) if _Collective.agreement.needed(group) else {}
    for update in updates:
        for operand, format_max in zip(update.operands, update.maxima, strict=True):
            # Layers that share it may run in several formats: the new scale is for this one.
            operand.format_max = format_max
        left = update if agreed else _left_of_captured(update)
        if left is not None:
            _update_by_operators(left, agreed)


def _updates(states: list[LayerState], otherwise: Recipe | None) -> list[_Update]:
    """The updates that these states take: those of the last step where nothing has changed since.

    They are kept by the first state, in eager code; in compiled code they would become part of its guards.
    """
    if torch.compiler.is_compiling() or not states:
        return _cut(_grouped(states, otherwise))
    known = states[0].updates
    # The tensor tells of another device.
    parts: list[object] = [otherwise]
    for state in states:
        parts += (state.recipe, *state.operands, state.input.gathered, state.high_precision, state.weight_bound)
    if known is None or len(known[0]) != len(parts) or not all(map(is_, known[0], parts)):
        known = states[0].updates = parts, _cut(_grouped(states, otherwise))
    updates: list[_Update] = known[1]
    return updates


def _cut(grouped: _Grouped) -> list[_Update]:
    """One update takes up to two formats."""
    updates = []
    for rule, by_format in grouped.items():
        formats = [one for one in by_format.items() if one[1]]
        updates += [_update_of(rule, formats[begin : begin + 2]) for begin in range(0, len(formats), 2)]
    return updates


def _update_of(rule: _Rule, formats: list[_OfFormat]) -> _Update:
    maxima, first = (formats[0][0], formats[-1][0]), len(formats[0][1])
    by = StepRule(rule.update.amax_history_len, maxima, first, rule.update.margin, rule.update.algorithm)
    operands = [operand for _, members in formats for operand in members]
    return _Update(rule, by, operands, [largest for largest, members in formats for _ in members])


def _grouped(states: list[LayerState], otherwise: Recipe | None) -> _Grouped:
    """The operands of these states, each once, by what updates them."""
    grouped: _Grouped = {}
    known: dict[tuple[int, torch.device], list[list[OperandState]]] = {}
    seen: set[int] = set()
    for state in states:
        recipe = state.recipe or otherwise
        if recipe is None or recipe.delayed is None or state.high_precision:
            continue
        # By identity: a recipe hashes all of its fields each time.
        made_for = id(recipe), state.device
        if made_for not in known:
            by_format = grouped.setdefault(_Rule(state.device, recipe.delayed), {})
            known[made_for] = [by_format.setdefault(spec.format.max, []) for spec in recipe.linear[:3]]
        for operands, operand in zip(known[made_for], state.operands, strict=True):
            if operand is state.weight and state.weight_bound is not None and takes_bound(recipe.linear):
                continue  # its casts gather nothing
            if operand.shared:
                if id(operand) in seen:
                    continue  # by layers on one input
                seen.add(id(operand))
            operands.append(operand)
    return grouped


@torch.no_grad()
def _agreed(states: list[LayerState], updates: list[_Update], group: object | None) -> dict[int, Tensor]:
    """The amaxes after one all-reduce for all rules that ask for it, by the operands' identity.

    The vector has a place for every operand of every layer, whether or not it ran: it is as long on all ranks.
    """
    agreeing = [update for update in updates if update.rule.update.reduce_amax]
    if not agreeing:
        return {}
    device = agreeing[0].rule.device
    places: dict[int, int] = {}
    for place, operand in enumerate(operand for state in states for operand in state.operands):
        places.setdefault(id(operand), place)
    joined = [torch.zeros((), device=device)] * sum(len(state.operands) for state in states)
    chosen = [operand for update in agreeing for operand in update.operands]
    for operand in chosen:
        joined[places[id(operand)]] = operand.gathered.to(device)
    agreed = _Collective.agreement.reduce(torch.stack(joined), group).unbind()
    return {id(operand): agreed[places[id(operand)]] for operand in chosen}


def _left_of_captured(update: _Update) -> _Update | None:
    """Update the captured operands where they lie; return what is left: others, and those whose scale is not known.

    In a capture that is all: a graph would go on reading what was prepared for another step.
    """
    operands = update.operands
    if torch.compiler.is_compiling() or is_captured(operands[0].gathered):
        return update
    fixed = [operand.captured and not operand.from_data for operand in operands]
    if not any(fixed):
        return update
    if all(fixed):
        close_captured_step(operands, update.by)
        return None
    captured = _chosen(update, fixed)
    close_captured_step(captured.operands, captured.by)
    return _chosen(update, [not one for one in fixed])


def _chosen(update: _Update, chosen: list[bool]) -> _Update:
    """The update of some of its operands."""
    formats: dict[float, list[OperandState]] = {}
    for operand, largest in compress(zip(update.operands, update.maxima, strict=True), chosen):
        formats.setdefault(largest, []).append(operand)
    return _update_of(update.rule, list(formats.items()))


@torch.no_grad()
def _update_by_operators(update: _Update, agreed: dict[int, Tensor]) -> None:
    """Update operands whose scales and histories may become new tensors."""
    operands, by = update.operands, update.by
    last = torch.stack([agreed.get(id(operand), operand.gathered) for operand in operands]).to(update.rule.device)
    took_part = _took_part(operands, last)
    scales = torch.stack([operand.scale for operand in operands])
    history, scale = delayed_update(histories_of(operands, by.length), scales, last, *by[1:])
    close_step(operands, history, _apart(scale), took_part)


def _took_part(operands: list[OperandState], last: Tensor) -> list[bool]:
    """Which operands have gathered: of interest only where a scale is not known, so the host waits for nothing else."""
    if torch.compiler.is_compiling():
        return [operand.has_gathered_by_now() for operand in operands]
    if not any(operand.from_data for operand in operands):
        return [True] * len(operands)
    if stays_in_place():
        # Nothing can be looked at while a graph is captured; a scale that it did not cast with stays unknown.
        return [not operand.from_data for operand in operands]
    gathered: list[bool] = (last > 0).tolist()
    return gathered


def _apart(values: Tensor) -> tuple[Tensor, ...]:
    """A vector [n] as n scalars that lie 16 bytes apart, as cuBLASLt wants the scale of an operand."""
    gap = SCALE_ALIGNMENT // values.element_size()
    if values.stride(0) % gap:
        values = torch.nn.functional.pad(values.unsqueeze(1), (0, gap - 1))[:, 0]
    return values.unbind()
