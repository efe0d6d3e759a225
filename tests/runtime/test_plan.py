"""The plan of a layer's call: kept from one call to the next, and made anew for whatever it depends on."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import LayerState, layer_call, plan_linear

DELAYED = DelayedScaling(amax_history_len=3)
RECIPES: list[Recipe] = [DELAYED, CurrentScaling(), RowwiseScaling()]


def planned(state: LayerState, recipe: Recipe, name: str = "layer", observer: Any = None) -> Any:
    return plan_linear(layer_call(state, recipe, name), state, name, observer)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_the_same_call_has_the_same_plan_and_another_one_another(recipe: Recipe) -> None:
    state = LayerState()
    plan = planned(state, recipe)
    assert planned(state, recipe) is plan
    assert planned(state, recipe, name="other") is not plan
    plan = planned(state, recipe)
    wrapped = planned(state, recipe, observer=lambda operand, quantizer: (operand, quantizer))
    assert wrapped.input == ("input", wrapped.input[1])
    assert planned(state, recipe).input != wrapped.input
    with octavo.count_gemms() as count:
        assert planned(state, recipe).counter is count
    assert planned(state, recipe).counter is None


def test_each_count_counts_its_own_calls_of_one_layer() -> None:
    layer, x = octavo.Linear(16, 16, recipe=CurrentScaling()), torch.randn(4, 16)
    layer(x)
    for calls in (1, 2):
        with octavo.count_gemms() as count:
            for _ in range(calls):
                layer(x)
        assert count.fp8 == calls


def test_a_recipe_in_force_makes_its_own_plan() -> None:
    state = LayerState()
    specs = []
    for recipe in (*RECIPES, DelayedScaling(amax_history_len=3, format=octavo.E4M3), *RECIPES):
        plan = planned(state, recipe)
        assert plan.weight_spec == recipe.linear.weight
        assert plan.grad_output.spec == recipe.linear.grad_output
        assert plan.accumulate == recipe.accumulate
        specs.append(plan)
    assert len({id(plan) for plan in specs}) == len(specs)


def test_a_backward_casts_in_its_own_format_whatever_ran_since() -> None:
    """A scale for E5M2 would have E4M3 saturate at 1/128 of the gradient."""
    layer, x = octavo.Linear(16, 16, recipe=DelayedScaling(format=octavo.E4M3)), torch.full((4, 16), 3.0)
    gradients = []
    for between in (False, False, True):
        y = layer(x)
        if between:
            with octavo.autocast(recipe=DelayedScaling(format=octavo.E5M2)), torch.no_grad():
                layer(x)
        layer.zero_grad()
        (7 * y).sum().backward()
        gradients.append(layer.weight.grad.clone())  # type: ignore[union-attr]
        octavo.update_scales(layer)
    assert torch.equal(gradients[2], gradients[1])


def test_with_and_without_gradients_a_delayed_plan_notes_apart() -> None:
    """A validation between a forward and its checkpoint's recompute leaves what the forward noted."""
    layer, x = octavo.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    with octavo.autocast(recipe=DELAYED):
        layer(x)
        first = layer.delayed_state.used.repeats.input.scale.clone()
        with torch.no_grad():
            layer.delayed_state.input.scale = torch.tensor(9.0)
            layer(x)
    assert torch.equal(layer.delayed_state.used.repeats.input.scale, first)
    assert layer.delayed_state.used_without_grad.repeats.input.scale.item() == 9.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_plans_for_itself(copied: Any) -> None:
    layer, x = octavo.Linear(16, 16), torch.full((4, 16), 3.0)
    with octavo.autocast(recipe=DELAYED):
        layer(x)
    other = copied(layer)
    with octavo.autocast(recipe=DELAYED):
        other(2 * x)
    assert layer.delayed_state.input.history.tolist() == [0.0, 0.0, 3.0]
    assert other.delayed_state.input.history.tolist() == [0.0, 3.0, 6.0]


def test_threads_that_use_one_layer_take_their_own_plans() -> None:
    """Each thread has a recipe of its own, and its results are those of that recipe, whatever the others do."""
    torch.manual_seed(0)
    layer, x = octavo.Linear(64, 32), torch.randn(8, 64) * torch.exp2(torch.randint(-9, 9, (8, 1)).float())
    recipes = [CurrentScaling(), RowwiseScaling(), CurrentScaling(power_of_two_scales=True)]

    def run(recipe: Recipe) -> torch.Tensor:
        with torch.no_grad(), octavo.autocast(recipe=recipe):
            return layer(x)

    expected = [run(recipe) for recipe in recipes]
    assert len({tuple(y.flatten().tolist()) for y in expected}) == 3
    wrong: list[int] = []

    def repeat(number: int) -> None:
        wrong.extend(number for _ in range(200) if not torch.equal(run(recipes[number]), expected[number]))

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=lambda recipe: type(recipe).__name__)
def test_a_layers_state_goes_with_the_layer(recipe: Recipe) -> None:
    """By its last reference: ranks that still knew the states of a model that is gone would not agree on amaxes."""
    layer = octavo.Linear(16, 16, recipe=recipe)
    x = torch.randn(4, 16)
    layer(x).sum().backward()
    octavo.update_scales(layer)
    layer(x)
    state = weakref.ref(layer.delayed_state)
    gc.disable()
    try:
        del layer
        assert state() is None
    finally:
        gc.enable()


def test_whatever_decides_on_a_call_decides_anew_when_it_changes() -> None:
    """The calls in turn, each right after another one, are those of layers that never ran otherwise."""
    delayed, other = DELAYED, DelayedScaling(amax_history_len=3, format=octavo.E4M3)
    first = DelayedScaling(amax_history_len=3, initialise_from_first_batch=True)

    def enter(way: str) -> Any:
        return {
            "own": contextlib.nullcontext,
            "context": lambda: octavo.autocast(recipe=delayed),
            "other context": lambda: octavo.autocast(recipe=other),
            "current": lambda: octavo.autocast(recipe=CurrentScaling()),
            "off": lambda: octavo.autocast(enabled=False),
            "calibrating": lambda: octavo.autocast(enabled=False, recipe=delayed, calibrating=True),
            "no grad": torch.no_grad,
        }[way]()

    ways = ["own", "context", "other context", "current", "off", "calibrating", "no grad"]

    def decided(call: Any) -> Any:
        return call.recipe, call.gather, call.repeats, call.from_data, call.used is None

    state = LayerState()
    for before, way in itertools.product(ways, repeat=2):
        for one in (before, way, way):
            with enter(one):
                call = layer_call(state, delayed, "layer")
        with enter(way):
            assert decided(call) == decided(layer_call(LayerState(), delayed, "layer")), (before, way)
        assert layer_call(state, None, "layer").recipe is None, "another recipe of its own"
    state = LayerState()
    assert layer_call(state, first, None).from_data == (True, True, True)
    state.input.from_data = False
    assert layer_call(state, first, None).from_data == (False, True, True)
    named = delayed.replaced(overrides={"high": None})
    assert [layer_call(state, named, name).recipe for name in ("low", "high", "low")] == [named, None, named]
