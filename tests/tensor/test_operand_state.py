"""OperandState: what delayed scaling remembers of one operand, and the identities that autograd relies on."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from octavo.tensor import OperandState, close_step, operand_state


def updated(state: OperandState, scale: float, history: list[float]) -> None:
    close_step([state], torch.tensor([history]), [torch.tensor(scale)], [True])


def test_a_forward_scale_is_swapped_by_name() -> None:
    state = OperandState()
    before = state.scale, state.multiplier
    updated(state, 4.0, [0.0, 1.0])
    assert [t.item() for t in before] == [1.0, 1.0], "whoever read them keeps what was read"
    assert state.scale.item() == 4.0
    assert state.multiplier.item() == 0.25
    state.provide_for(448.0)
    state.provide_for(224.0)
    assert state.scale.item() == 8.0
    assert before[0].item() == 1.0


@pytest.mark.parametrize("late_bound", [False, True])
def test_while_a_cuda_graph_is_captured_every_address_stays(late_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads and writes the tensors it knows, and after an update outside of the capture too."""
    state = OperandState(late_bound=late_bound)
    updated(state, 3.0, [0.0, 1.0])
    before = state.scale, state.history, state.gathered
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert operand_state.stays_in_place()
    state.gather(torch.tensor(7.0))
    updated(state, 2.0, [0.0, 2.0])
    assert all(new is old for new, old in zip((state.scale, state.history, state.gathered), before, strict=True))
    assert (state.scale.item(), state.gathered.item()) == (2.0, 0.0)
    assert state.history.tolist() == [0.0, 2.0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not operand_state.stays_in_place()
    assert state.captured
    updated(state, 5.0, [0.0, 3.0])
    state.provide_for(448.0)
    state.provide_for(224.0)
    state.resize(2)
    state.gather(torch.tensor(7.0))
    assert (state.scale.item(), state.history.tolist(), state.gathered.item()) == (10.0, [0.0, 3.0], 7.0)
    assert all(new is old for new, old in zip((state.scale, state.history, state.gathered), before, strict=True))


@pytest.mark.parametrize("late_bound", [False, True])
def test_a_captured_state_is_loaded_and_forgotten_where_it_lies(late_bound: bool) -> None:
    state = OperandState(late_bound=late_bound)
    updated(state, 3.0, [0.0, 1.0, 2.0])
    state.captured = True
    before = state.scale, state.history, state.gathered
    state.load(torch.tensor(0.5), torch.tensor([4.0, 1.0, 2.0, 3.0, 5.0]))
    assert (state.scale.item(), state.history.tolist(), state.gathered.item()) == (0.5, [4.0, 3.0, 5.0], 4.0)
    assert not state.from_data
    state.measure_next()
    assert (state.scale.item(), state.history.tolist(), state.gathered.item()) == (1.0, [0.0] * 3, 0.0)
    assert state.from_data
    assert all(new is old for new, old in zip((state.scale, state.history, state.gathered), before, strict=True))


def test_a_captured_history_keeps_its_length() -> None:
    state = OperandState()
    updated(state, 3.0, [0.0, 1.0])
    state.captured = True
    with pytest.raises(RuntimeError, match="amax_history_len is 3, and a CUDA graph was captured with 2"):
        state.resize(3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_is_in_no_graph(copied) -> None:
    state = OperandState()
    state.captured = True
    assert not copied(state).captured
    assert state.captured


def test_on_another_device_a_state_is_in_no_graph() -> None:
    state = OperandState()
    state.captured = True
    state.move(torch.device("meta"))
    assert not state.captured


def test_a_gradients_scale_is_written_in_place_past_the_version_counter() -> None:
    """`Tensor.data` does not count as a change: what autograd saved of it raises nothing. Pins that habit of torch."""
    state = OperandState(late_bound=True)
    scale, version = state.scale, state.scale._version
    x = torch.ones((), requires_grad=True)
    y = x * scale
    updated(state, 4.0, [0.0, 1.0])
    assert state.scale is scale
    assert scale._version == version
    y.backward()
    assert x.grad.item() == 4.0


@pytest.mark.parametrize("late_bound", [False, True])
def test_a_step_closes_for_several_operands_at_once_each_with_its_own(late_bound: bool) -> None:
    states = [OperandState(late_bound=late_bound) for _ in range(3)]
    before = [state.scale for state in states]
    for number, state in enumerate(states):
        state.from_data = True
        state.gather(torch.tensor(float(number + 1)))
    scales = torch.tensor([2.0, 3.0, 4.0]).unbind()
    close_step(states, torch.tensor([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]), scales, [True, False, True])
    assert [state.scale.item() for state in states] == [2.0, 3.0, 4.0]
    assert [state.history.tolist() for state in states] == [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0]]
    assert [state.gathered.item() for state in states] == [0.0] * 3
    assert [state.from_data for state in states] == [False, True, False]
    assert [state.scale is scale for state, scale in zip(states, before, strict=True)] == [late_bound] * 3


def test_amaxes_gather_by_max_into_one_tensor() -> None:
    state = OperandState()
    gathered = state.gathered
    for amax in (1.0, 3.0, 2.0):
        state.gather(torch.tensor(amax))
    assert state.gathered is gathered
    assert gathered.item() == 3.0
    updated(state, 1.0, [0.0])
    assert state.gathered is gathered
    assert gathered.item() == 0.0


def test_a_scale_is_unknown_until_something_was_gathered() -> None:
    state = OperandState()
    state.measure_next()
    for gathered in (False, True):
        close_step([state], torch.zeros(1, 1), [torch.ones(())], [gathered])
        assert state.from_data != gathered
        assert state.closed_before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_are_equal_and_independent(copied) -> None:
    state = OperandState(late_bound=True)
    updated(state, 4.0, [0.0, 1.0])
    state.gather(torch.tensor(2.0))
    other = copied(state)
    for name in ("scale", "gathered", "history"):
        assert torch.equal(getattr(state, name), getattr(other, name)), name
    assert (other.late_bound, other.from_data) == (True, False)
    updated(other, 9.0, [0.0, 2.0])
    other.gather(torch.tensor(5.0))
    assert (state.scale.item(), state.gathered.item()) == (4.0, 2.0)


def test_saved_and_loaded() -> None:
    state, other = OperandState(), OperandState()
    updated(state, 0.3, [0.0, 1.0, 2.0])
    state.gather(torch.tensor(7.0))
    saved = state.saved()
    assert saved["amax_history"].tolist() == [7.0, 1.0, 2.0]
    other.load(scale=saved["scale"], history=saved["amax_history"])
    assert torch.equal(other.scale, state.scale)
    assert torch.equal(other.multiplier, 1 / torch.tensor(0.3))
    assert other.gathered.item() == 7.0
    state.gather(torch.tensor(9.0))
    assert saved["amax_history"][0].item() == 7.0, "a state dict is a copy"


def test_an_unknown_scale_is_saved_as_nan_and_stays_unknown() -> None:
    state, other = OperandState(), OperandState()
    state.measure_next()
    saved = state.saved()
    assert bool(saved["scale"].isnan())
    other.load(saved["scale"], saved["amax_history"])
    assert other.from_data
    assert other.scale.item() == 1.0


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(float("inf")), torch.ones(2)])
def test_a_wrong_scale_is_refused(scale: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="one positive finite number"):
        OperandState().load(scale, torch.zeros(1))


@pytest.mark.parametrize("history", [torch.zeros(()), torch.zeros(0), torch.zeros(2, 2)])
def test_a_wrong_history_is_refused(history: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="vector of length 1 or more"):
        OperandState().load(torch.ones(()), history)


def test_it_follows_the_device() -> None:
    state = OperandState()
    updated(state, 4.0, [0.0, 1.0])
    state.move(torch.device("cpu"))
    assert state.scale.item() == 4.0
    state.move(torch.device("meta"))
    assert state.gathered.device.type == "meta"
    state.move(torch.device("cpu"))
    assert state.scale.item() == 1.0, "usable, as new"
    assert state.history.tolist() == [0.0]


def test_a_state_built_under_inference_mode_can_train() -> None:
    with torch.inference_mode():
        state = OperandState()
        state.measure_next()
    assert not state.scale.is_inference()
    assert not state.gathered.is_inference()
