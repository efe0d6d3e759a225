"""One update of operands of several formats, late bound or not, captured or not: the bits of each updated alone."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import octavo
from octavo.formats import E4M3, E5M2
from octavo.kernels.delayed_update import delayed_update_reference
from octavo.recipes import DelayedScaling, FormatPair, Recipe
from octavo.runtime import LayerState, update
from octavo.tensor import OperandState

HYBRID = DelayedScaling(amax_history_len=4)
MIXTURES = {
    "hybrid": [HYBRID, HYBRID],
    "one format": [DelayedScaling(format=E5M2, amax_history_len=4)] * 2,
    "several formats": [
        HYBRID,
        DelayedScaling(format=E4M3, amax_history_len=4),
        DelayedScaling(format=FormatPair(E5M2, E4M3), amax_history_len=4),
    ],
    "several updates": [
        HYBRID,
        DelayedScaling(format=E5M2, amax_history_len=7, margin=2),
        DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        DelayedScaling(format=E4M3, amax_history_len=4, amax_compute_algo=lambda window: window.median()),
    ],
}
CAPTURED = {"none": [], "all": range(99), "some": [0, 2, 4, 5]}


class Expected(NamedTuple):
    history: Tensor
    scale: Tensor


def states_with(recipes: list[Recipe]) -> list[LayerState]:
    """Layers that have gathered twice and been updated once."""
    states = []
    for recipe in recipes:
        states.append(LayerState())
        states[-1].adopt_recipe(recipe)
    gather(states)
    update.update_states(states, None)
    gather(states)
    return states


def gather(states: list[LayerState]) -> None:
    for state in states:
        for operand in state.operands:
            operand.gather(torch.rand(()) * 100)


def alone(state: LayerState, number: int, last: Tensor | None = None) -> Expected:
    """What the update of one operand by itself makes."""
    operand, rule = state.operands[number], state.update
    assert state.recipe is not None
    assert rule is not None
    own = copy.deepcopy(operand)
    own.resize(rule.amax_history_len)
    largest = state.recipe.linear[number].format.max  # type: ignore[union-attr]
    history, scale = delayed_update_reference(
        own.history[None],
        own.scale[None],
        (own.gathered if last is None else last)[None],
        (largest, largest),
        1,
        rule.margin,
        rule.algorithm,
    )
    return Expected(history[0], scale[0])


def each_once(states: list[LayerState]) -> list[tuple[LayerState, int, OperandState]]:
    found: dict[int, tuple[LayerState, int, OperandState]] = {}
    for state in states:
        for number, operand in enumerate(state.operands):
            found.setdefault(id(operand), (state, number, operand))
    return list(found.values())


def updates_as_alone(states: list[LayerState]) -> None:
    """End a step of these states, and compare."""
    operands = each_once(states)
    expected = [alone(state, number) for state, number, _ in operands]
    before = [(operand.scale, operand.scale._version, operand.history) for _, _, operand in operands]
    values = [(scale.clone(), history.clone()) for scale, _, history in before]
    update.update_states(states, None)
    for (state, number, operand), (history, scale), old, value in zip(operands, expected, before, values, strict=True):
        assert torch.equal(operand.history.view(torch.int32), history.view(torch.int32))
        assert torch.equal(operand.scale.view(torch.int32), scale.view(torch.int32))
        assert operand.gathered.item() == 0
        assert operand.format_max == state.recipe.linear[number].format.max  # type: ignore[union-attr]
        assert old[1] == old[0]._version, "past autograd"
        assert (operand.scale is old[0]) == (operand.late_bound or operand.captured)
        assert (operand.history is old[2]) == operand.captured
        if not (operand.late_bound or operand.captured):
            assert torch.equal(old[0], value[0]), "whoever read it keeps what was read"
        if not operand.captured:
            assert torch.equal(old[2], value[1])


@pytest.mark.parametrize("captured", list(CAPTURED))
@pytest.mark.parametrize("name", list(MIXTURES))
def test_every_operand_is_updated_as_if_alone(name: str, captured: str) -> None:
    states = states_with(MIXTURES[name])
    for number, (_, _, operand) in enumerate(each_once(states)):
        operand.captured = number in CAPTURED[captured]
    for step in range(4):
        updates_as_alone(states)
        gather(states)
        if step == 1:
            # Nothing was gathered, or nothing that counts: those keep what they have.
            states[0].input.gathered.zero_()
            states[1].grad_output.gathered.fill_(float("inf"))
            states[-1].weight.gathered.fill_(float("nan"))


@pytest.mark.parametrize("name", list(MIXTURES))
def test_a_shared_input_follows_the_first_layer(name: str) -> None:
    states = states_with(MIXTURES[name])
    states[1].share_input(states[0])
    updates_as_alone(states)
    gather(states)
    updates_as_alone(list(reversed(states)))


def updates_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of every update from now on."""
    calls: list[tuple[Any, ...]] = []

    def recorded(*arguments: Any) -> tuple[Tensor, Tensor]:
        calls.append(arguments)
        return delayed_update_reference(*arguments)

    monkeypatch.setattr(update, "delayed_update", recorded)
    return calls


