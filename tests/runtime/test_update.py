"""The end of a step: exact histories and scales through layers, against the model in float64."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch
from tests.runtime.delayed_model import OperandModel
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.runtime import registered_states, set_agreement
from octavo.runtime.update import Alone

OPERANDS = ("input", "weight", "grad_output")


@pytest.fixture(autouse=True)
def _no_other_models() -> None:
    """Where ranks agree, layers of all models take part: those of other tests, too, while a cycle keeps them alive."""
    gc.collect()


def models(length: int, margin: int = 0) -> dict[str, OperandModel]:
    return {
        "input": OperandModel(length, 448.0, margin),
        "weight": OperandModel(length, 448.0, margin),
        "grad_output": OperandModel(length, 57344.0, margin),
    }


def used_scales(layer: octavo.Linear) -> dict[str, list[float]]:
    """From now on, the scale of every cast of a layer."""
    seen: dict[str, list[float]] = {name: [] for name in OPERANDS}

    def observer(operand, quantizer):
        def watched(x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False):
            out = quantizer(x, rowwise, columnwise, column_sum)
            seen[operand].append(float(out.scale if out.scale is not None else out.scale_t))
            return out

        return watched

    layer.observer = observer
    return seen


def assert_as_modelled(layer: octavo.Linear, model: dict[str, OperandModel]) -> None:
    state = layer.state_dict()
    for name in OPERANDS:
        assert state[f"{name}_scale"].item() == model[name].scale, name
        assert state[f"{name}_amax_history"].tolist() == model[name].history, name


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside the context", "backward after it"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 0), (5, 1), (64, -2)])
def test_exact_over_many_steps(length: int, margin: int, inside: bool) -> None:
    """Micro-batches merge by max; the gradient's amax joins the next update; zeros, inf, NaN and spikes included."""
    recipe = DelayedScaling(amax_history_len=length, margin=margin)
    layer, model = octavo.Linear(16, 16), models(length, margin)
    used = used_scales(layer)
    sizes = torch.exp(torch.randn(40) * 3).tolist()
    for step, size in enumerate(sizes):
        with torch.no_grad():
            layer.weight.mul_(1.05)
        batches = [torch.randn(4, 16) * size * (i + 1) for i in range(step % 3 + 1)]
        if step % 7 == 3:
            batches[0][0, 0] = float("inf")
        if step % 7 == 5:
            batches = [torch.zeros(4, 16)]
        gradients = [torch.randn(4, 16) * size * 1e-3 for _ in batches]
        if step % 5 == 4:
            gradients[0][1, 1] = float("nan")
        expected = {name: model[name].scale for name in OPERANDS}
        for seen in used.values():
            seen.clear()
        with octavo.autocast(recipe=recipe):
            outputs = [layer(x) for x in batches]
            if inside:
                for y, dy in zip(outputs, gradients, strict=True):
                    y.backward(dy)
        for x in batches:
            model["input"].gather(x)
            model["weight"].gather(layer.weight.detach())
        if inside:
            for dy in gradients:
                model["grad_output"].gather(dy)
        for operand in model.values():
            operand.update()
        if not inside:
            for y, dy in zip(outputs, gradients, strict=True):
                y.backward(dy)
                model["grad_output"].gather(dy)
        assert used["input"] == [expected["input"]] * len(batches)
        assert used["weight"] == [expected["weight"]] * len(batches)
        # After the context the gradient's scale is the one of the update that has just been made.
        gradient_scale = expected["grad_output"] if inside else model["grad_output"].scale
        assert used["grad_output"] == [gradient_scale] * len(batches)
        assert_as_modelled(layer, model)


def test_a_spike_is_remembered_for_exactly_its_length() -> None:
    length = 4
    layer = octavo.Linear(16, 16, recipe=DelayedScaling(amax_history_len=length))
    scales = []
    for size in [1.0, 1000.0] + [1.0] * 6:
        layer(torch.full((4, 16), size)).sum().backward()
        octavo.update_scales(layer)
        scales.append(layer.delayed_state.input.scale.item())
    spike, calm = (
        torch.tensor(1000.0).div(torch.tensor(448.0)).item(),
        torch.tensor(1.0).div(torch.tensor(448.0)).item(),
    )
    assert scales == [calm] + [spike] * length + [calm] * 3


