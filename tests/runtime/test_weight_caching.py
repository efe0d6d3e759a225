"""cached_weights: one cast a weight and step, the same numbers, and nothing kept afterwards."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

LINEAR = importlib.import_module("octavo.modules.linear")
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Weights that were cast to be kept."""
    made: list[int] = []
    real = LINEAR.quantize_weight

    def counted(weight: Tensor, *arguments: object) -> object:
        made.append(1)
        return real(weight, *arguments)

    monkeypatch.setattr(LINEAR, "quantize_weight", counted)
    return made


def converted(recipe: Recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))
    octavo.convert(model, recipe, filter="all")
    return model


def step(model: nn.Module, batches: Tensor, cached: bool, checkpointed: bool = False) -> list[Tensor]:
    """Gradients after all micro-batches, and the outputs."""
    model.zero_grad()
    outputs = []
    with octavo.cached_weights() if cached else nullcontext():
        for x in batches:
            y = octavo.checkpoint(model, x) if checkpointed else model(x)
            y.square().mean().backward()
            outputs.append(y.detach())
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", RECIPES)
def test_micro_batches_cast_each_weight_once_and_give_the_same(name: str, casts: list[int]) -> None:
    model = converted(RECIPES[name])
    twin, data = copy.deepcopy(model), torch.randn(3, 4, 8, 32)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin)]
    for batches in data:
        found = step(twin, batches, cached=True)
        assert all(torch.equal(a, b) for a, b in zip(step(model, batches, cached=False), found, strict=True))
        for optimizer, one in zip(optimizers, (model, twin), strict=True):
            optimizer.step()
            octavo.update_scales(one)
    assert len(casts) == 2 * len(data), "two layers, and one cast a step"
    for layer in (twin[0], twin[2]):
        assert layer._weight_cache is None


def test_a_weight_that_changes_within_is_cast_anew(casts: list[int]) -> None:
    model = converted(CurrentScaling())
    x = torch.randn(8, 32)
    with octavo.cached_weights():
        before = model(x)
        with torch.no_grad():
            model[0].weight.mul_(3)
        assert not torch.equal(model(x), before)
    assert len(casts) == 3


def test_a_recomputation_takes_the_kept_scale(casts: list[int]) -> None:
    """Scales move between the micro-batches; the weight keeps the codes, and the scale, of the first."""
    gradients = []
    for checkpointed in (False, True):
        model = converted(DelayedScaling(amax_history_len=4))
        step(model, torch.randn(2, 8, 32), cached=False)
        octavo.update_scales(model)
        torch.manual_seed(1)
        gradients.append(step(model, torch.randn(3, 8, 32), cached=True, checkpointed=checkpointed))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_contexts_nest_and_end_with_an_exception(casts: list[int]) -> None:
    model = converted(CurrentScaling())
    x = torch.randn(8, 32)

    def nested() -> None:
        with octavo.cached_weights():
            with octavo.cached_weights():
                model(x)
            assert model[0]._weight_cache is None
            model(x)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        nested()
    assert model[0]._weight_cache is None
    model(x)
    assert len(casts) == 4, "and outside nothing is kept"


def test_high_precision_and_compiled_code_go_on_as_without() -> None:
    model = converted(CurrentScaling())
    x = torch.randn(8, 32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = model(x)
    with octavo.cached_weights():
        assert torch.equal(compiled(x), expected)
        with octavo.autocast(enabled=False):
            assert not torch.equal(model(x), expected)


def test_an_explicit_refresh_casts_within_too(casts: list[int]) -> None:
    layer = octavo.Linear(32, 16, recipe=CurrentScaling())
    with octavo.cached_weights():
        for _ in range(2):
            layer(torch.randn(8, 32), cached_weight="refresh")
    assert len(casts) == 2