@pytest.mark.parametrize("name", ["hybrid", "one format", "several formats"])
def test_one_update_serves_all_formats(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    states = states_with(MIXTURES[name])
    calls = updates_of(monkeypatch)
    update.update_states(states, None)
    assert [call[0].shape for call in calls] == [(3 * len(states), 4)]
    states[0].input.captured = True
    update.update_states(states, None)
    assert calls[-1][0].shape == (3 * len(states) - 1, 4), "a captured one is updated where it lies"


def test_operands_of_three_formats_take_two_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recipe has so many; the kernel takes two."""
    operands = [OperandState() for _ in range(4)]
    rule = HYBRID.delayed
    assert rule is not None
    calls = updates_of(monkeypatch)
    monkeypatch.setattr(
        update,
        "_grouped",
        lambda *_: {
            update._Rule(torch.device("cpu"), rule): {448.0: operands[:2], 6.0: [operands[2]], 2.0: [operands[3]]}
        },
    )
    for operand in operands:
        operand.gather(torch.tensor(12.0))
    update.update_states([], None)
    assert [call[3:5] for call in calls] == [((448.0, 6.0), 2), ((2.0, 2.0), 1)]
    assert [operand.scale.item() for operand in operands] == [*[torch.tensor(12.0).div(448).item()] * 2, 2.0, 6.0]


class TwiceAsMuch(update.Alone):
    """Another rank gathers twice as much of everything, and has a place for the same operands."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def needed(self, group: object | None) -> bool:
        return True

    def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
        self.seen.append(amaxes.tolist())
        return amaxes * 2


@pytest.mark.parametrize("name", list(MIXTURES))
def test_amaxes_of_all_formats_agree_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    keeps_its_own = DelayedScaling(format=E4M3, reduce_amax=False, amax_history_len=4)
    states = states_with([*MIXTURES[name], keeps_its_own])
    # A layer that has not run has its places.
    states.insert(1, LayerState())
    agreement = TwiceAsMuch()
    monkeypatch.setattr(update._Collective, "agreement", agreement)
    ran = [state for state in states if state.recipe is not None]
    factors = [1 if state.recipe is keeps_its_own else 2 for state in ran]
    gathered = [[operand.gathered.item() for operand in state.operands] for state in states]
    expected = [
        alone(state, number, state.operands[number].gathered * factor)
        for state, factor in zip(ran, factors, strict=True)
        for number in range(3)
    ]
    update.update_states(states, None)
    assert agreement.seen == [[*(amax for layer in gathered[:-1] for amax in layer), 0.0, 0.0, 0.0]]
    for operand, (history, scale) in zip((o for state in ran for o in state.operands), expected, strict=True):
        assert torch.equal(operand.history, history)
        assert torch.equal(operand.scale, scale)


def test_overrides_of_one_model_update_each_by_its_own_rule() -> None:
    """Steps with overrides by name, against the same layers with recipes of their own."""
    other = DelayedScaling(format=E5M2, amax_history_len=2, margin=1)
    same = DelayedScaling(format=E4M3, amax_history_len=4)
    recipe = DelayedScaling(amax_history_len=4, overrides={"^1$": other, "^2$": same})
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    twin = copy.deepcopy(model)
    octavo.convert(model, filter="all")
    octavo.convert(twin, filter="all")
    for name, layer in twin.named_children():
        layer.recipe = {"1": other, "2": same}.get(name, HYBRID)
    for _ in range(4):
        x = torch.randn(8, 16)
        with octavo.autocast(recipe=recipe):
            model(x).square().sum().backward()
        twin(x).square().sum().backward()
        for layer in twin:
            octavo.update_scales(layer)
    for layer, its_twin in zip(model, twin, strict=True):
        assert layer.delayed_state.update == its_twin.delayed_state.update
        for operand, its in zip(layer.delayed_state.operands, its_twin.delayed_state.operands, strict=True):
            assert torch.equal(operand.scale, its.scale)
            assert torch.equal(operand.history, its.history)


def test_the_next_update_takes_the_table_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a history has become another since, or other layers take part; a look changes nothing."""
    states = states_with([HYBRID, HYBRID])
    calls = updates_of(monkeypatch)

    def takes_the_table(states: list[LayerState] = states) -> bool:
        table = states[0].input.table
        updates_as_alone(states)
        gather(states)
        return calls[-1][0] is table

    assert takes_the_table()
    assert states[0].weight.saved()["amax_history"][1:].tolist() == states[0].weight.history[1:].tolist()
    assert takes_the_table()
    states[1].weight.load(torch.tensor(2.0), torch.tensor([0.0, 1.0, 2.0]))
    assert not takes_the_table()
    assert takes_the_table()
    states[0].grad_output.measure_next()
    assert not takes_the_table()
    assert not takes_the_table(states[:1])
    assert not takes_the_table()
    assert not takes_the_table(states[::-1])
    assert takes_the_table(states[::-1])
    longer = HYBRID.replaced(amax_history_len=6)
    for state in states:
        state.adopt_recipe(longer)
    assert not takes_the_table(states[::-1])
    # What is written to a history is found by the next update.
    states[0].input.history[2] = 1000.0
    assert takes_the_table(states[::-1])


def test_captured_histories_of_one_table_stay_there() -> None:
    states = states_with([HYBRID, HYBRID])
    operands = [operand for state in states for operand in state.operands]
    for operand in operands:
        operand.captured = True
    table = operands[0].table
    for _ in range(3):
        updates_as_alone(states)
        gather(states)
    states[0].input.load(torch.tensor(2.0), torch.tensor([0.0, 9.0, 8.0, 7.0]))
    updates_as_alone(states)
    assert all(operand.table is table for operand in operands)


def test_a_copy_has_a_history_of_its_own() -> None:
    states = states_with([HYBRID] * 3)
    other = copy.deepcopy(states[1])
    for operand, original in zip(other.operands, states[1].operands, strict=True):
        assert operand.table is None
        assert operand.history.untyped_storage().nbytes() == 16
        assert torch.equal(operand.history, original.history)
    updates_as_alone([other])
    updates_as_alone(states)