def test_a_user_function_sees_the_window() -> None:
    windows: list[list[float]] = []

    def second_largest(window: Tensor) -> Tensor:
        windows.append(window.tolist())
        return window.sort().values[-2]

    layer = octavo.Linear(16, 16)
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo=second_largest)
    for size in (1.0, 2.0, 4.0):
        with octavo.autocast(recipe=recipe):
            layer(torch.full((4, 16), size))
    assert [4.0, 1.0, 2.0] in windows
    assert layer.delayed_state.input.scale == torch.tensor(2.0) / torch.tensor(448.0)


def test_case_3_stale_scale_clips_and_recovers() -> None:
    """Case 3: three steps of randn, one of randn * 1000, three more: the outlier clips, later steps recover, no NaN."""
    torch.manual_seed(3)
    layer = octavo.Linear(64, 32)
    recipe = DelayedScaling(amax_history_len=3)
    errors = []
    for size in (1, 1, 1, 1000, 1, 1, 1, 1):
        x = torch.randn(64, 64) * size
        with octavo.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
        exact = nn.functional.linear(x, layer.weight, layer.bias)
        errors.append(((y - exact).norm() / exact.norm()).item())
        assert bool(y.isfinite().all())
        assert bool(layer.weight.grad.isfinite().all())
    # The first step has scale 1 (weights below 1/8 are coarse), the fourth clips nearly everything, three are coarse
    # since the window remembers the spike: 1000 * 4 / 448 is the step of a code near 1. Right is below 5 %.
    assert errors[1] < 0.05
    assert errors[2] < 0.05
    assert errors[3] > 0.9
    assert errors[7] < 0.05


def test_gradients_of_one_step_and_amaxes_of_the_next_share_one_update() -> None:
    calls = []

    class Counting(Alone):
        def needed(self, group: object | None) -> bool:
            return True

        def reduce(self, amaxes: Tensor, group: object | None) -> Tensor:
            calls.append(amaxes.tolist())
            return amaxes

    model = nn.Sequential(octavo.Linear(16, 16), octavo.Linear(16, 16))
    from octavo.runtime import update

    before = update._Collective.agreement
    set_agreement(Counting())
    try:
        for _ in range(3):
            with octavo.autocast(recipe=DelayedScaling(amax_history_len=4)):
                y = model(torch.randn(4, 16))
            y.sum().backward()
    finally:
        set_agreement(before)
    assert len(calls) == 3, "one a step, for all operands of all layers"
    for layer in model:
        # What the last step gathered, and what the backward before it did.
        assert layer.delayed_state.input.history[-1].item() in calls[-1]
        assert layer.delayed_state.grad_output.history[-1].item() in calls[-1]


def test_update_scales_is_the_end_of_a_step_without_a_context() -> None:
    model, other = nn.Sequential(octavo.Linear(16, 16)), octavo.Linear(16, 16)
    for layer in (model[0], other):
        layer.recipe = DelayedScaling(amax_history_len=2)
        layer(torch.full((4, 16), 7.0)).sum().backward()
    octavo.update_scales(model)
    assert model[0].delayed_state.input.history.tolist() == [0.0, 7.0]
    assert model[0].delayed_state.grad_output.history.tolist() == [0.0, 1.0]
    assert other.delayed_state.input.gathered.item() == 7.0, "of another model"
    octavo.update_scales(model)
    assert model[0].delayed_state.input.history.tolist() == [0.0, 7.0], "nothing ran since: nothing changes"


def test_a_context_ends_no_step_of_layers_that_ran_outside_of_it() -> None:
    outside, inside = octavo.Linear(16, 16, recipe=DelayedScaling()), octavo.Linear(16, 16)
    outside(torch.randn(4, 16))
    gathered = outside.delayed_state.input.gathered.item()
    with octavo.autocast(recipe=DelayedScaling()):
        inside(torch.randn(4, 16))
    assert outside.delayed_state.input.gathered.item() == gathered > 0
    assert inside.delayed_state.input.gathered.item() == 0


