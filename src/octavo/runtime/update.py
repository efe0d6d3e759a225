"""The end of a step: one update of all delayed-scaling states that took part.

Which layers took part is noted by their forward; whether an operand changes is decided on the device (an amax
of 0 changes nothing), so nothing synchronises. With several ranks all amaxes agree first, by one
all-reduce MAX over one tensor that holds them all.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from octavo.kernels import SCALE_ALIGNMENT, delayed_update
from octavo.recipes import DelayedUpdate, Recipe
from octavo.runtime.given_model import check_model
from octavo.runtime.layer_state import LayerState, registered_states, states_of
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


class _Rule(NamedTuple):
    """What the operands of one update have in common."""

    device: torch.device
    update: DelayedUpdate


# Operands of one format, with its largest value.
_OfFormat = tuple[float, list[OperandState]]
# By rule, then by the largest value of their format.
_Grouped = dict[_Rule, dict[float, list[OperandState]]]


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


@torch.no_grad()
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
            stacklevel=3,
        )
    update_states(states, group)


@torch.no_grad()
def update_states(states: list[LayerState], group: object | None, otherwise: Recipe | None = None) -> None:
    """One update of these states; `otherwise` is the recipe of those that have not run."""
    # A layer that has not run has no name by which an override could be looked up.
    if otherwise is not None and (otherwise.delayed is None or otherwise.overrides):
        otherwise = None
    grouped = _grouped(states, otherwise)
    agreed = _agreed(states, grouped, group)
    for rule, by_format in grouped.items():
        formats = [one for one in by_format.items() if one[1]]
        # One update takes up to two formats.
        for begin in range(0, len(formats), 2):
            _update(rule, formats[begin : begin + 2], agreed)


def _grouped(states: list[LayerState], otherwise: Recipe | None) -> _Grouped:
    """The operands of these states, each once, by what updates them; and the states begin a new step."""
    grouped: _Grouped = {}
    known: dict[tuple[int, torch.device], list[list[OperandState]]] = {}
    seen: set[int] = set()
    for state in states:
        recipe = state.recipe or otherwise
        if recipe is None or recipe.delayed is None:
            continue
        # By identity: a recipe hashes all of its fields each time.
        made_for = id(recipe), state.device
        if made_for not in known:
            by_format = grouped.setdefault(_Rule(state.device, recipe.delayed), {})
            known[made_for] = [by_format.setdefault(spec.format.max, []) for spec in recipe.linear[:3]]
        for operands, operand in zip(known[made_for], state.operands, strict=True):
            if operand.shared:
                if id(operand) in seen:
                    continue  # by layers on one input
                seen.add(id(operand))
            operands.append(operand)
        state.context = None
        state.stale_steps = 0
    return grouped


def _agreed(states: list[LayerState], grouped: _Grouped, group: object | None) -> dict[int, Tensor]:
    """The amaxes after one all-reduce for all rules that ask for it, by the operands' identity.

    The vector has a place for every operand of every layer, whether or not it ran: it is as long on all ranks.
    """
    agreement = _Collective.agreement
    agreeing = [rule for rule in grouped if rule.update.reduce_amax]
    if not (agreeing and agreement.needed(group)):
        return {}
    device = agreeing[0].device
    places: dict[int, int] = {}
    for place, operand in enumerate(operand for state in states for operand in state.operands):
        places.setdefault(id(operand), place)
    joined = [torch.zeros((), device=device)] * sum(len(state.operands) for state in states)
    chosen = [operand for rule in agreeing for operands in grouped[rule].values() for operand in operands]
    for operand in chosen:
        joined[places[id(operand)]] = operand.gathered.to(device)
    agreed = agreement.reduce(torch.stack(joined), group).unbind()
    return {id(operand): agreed[places[id(operand)]] for operand in chosen}


def _update(rule: _Rule, formats: list[_OfFormat], agreed: dict[int, Tensor]) -> None:
    """One update of operands of one format or of two."""
    for format_max, members in formats:
        for operand in members:
            # Layers that share it may run in several formats: the new scale is for this one.
            operand.format_max = format_max
    if not agreed:
        formats = _left_of_captured(rule, formats)
    if not formats:
        return
    operands = [operand for _, members in formats for operand in members]
    last = torch.stack([agreed.get(id(operand), operand.gathered) for operand in operands]).to(rule.device)
    took_part = _took_part(operands, last)
    by = _step_rule(rule, formats)
    scales = torch.stack([operand.scale for operand in operands])
    history, scale = delayed_update(histories_of(operands, by.length), scales, last, *by[1:])
    close_step(operands, history, _apart(scale), took_part)


def _step_rule(rule: _Rule, formats: list[_OfFormat]) -> StepRule:
    update = rule.update
    maxima, first = (formats[0][0], formats[-1][0]), len(formats[0][1])
    return StepRule(update.amax_history_len, maxima, first, update.margin, update.algorithm)


def _left_of_captured(rule: _Rule, formats: list[_OfFormat]) -> list[_OfFormat]:
    """Update the captured operands where they lie; return the others, those too whose scale is not known yet.

    In a capture that is all: a graph would go on reading what was prepared for another step.
    """
    if torch.compiler.is_compiling() or is_captured(formats[0][1][0].gathered):
        return formats
    fixed = _chosen(formats, True)
    if not fixed:
        return formats
    close_captured_step([operand for _, members in fixed for operand in members], _step_rule(rule, fixed))
    return _chosen(formats, False)


def _chosen(formats: list[_OfFormat], in_place: bool) -> list[_OfFormat]:
    """Those that are updated where they lie, or the others."""
    chosen = (
        (largest, [o for o in members if (o.captured and not o.from_data) is in_place]) for largest, members in formats
    )
    return [one for one in chosen if one[1]]


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
