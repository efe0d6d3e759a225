"""`te.make_graphed_callables`: TE's settings reach Octavo's, and what is not built says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import octavo.compat.transformer_engine.pytorch as te
from octavo.compat.transformer_engine.pytorch import cuda_graphs
from octavo.compat.transformer_engine.recipe import DelayedScaling, Float8CurrentScaling
from octavo.runtime.autocast import current_frame

RECIPE = DelayedScaling(amax_history_len=4)


class Called:
    """Stands for the function that captures: notes its arguments and what is in force."""

    def __init__(self) -> None:
        self.arguments: tuple[Any, ...] = ()
        self.enabled = False
        self.recipe: Any = None
        self.group: Any = None

    def __call__(self, *arguments: Any) -> str:
        frame = current_frame()
        assert frame is not None
        self.arguments, self.enabled, self.recipe, self.group = arguments, frame.enabled, frame.recipe, frame.group
        return "graphed"


@pytest.fixture
def octavos(monkeypatch: pytest.MonkeyPatch) -> Called:
    called = Called()
    monkeypatch.setattr(cuda_graphs, "octavo_make_graphed_callables", called)
    return called


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Called:
    called = Called()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", called)
    return called


@pytest.mark.parametrize("prefix", ["", "fp8_"])
def test_settings_reach_the_capture_by_either_name(prefix: str, octavos: Called, torchs: Called) -> None:
    layer, group = te.Linear(32, 32, device="cpu"), object()
    settings = {
        f"{prefix}enabled": True,
        f"{prefix}recipe": RECIPE,
        "fp8_group" if prefix else "amax_reduction_group": group,
    }
    x = torch.randn(4, 32)
    assert te.make_graphed_callables(layer, (x,), 5, allow_unused_input=True, pool=7, **settings) == "graphed"
    assert octavos.arguments == (layer, (x,), 5, True, 7)
    assert octavos.enabled
    assert octavos.recipe.delayed.amax_history_len == 4
    assert octavos.group is group
    assert torchs.arguments == ()
    assert current_frame() is None


def test_without_fp8_it_is_torchs(octavos: Called, torchs: Called) -> None:
    layer, x = te.Linear(32, 32, device="cpu"), torch.randn(4, 32)
    te.make_graphed_callables(layer, (x,))
    assert torchs.arguments == (layer, (x,), 3, False, None)
    assert not torchs.enabled
    assert octavos.arguments == ()


def test_the_default_recipe_is_that_of_the_device(octavos: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    te.make_graphed_callables(te.Linear(32, 32, device="cpu"), (torch.randn(4, 32),), enabled=True)
    with te.autocast():
        frame = current_frame()
        assert frame is not None
        assert octavos.recipe == frame.recipe
    te.make_graphed_callables(None, (), enabled=True, recipe=Float8CurrentScaling())
    assert octavos.recipe.delayed is None


@pytest.mark.parametrize(
    "settings",
    [
        {"calibrating": True},
        {"fp8_weight_caching": True},
        {"sample_kwargs": {"mask": None}},
        {"sample_kwargs": ({}, {"mask": None})},
        {"_order": [1, -1]},
        {"retain_graph_in_backward": True},
    ],
    ids=str,
)
def test_what_is_not_built_names_itself(settings: dict[str, Any], octavos: Called) -> None:
    name = {"fp8_weight_caching": "cache_quantized_params"}.get(next(iter(settings)), next(iter(settings)))
    with pytest.raises(NotImplementedError, match=name):
        te.make_graphed_callables(None, (), enabled=True, **settings)
    assert octavos.arguments == ()


def test_defaults_of_what_is_not_built_are_taken(octavos: Called) -> None:
    off = {"calibrating": False, "sample_kwargs": ({}, {}), "_order": None, "retain_graph_in_backward": False}
    assert te.make_graphed_callables(None, (), enabled=True, **off) == "graphed"


def test_unknown_settings_and_two_names_are_refused(octavos: Called) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'fp8'"):
        te.make_graphed_callables(None, (), fp8=True)
    with pytest.raises(TypeError, match="enabled and fp8_enabled"):
        te.make_graphed_callables(None, (), enabled=True, fp8_enabled=False)