def test_a_forgotten_update_warns_once_for_the_whole_model() -> None:
    model = nn.Sequential(*(octavo.Linear(16, 16, recipe=DelayedScaling()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    assert [str(w.message) for w in caught if "update_scales" in str(w.message)] == [str(caught[0].message)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
            octavo.update_scales(model)
        for _ in range(6):
            with octavo.autocast(recipe=DelayedScaling()):
                model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(6):
                model(torch.randn(4, 16))
                model[0].weight.mul_(0.9)


def test_layers_of_two_threads_end_their_own_steps() -> None:
    """A context of one thread is none of the other's, and neither is its end."""
    layers = [octavo.Linear(16, 16) for _ in range(2)]
    inside, done = threading.Event(), threading.Event()
    recipe = DelayedScaling(amax_history_len=4)

    def first() -> None:
        with octavo.autocast(recipe=recipe):
            layers[0](torch.full((4, 16), 3.0))
            inside.set()
            assert done.wait(60)
            layers[0](torch.full((4, 16), 2.0))

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)
    x = torch.full((4, 16), 5.0)
    assert torch.equal(layers[1](x), nn.functional.linear(x, layers[1].weight, layers[1].bias)), "FP8 is off here"
    with octavo.autocast(recipe=recipe):
        layers[1](x)
    assert layers[0].delayed_state.input.gathered.item() == 3.0
    done.set()
    thread.join()
    assert layers[0].delayed_state.input.history.tolist() == [0.0, 0.0, 0.0, 3.0]
    assert layers[1].delayed_state.input.history.tolist() == [0.0, 0.0, 0.0, 5.0]


def test_layers_built_by_many_threads_are_all_registered() -> None:
    built: list[octavo.Linear] = []

    def build() -> None:
        built.extend(octavo.Linear(4, 4) for _ in range(50))

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = {id(state) for state in registered_states()}
    assert len(built) == 400
    assert all(id(layer.delayed_state) in known for layer in built)


def test_the_registry_holds_no_layer_alive() -> None:
    layer = octavo.Linear(4, 4)
    state = id(layer.delayed_state)
    assert state in {id(s) for s in registered_states()}
    del layer
    gc.collect()
    assert state not in {id(s) for s in registered_states()}


@pytest.mark.parametrize("recipe", [CurrentScaling(), RowwiseScaling()])
def test_other_recipes_leave_the_state_alone(recipe) -> None:
    layer = octavo.Linear(16, 16)
    with octavo.autocast(recipe=recipe):
        layer(torch.randn(4, 16)).sum().backward()
    assert layer.delayed_state.recipe is None
    assert layer.delayed_state.input.gathered.item() == 0
    assert not any("amax" in key for key in layer.state_dict())


@pytest.mark.parametrize("own", [False, True], ids=["context", "update_scales"])
def test_scales_start_from_the_first_batch_if_told_so(own: bool) -> None:
    recipe = DelayedScaling(initialise_from_first_batch=True, amax_history_len=8)
    layer = octavo.Linear(32, 16, recipe=recipe if own else None)
    used = used_scales(layer)
    amaxes, gradients = [], []
    for size in (1000.0, 10.0, 1.0):
        x, dy = torch.randn(8, 32) * size, torch.randn(8, 16) * size
        amaxes.append(x.abs().max())
        gradients.append(dy.abs().max())
        if own:
            layer(x).backward(dy)
            octavo.update_scales(layer)
        else:
            with octavo.autocast(recipe=recipe):
                y = layer(x)
            y.backward(dy)
    largest, steepest = torch.tensor(448.0), torch.tensor(57344.0)

    def measured(amax: Tensor, limit: Tensor) -> float:
        one = torch.ones(())
        return float(one / (limit / amax))

    assert used["input"] == [measured(amaxes[0], largest)] + [(amaxes[0] / largest).item()] * 2
    first = measured(gradients[0], steepest)
    if own:
        assert used["grad_output"] == [first] + [(gradients[0] / steepest).item()] * 2
    else:
        # Measured until a gradient was there to remember: the second backward belongs to the second forward, which
        # still began without one.
        assert used["grad_output"] == [first, measured(gradients[1], steepest), (gradients[0] / steepest).item()]


def test_a_model_without_a_layer_of_octavos_is_not_updated_in_silence() -> None:
    with pytest.warns(UserWarning, match=r"this Sequential holds no layer of Octavo's, .*octavo\.convert"):
        octavo.update_scales(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(TypeError, match=r"octavo\.update_scales: model is a list: expected an nn\.Module"):
        octavo.update_scales([octavo.Linear(4, 4)])  # type: ignore[arg-type]
    # A loop that serves all recipes may call it with each of them.
    octavo.update_scales(octavo.Linear(4, 4, recipe=octavo.recipes.CurrentScaling()))
