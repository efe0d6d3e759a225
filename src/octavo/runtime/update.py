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
from octavo.tensor import OperandState, close_step, stays_in_place


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


class _Kind(NamedTuple):
    device: torch.device
    late_bound: bool
    captured: bool
    format_max: float
    update: DelayedUpdate


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
    agreement = _Collective.agreement
    # A layer that has not run has no name by which an override could be looked up.
    if otherwise is not None and (otherwise.delayed is None or otherwise.overrides):
        otherwise = None
    seen: set[int] = set()
    known: dict[tuple[object, ...], list[tuple[list[OperandState], list[int]]]] = {}
    kinds: dict[_Kind, list[OperandState]] = {}
    positions: dict[_Kind, list[int]] = {}
    for number, state in enumerate(states):
        recipe = state.recipe or otherwise
        if recipe is None or recipe.delayed is None:
            continue
        # By identity: a recipe hashes all of its fields each time.
        made_for = id(recipe), state.device, *(operand.captured for operand in state.operands)
        if made_for not in known:
            its_kinds = [
                _Kind(state.device, operand.late_bound, operand.captured, spec.format.max, recipe.delayed)
                for spec, operand in zip(recipe.linear[:3], state.operands, strict=True)
            ]
            known[made_for] = [(kinds.setdefault(kind, []), positions.setdefault(kind, [])) for kind in its_kinds]
        for place, ((operands, places), operand) in enumerate(zip(known[made_for], state.operands, strict=True)):
            if id(operand) in seen:
                continue  # shared by layers on one input
            seen.add(id(operand))
            operands.append(operand)
            places.append(len(state.operands) * number + place)
        state.context = None
        state.stale_steps = 0
    reduced = {kind: where for kind, where in positions.items() if kind.update.reduce_amax}
    lasts = _agreed(states, reduced, agreement, group) if reduced and agreement.needed(group) else {}
    for kind, operands in kinds.items():
        _update_kind(kind, operands, lasts.get(kind))


def _agreed(
    states: list[LayerState], positions: dict[_Kind, list[int]], agreement: Agreement, group: object | None
) -> dict[_Kind, Tensor]:
    """The gathered amaxes of each kind after one all-reduce for all kinds that ask for it.

    The vector has a place for every operand of every layer, whether or not it ran: it is as long on all ranks.
    """
    device = next(iter(positions)).device
    joined = [torch.zeros((), device=device)] * sum(len(state.operands) for state in states)
    operands = [operand for state in states for operand in state.operands]
    for where in positions.values():
        for place in where:
            joined[place] = operands[place].gathered.to(device)
    agreed = agreement.reduce(torch.stack(joined), group).unbind()
    return {kind: torch.stack([agreed[place] for place in where]).to(kind.device) for kind, where in positions.items()}


def _update_kind(kind: _Kind, operands: list[OperandState], last: Tensor | None) -> None:
    for operand in operands:
        operand.resize(kind.update.amax_history_len)
        # Layers that share it may run in several formats: the new scale is for this one.
        operand.format_max = kind.format_max
    last = torch.stack([operand.gathered for operand in operands]) if last is None else last
    took_part = _took_part(operands, last)
    history, scale = delayed_update(
        torch.stack([operand.history for operand in operands]),
        torch.stack([operand.scale for operand in operands]),
        last,
        kind.format_max,
        kind.update.margin,
        kind.update.algorithm,
    )
    close_step(operands, history.unbind(), _apart(scale), took_part)


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
