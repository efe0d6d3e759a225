"""A training with `octavo.autocast` in a process without any FP8 layer is told, and nothing else is.

(Warnings are errors here, so that whatever says nothing has said nothing.)
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import octavo
import octavo.compat.transformer_engine.pytorch as te
from octavo.recipes import CurrentScaling, DelayedScaling
from octavo.runtime import layer_state

RECIPE = CurrentScaling()
MESSAGE = (
    r"octavo\.autocast: CurrentScaling changed nothing: no FP8 layer .* Call octavo\.convert\(model, recipe\) once"
)


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_state, "_REGISTRY", [])


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def trained(model: nn.Module, **arguments: Any) -> None:
    with octavo.autocast(**{"recipe": RECIPE, **arguments}):
        y = model(torch.ones(2, 16))
    y.sum().backward()


def test_a_plain_model_is_told_where_the_context_is_left_and_once_a_line() -> None:
    model = plain()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with octavo.autocast(recipe=RECIPE):
                y = model(torch.ones(2, 16))
            y.sum().backward()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match=MESSAGE):
        trained(model)


def test_what_it_advises_helps() -> None:
    model = plain()
    octavo.convert(model, RECIPE)
    trained(model)
    with octavo.count_gemms() as counted:
        trained(model)
    assert counted.fp8 == 5


def test_without_a_recipe_it_is_current_scaling_that_changed_nothing() -> None:
    with pytest.warns(UserWarning, match=MESSAGE), octavo.autocast():
        plain()(torch.ones(2, 16))


def test_a_plain_model_compiled_is_told_as_well() -> None:
    model = torch.compile(plain(), backend="eager", fullgraph=True)
    for _ in range(2):
        with pytest.warns(UserWarning, match=MESSAGE):
            trained(model)


def test_nested_contexts_tell_once() -> None:
    model = plain()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with octavo.autocast(recipe=DelayedScaling()), octavo.autocast(recipe=RECIPE):
            trained(model)
    assert [str(one.message).split()[1] for one in caught] == ["DelayedScaling"]
    with pytest.warns(UserWarning, match=MESSAGE), octavo.autocast(enabled=False):
        trained(model)


def test_transformer_engines_context_tells_too() -> None:
    with pytest.warns(UserWarning, match=r"octavo\.autocast: \w+ changed nothing") as caught, te.fp8_autocast():
        plain()(torch.ones(2, 16))
    assert caught[0].filename == __file__


def with_an_error(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), octavo.autocast(recipe=RECIPE):
        model(torch.ones(2, 17) * model[0].weight.sum())


def evaluated(model: nn.Module) -> None:
    with torch.no_grad(), octavo.autocast(recipe=RECIPE):
        model(torch.ones(2, 16))
    with octavo.autocast(recipe=RECIPE), torch.inference_mode():
        model(torch.ones(2, 16))


def empty(model: nn.Module) -> None:
    with octavo.autocast(recipe=RECIPE):
        pass


def building(model: nn.Module) -> None:
    with octavo.autocast(recipe=RECIPE):
        built = plain()
        copy.deepcopy(built).load_state_dict(built.state_dict())


def layers_inside(model: nn.Module) -> None:
    """Gone before the context is left."""
    with octavo.autocast(recipe=RECIPE):
        octavo.Linear(16, 16)(torch.ones(2, 16))


def a_layer_that_is_gone(model: nn.Module) -> None:
    octavo.Linear(16, 16)
    trained(model)


def compiled_context(model: nn.Module) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        with octavo.autocast(recipe=RECIPE):
            return model(x)

    torch.compile(run, backend="eager", fullgraph=True)(torch.ones(2, 16)).sum().backward()


QUIET: dict[str, Callable[[Any], Any]] = {
    "off": lambda model: trained(model, enabled=False),
    "off inside": lambda model: trained(model, enabled=False, calibrating=True),
    "error": with_an_error,
    "layers inside": layers_inside,
    "a layer before": a_layer_that_is_gone,
    "compiled context": compiled_context,
}


@pytest.mark.parametrize("what", QUIET)
def test_nothing_is_said_of(what: str) -> None:
    QUIET[what](plain())


@pytest.mark.parametrize("what", [empty, building, evaluated])
def test_nothing_is_said_where_nothing_was_trained(what: Callable[[Any], Any]) -> None:
    with ThreadPoolExecutor(1) as a_new_thread:
        a_new_thread.submit(what, plain()).result()


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_nothing_is_said_of_a_converted_model(compiles: bool) -> None:
    model: Any = plain()
    octavo.convert(model, RECIPE)
    if compiles:
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        trained(model)


@pytest.mark.gpu
def test_nothing_is_said_of_replays() -> None:
    model = plain().cuda()
    octavo.convert(model, RECIPE, filter="all")
    x = torch.ones(32, 16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with octavo.autocast(recipe=RECIPE):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.synchronize()
    with octavo.autocast(recipe=RECIPE), torch.cuda.graph(graph):
        model(x).sum().backward()
    with octavo.autocast(recipe=RECIPE):
        graph.replay()
