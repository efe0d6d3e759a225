"""The end of a step of layers that CUDA graphs read: prepared once, in place, with the bits of one without graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.test_cuda_graphs import StandIn
from torch import Tensor, nn

import octavo
from octavo.kernels import delayed_update_in_place
from octavo.recipes import DelayedScaling
from octavo.runtime import LayerState, cuda_graphs, update
from octavo.tensor import operand_state

RECIPE = DelayedScaling(amax_history_len=4)


class Preparations:
    """Counts what is prepared, and how often it is run."""

    def __init__(self) -> None:
        self.made = self.run = 0

    def __call__(self, *arguments: Any) -> Callable[[], None]:
        self.made += 1
        once = delayed_update_in_place(*arguments)

        def counted() -> None:
            self.run += 1
            once()

        return counted


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> Preparations:
    counts = Preparations()
    monkeypatch.setattr(operand_state, "delayed_update_in_place", counts)
    return counts


def captured_states(number: int = 2) -> list[LayerState]:
    states = []
    for _ in range(number):
        state = LayerState()
        state.adopt_recipe(RECIPE)
        for operand in state.operands:
            operand.resize(4)
            operand.captured = True
        states.append(state)
    return states


def step(states: list[LayerState]) -> None:
    for state in states:
        for operand in state.operands:
            operand.gather(torch.rand(()) * 100)
    update.update_states(states, None)


def test_a_step_is_prepared_once(preparations: Preparations) -> None:
    states = captured_states()
    places = [(o.scale, o.gathered, o.history) for state in states for o in state.operands]
    for _ in range(5):
        step(states)
    assert (preparations.made, preparations.run) == (1, 5)
    step(states[:1])
    assert preparations.made == 2
    operands = [o for state in states for o in state.operands]
    for operand, (scale, gathered, history) in zip(operands, places, strict=True):
        assert operand.scale is scale
        assert operand.gathered is gathered
        assert operand.history is history
        assert (scale._version, history._version) == (0, 0)


def _loads(states: list[LayerState]) -> None:
    states[1].weight.load(torch.tensor(3.0), torch.tensor([0.0, 4.0, 5.0, 6.0]))


def _resets(states: list[LayerState]) -> None:
    states[0].input.reset(torch.device("cpu"))


def _gathers_nothing(states: list[LayerState]) -> None:
    states[0].input.gathered.zero_()


def _moves(states: list[LayerState]) -> None:
    for operand in states[0].operands:
        operand.scale, operand.gathered = operand.scale.clone(), operand.gathered.clone()
        operand.history = operand.history.clone()


def _takes_another_recipe(states: list[LayerState]) -> None:
    states[1].adopt_recipe(RECIPE.replaced(margin=1))


def _lets_go(states: list[LayerState]) -> None:
    """As after a capture that failed."""
    for operand in states[0].operands:
        operand.captured = False


def _shares_its_input(states: list[LayerState]) -> None:
    states[1].share_input(states[0])


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        (_loads, 0),
        (_resets, 0),
        (_gathers_nothing, 0),
        (_moves, 1),
        (_takes_another_recipe, 2),
        (_lets_go, 1),
        (_shares_its_input, 1),
    ],
)
def test_what_changes_between_steps_is_seen(
    preparations: Preparations, changes: Callable[[list[LayerState]], None], more: int
) -> None:
    states = captured_states()
    for _ in range(3):
        step(states)
    twins = copy.deepcopy(states)
    assert not any(operand.captured or operand.prepared for state in twins for operand in state.operands)
    changes(states)
    changes(twins)
    for number in range(3):
        for both in (states, twins):
            torch.manual_seed(number)
            step(both)
    assert preparations.made == 1 + more
    for state, twin in zip(states, twins, strict=True):
        for operand, other in zip(state.operands, twin.operands, strict=True):
            assert torch.equal(operand.scale, other.scale)
            assert torch.equal(operand.history, other.history)
            assert operand.gathered.item() == 0
            assert operand.format_max == other.format_max


def test_an_unknown_scale_is_not_updated_where_it_lies_until_it_is_known(preparations: Preparations) -> None:
    states = captured_states()
    step(states)
    states[0].weight.measure_next()
    states[0].input.gather(torch.tensor(5.0))
    update.update_states(states, None)
    assert states[0].weight.from_data, "it has gathered nothing"
    step(states)
    assert not states[0].weight.from_data
    step(states)
    step(states)
    assert (preparations.made, preparations.run) == (3, 5)


def test_in_a_capture_nothing_is_prepared(preparations: Preparations, monkeypatch: pytest.MonkeyPatch) -> None:
    states = captured_states()
    step(states)
    places = [(o.scale, o.history) for state in states for o in state.operands]
    monkeypatch.setattr(update, "is_captured", lambda x: True)
    step(states)
    assert (preparations.made, preparations.run) == (1, 1)
    for operand, (scale, history) in zip((o for state in states for o in state.operands), places, strict=True):
        assert operand.scale is scale
        assert operand.history is history


def test_an_agreement_of_ranks_is_no_update_of_ones_own_amaxes(
    preparations: Preparations, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubling(update.Alone):
        def needed(self, group: object | None) -> bool:
            return True

        def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
            return amaxes * 2

    states = captured_states()
    monkeypatch.setattr(update._Collective, "agreement", Doubling())
    states[0].input.gather(torch.tensor(448.0))
    update.update_states(states, None)
    assert states[0].input.scale.item() == 2.0
    assert preparations.made == 0


class Parts(nn.Module):
    """Two parts that will be graphed, a layer that will not, and one that a step may leave out."""

    def __init__(self, recipe: DelayedScaling | None, device: str) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(octavo.Linear(32, 48, recipe=recipe), nn.GELU(), octavo.Linear(48, 32, recipe=recipe))
            for _ in range(2)
        )
        self.eager = octavo.Linear(32, 32, recipe=recipe)
        self.to(device)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y = self.eager(self.first(x))
        return self.second(y) if both else y


def one_step(model: Parts, recipe: DelayedScaling | None, number: int, device: str) -> Tensor:
    torch.manual_seed(number)
    x = torch.randn(16, 32, device=device).requires_grad_() * (1 + number % 5)
    if recipe is None:
        y = model(x, number % 4 != 3)
    else:
        with octavo.autocast(recipe=recipe):
            y = model(x, number % 4 != 3)
    loss = (y - x.detach()).square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
                parameter.grad = None
    if recipe is None:
        octavo.update_scales(model)
    return loss.detach()


def compare(device: str, inside: bool) -> None:
    """Twenty steps: some leave a part out, one loads a state of before, one forgets a scale."""
    recipe = RECIPE if inside else None
    plain = Parts(None if inside else RECIPE, device)
    graphed = copy.deepcopy(plain)
    for number in range(3):
        assert torch.equal(*(one_step(model, recipe, number, device) for model in (plain, graphed)))
    samples = tuple((torch.randn(16, 32, device=device, requires_grad=True),) for _ in range(2))
    with octavo.autocast(recipe=RECIPE):
        octavo.make_graphed_callables((graphed.first, graphed.second), samples)
    before = copy.deepcopy(plain.state_dict())
    for number in range(20):
        if number == 8:
            for model in (plain, graphed):
                model.load_state_dict(before)
        if number == 12:
            for model in (plain, graphed):
                model.first[0].delayed_state.weight.reset(model.first[0].weight.device)
                octavo.update_scales(model)
        assert torch.equal(*(one_step(model, recipe, number, device) for model in (plain, graphed))), number
        states = plain.state_dict(), graphed.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]), number


@pytest.mark.parametrize("inside", [True, False], ids=["autocast", "update_scales"])
def test_steps_of_graphed_and_eager_parts_have_the_bits_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch, preparations: Preparations, inside: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", StandIn())
    monkeypatch.setattr(cuda_graphs, "_lies_on_cuda", lambda tensor: True)
    compare("cpu", inside)
    assert preparations.run >= 20


@pytest.mark.gpu
@pytest.mark.parametrize("inside", [True, False], ids=["autocast", "update_scales"])
def test_on_a_gpu_steps_of_graphed_and_eager_parts_have_the_bits_of_eager_ones(inside: bool) -> None:
    compare("cuda", inside)


@pytest.mark.gpu
def test_on_a_gpu_an_update_waits_for_nothing_and_launches_once(preparations: Preparations) -> None:
    states = captured_states()
    for state in states:
        state.move(torch.device("cuda"))
        for operand in state.operands:
            operand.captured = True
    torch._foreach_add_([operand.gathered for state in states for operand in state.operands], 3.0)
    update.update_states(states, None)
    torch.cuda.set_sync_debug_mode("error")
    try:
        states[0].input.prepared = None
        update.update_states(states, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        update.update_states(states, None)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert names == ["delayed_update_in_place_kernel"]


@pytest.mark.gpu
def test_on_a_gpu_a_whole_step_may_be_captured_after_eager_steps_in_place() -> None:
    """In the capture no table is made, and the graph goes on where the steps before left off."""
    torch.manual_seed(0)
    plain = octavo.Linear(32, 32, recipe=RECIPE, device="cuda")
    twin = copy.deepcopy(plain)
    x = torch.randn(16, 32, device="cuda")

    def train(layer: octavo.Linear) -> None:
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
        octavo.update_scales(layer)

    for _ in range(3):
        train(plain)
        train(twin)
    for operand in twin.delayed_state.operands:
        operand.captured = True
    train(plain)
    train(twin)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        train(twin)
    for number in range(4):
        x.mul_(1.5)
        train(plain)
        graph.replay()
        if number == 2:
            train(plain)
            train(twin)
        for a, b in zip(plain.delayed_state.operands, twin.delayed_state.operands, strict=True):
            assert torch.equal(a.scale, b.scale)
            assert torch.equal(a.history, b.history)
