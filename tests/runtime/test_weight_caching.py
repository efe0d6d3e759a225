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


def test_contexts_that_hold_the_same_layers_are_told_apart() -> None:
    layer = octavo.Linear(32, 32, recipe=CurrentScaling())
    with octavo.cached_weights():
        with octavo.cached_weights():
            pass
        layer(torch.randn(8, 32))
        assert layer._weight_cache is not None
    assert layer._weight_cache is None
    layer(torch.randn(8, 32))
    assert layer._weight_cache is None


@pytest.mark.parametrize("explicit", [False, True])
def test_an_amax_that_was_not_gathered_when_the_codes_were_made_is_gathered_later(explicit: bool) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    layer, twin = (octavo.Linear(64, 64, bias=False) for _ in range(2))
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(16, 64)
    modes = ("refresh", "reuse") if explicit else (None, None)
    for _ in range(4):
        with nullcontext() if explicit else octavo.cached_weights():
            with torch.no_grad(), octavo.autocast(recipe=recipe):
                layer(x, cached_weight=modes[0])
            with octavo.autocast(recipe=recipe):
                layer(x, cached_weight=modes[1]).sum().backward()
        with octavo.autocast(recipe=recipe):
            twin(x).sum().backward()
    assert torch.equal(layer.delayed_state.weight.scale, twin.delayed_state.weight.scale)
    assert layer.delayed_state.weight.scale < 1e-2


def test_a_weight_of_inference_mode_is_never_served_from_old_codes() -> None:
    with torch.inference_mode():
        layer = octavo.Linear(32, 32, recipe=CurrentScaling())
        x = torch.randn(8, 32)
        with octavo.cached_weights():
            before = layer(x)
            layer.weight.mul_(3)
            layer.bias.mul_(3)
            assert torch.equal(layer(x), octavo.Linear.forward(layer, x))
            assert not torch.equal(layer(x), before)


def test_each_part_of_a_weight_is_looked_at() -> None:
    layer = octavo.MultiheadAttention(32, 4, qkv_format="bshd")
    octavo.convert(layer, CurrentScaling(), filter="all")
    x = torch.randn(2, 8, 32)

    def call(value: float) -> Tensor:
        part = {"qkv.value_weight": torch.full((32, 32), value)}
        return torch.func.functional_call(layer, part, (x,))

    with torch.no_grad():
        expected = [call(0.01 * place) for place in range(4)]
        with octavo.cached_weights():
            found = [call(0.01 * place) for place in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_recompute_of_a_calibrating_layer_gathers_nothing() -> None:
    layer = octavo.Linear(32, 32)
    with octavo.autocast(False, recipe=DelayedScaling(), calibrating=True):
        y = octavo.checkpoint(layer, torch.randn(8, 32, requires_grad=True))
    before = layer.delayed_state.input.gathered.clone()
    y.sum().backward()
    assert torch.equal(layer.delayed_state.input.gathered, before)


@pytest.mark.parametrize("name", RECIPES)
def test_calls_without_gradients_keep_the_codes_that_they_take(name: str, casts: list[int]) -> None:
    """Of one layout; a call with gradients that follows makes both, which serve those without as well."""
    model, x = converted(RECIPES[name]), torch.randn(8, 32)
    layer = model[0]
    with torch.no_grad():
        expected = model(x)
    with octavo.cached_weights():
        for _ in range(2):
            with torch.no_grad():
                assert torch.equal(model(x), expected)
        assert len(casts) == 2
        assert layer._weight_cache.operand.codes_t is None
        y = model(x)
        y.sum().backward()
        with torch.no_grad():
            model(x)
        assert len(casts) == 4
        assert layer._weight_cache.operand.codes_t is not None
    assert layer.weight.grad is not None
