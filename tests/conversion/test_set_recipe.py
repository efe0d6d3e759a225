"""set_recipe: the loss of a run has no jump where the recipe changes, and the state of delayed scaling follows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.conversion.switched_runs import GAIN, Network, jump, train
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

DELAYED, CURRENT = DelayedScaling(amax_history_len=16), CurrentScaling()
ORDERS: dict[str, dict[int, Recipe | None]] = {
    "delayed, bf16, current": {0: DELAYED, 50: None, 100: CURRENT},
    "current, delayed, bf16": {0: CURRENT, 50: DELAYED, 100: None},
    "row, bf16, delayed": {0: RowwiseScaling(), 50: None, 100: DELAYED},
}
# Of normal changes, whose spread is estimated from 25 of them, one in two thousand lies further out.
SPREAD = 4.0


@pytest.mark.parametrize("order", ORDERS)
def test_no_jump_of_the_loss_at_a_switch(order: str) -> None:
    losses = train(ORDERS[order])
    assert losses[-1] < 0.05 * losses[0]
    for step in (50, 51, 100, 101):
        assert jump(losses, step) < SPREAD, f"step {step}: {losses[step - 3 : step + 2]}"


def test_a_switch_that_does_not_measure_is_seen_as_a_jump() -> None:
    """What the bound is good for: the same run where scales begin at 1."""

    def without_measuring(model: nn.Module, recipe: Recipe | None) -> None:
        for module in model.modules():
            if isinstance(module, octavo.Linear):
                module.recipe = recipe
                for operand in module.delayed_state.operands:
                    operand.reset()
                    operand.from_data = False

    losses = train(ORDERS["current, delayed, bf16"], switch=without_measuring)
    assert jump(losses, 50) > SPREAD


@pytest.mark.parametrize("order", ["delayed, bf16, current", "current, delayed, bf16"])
def test_compiled_runs_switch_to_the_same_bits_with_a_graph_a_recipe(order: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    losses = train(ORDERS[order], counter)
    assert losses == train(ORDERS[order])
    # One a recipe, and one while scales are not known.
    assert counter.frame_count <= 4


def test_going_to_and_fro_compiles_nothing_anew() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = Network()
    octavo.convert(model, DELAYED)
    run = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for _ in range(5):
        for recipe in (DelayedScaling(amax_history_len=16), None, CurrentScaling()):
            octavo.set_recipe(model, recipe)
            for _ in range(3):
                run(torch.randn(8, 32)).sum().backward()
                octavo.update_scales(model)
        counts.append(counter.frame_count)
    assert counts[0] <= 4
    assert counts[1:] == counts[:1] * 4


def test_high_precision_is_plain_torch_to_the_bit_and_fp8_comes_back() -> None:
    model = Network()
    plain, x = copy.deepcopy(model), torch.randn(8, 32)
    octavo.convert(model, CURRENT)
    names = octavo.set_recipe(model, None)
    assert names == ["q_proj", "k_proj", "v_proj", "up", "down"]
    with octavo.count_gemms() as counted:
        assert torch.equal(model(x), plain(x))
    assert counted.fp8 == 0
    octavo.set_recipe(model, RowwiseScaling())
    with octavo.count_gemms() as counted:
        model(x).sum().backward()
    assert counted.fp8 == 15


def step(model: nn.Module, size: float = 1.0) -> None:
    model(size * torch.randn(8, 32)).sum().backward()
    octavo.update_scales(model)


def linear_and_amax(recipe: Recipe) -> Any:
    model = nn.Sequential(nn.Linear(32, 16))
    octavo.convert(model, recipe)
    return model, lambda: model[0].delayed_state.input.scale.item() * 448


def test_histories_go_on_from_one_delayed_recipe_to_another() -> None:
    model, provided = linear_and_amax(DELAYED)
    step(model, 1000.0)
    before = provided()
    octavo.set_recipe(model, DelayedScaling(amax_history_len=4))
    for _ in range(3):
        step(model)
        assert provided() == pytest.approx(before)
    step(model)
    step(model)
    assert provided() < before / 100


def test_histories_begin_anew_after_a_phase_without_them() -> None:
    for between in (None, CURRENT):
        model, provided = linear_and_amax(DELAYED)
        step(model, 1000.0)
        octavo.set_recipe(model, between)
        step(model, 1000.0)
        assert sorted(model.state_dict()) == ["0.bias", "0.weight"]
        octavo.set_recipe(model, DELAYED)
        assert model[0].delayed_state.input.from_data
        step(model)
        assert provided() < 10


def test_what_a_checkpoint_brought_is_kept() -> None:
    model, _ = linear_and_amax(DELAYED)
    step(model, GAIN)
    saved = model.state_dict()
    resumed, provided = linear_and_amax(CURRENT)
    resumed.load_state_dict(saved)
    octavo.set_recipe(resumed, DELAYED)
    assert not resumed[0].delayed_state.input.from_data
    assert provided() > GAIN


def test_an_equal_recipe_changes_nothing() -> None:
    model, _ = linear_and_amax(DELAYED)
    step(model)
    before, recipe = copy.deepcopy(model.state_dict()), model[0].recipe
    octavo.set_recipe(model, DelayedScaling(amax_history_len=16))
    assert model[0].recipe is recipe
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_overrides_hold_and_what_convert_left_stays() -> None:
    model = Network()
    octavo.convert(model, CURRENT, exclude="up")
    octavo.set_recipe(model, DelayedScaling(overrides={"k_proj": None, "down": CURRENT}))
    assert type(model.up) is nn.Linear
    assert [getattr(model, name).recipe for name in ("k_proj", "down")] == [None, CURRENT]
    assert not model.q_proj.delayed_state.shares_input
    assert model.q_proj.delayed_state.input is not model.v_proj.delayed_state.input
    for _ in range(2):
        step(model)
    # The next recipe has no overrides; siblings share their input again.
    octavo.set_recipe(model, DELAYED)
    assert [getattr(model, name).recipe for name in ("q_proj", "k_proj", "down")] == [DELAYED] * 3
    assert model.q_proj.delayed_state.input is model.v_proj.delayed_state.input
    for _ in range(2):
        step(model)


@pytest.mark.parametrize("inner", [False, True], ids=["as it was converted", "within another"])
def test_an_override_that_matches_no_layer_is_told_and_one_of_a_layer_left_out_is_not(inner: bool) -> None:
    model = Network()
    octavo.convert(model, CurrentScaling(overrides={"^up$": None}))
    given = nn.Sequential(model) if inner else model
    with pytest.warns(UserWarning, match=r"octavo\.set_recipe: the pattern 'dwon' matched no linear layer") as told:
        octavo.set_recipe(given, CurrentScaling(overrides={"up$": None, "^k_proj$": None, "dwon": None}))
    assert len(told) == 1
    assert told[0].filename == __file__
    assert model.k_proj.recipe is None


def test_a_sibling_that_leaves_takes_no_history_with_it() -> None:
    model = Network()
    octavo.convert(model, DELAYED)
    step(model, 1.0)
    before = model.q_proj.delayed_state.input.scale.item()
    assert before > 1
    octavo.set_recipe(model, DelayedScaling(amax_history_len=16, overrides={"k_proj": None}))
    assert [getattr(model, name).delayed_state.input.from_data for name in ("q_proj", "k_proj")] == [False, True]
    assert model.q_proj.delayed_state.input.scale.item() == before


def test_octavos_own_layers_and_unconvert() -> None:
    model = nn.Sequential(octavo.TransformerLayer(32, 64, 2), nn.Linear(32, 32))
    octavo.convert(model, DELAYED)
    octavo.set_recipe(model, None)
    octavo.set_recipe(model, CURRENT)
    model(torch.randn(4, 2, 32)).sum().backward()
    octavo.unconvert(model)
    assert type(model[1]) is nn.Linear
    assert "takes_recipes" not in model[1].__dict__
    with pytest.raises(ValueError, match=r"no layer of this Sequential has a recipe: octavo.convert"):
        octavo.set_recipe(nn.Sequential(nn.Linear(4, 4)), None)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    model, _ = linear_and_amax(DELAYED)
    with pytest.raises(ValueError, match="recipe is 'fp8'"):
        octavo.set_recipe(model, "fp8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"octavo.set_recipe: model is a list"):
        octavo.set_recipe([model], None)  # type: ignore[arg-type]
    assert model[0].recipe is DELAYED
