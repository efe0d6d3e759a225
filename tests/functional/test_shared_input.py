"""Layers on one input quantize it once, and what they compute stays the same to the bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import shared_input
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.tensor import block_quantizer, quantizer

RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling(), RowwiseScaling(), BlockScaling()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all casts."""
    shapes: list[tuple[int, ...]] = []

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            shapes.append(tuple(x.shape))
            return real(x, *args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    count(quantizer, "cast_transpose")
    count(block_quantizer, "block_cast")
    return shapes


def converted(recipe: Recipe) -> Attention:
    torch.manual_seed(0)
    model = Attention()
    octavo.convert(model, recipe=recipe, filter="all")
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_query_key_and_value_cast_their_input_once(
    recipe: Recipe, dtype: torch.dtype | None, casts: list[tuple[int, ...]]
) -> None:
    together, apart = converted(recipe), converted(recipe)
    for step in range(3):
        x = torch.randn(8, 4, 32) * (step + 1)
        outs = []
        for model, separate in ((together, False), (apart, True)):
            casts.clear()
            inner = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                if separate:
                    parts = (model.q_proj(inner), model.k_proj(inner * 1), model.v_proj(inner * 1))
                    y = torch.cat(parts, -1)
                else:
                    y = model(inner)
            assert casts.count((32, 32)) - 1 == (3 if separate else 1)  # less the weight of q_proj, of the same shape
            y.float().square().sum().backward()
            octavo.update_scales(model)
            outs.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
        for a, b in zip(*outs, strict=True):
            assert torch.equal(a, b)


def test_a_layer_that_runs_again_on_the_same_tensor_quantizes_it_again(casts: list[tuple[int, ...]]) -> None:
    layer = octavo.Linear(32, 16, recipe=CurrentScaling())
    x = torch.randn(8, 32)
    first = layer(x)
    x.data.mul_(100)  # no version counter tells of it
    second = layer(x)
    assert casts.count((8, 32)) == 2
    assert (second - layer.bias).norm() > 50 * (first - layer.bias).norm()


def test_an_input_that_was_written_to_in_between_is_quantized_again(casts: list[tuple[int, ...]]) -> None:
    a, b = (octavo.Linear(32, 16, recipe=CurrentScaling()) for _ in range(2))
    b.recipe = a.recipe
    x = torch.randn(8, 32)
    a(x)
    x.mul_(2)
    b(x)
    assert casts.count((8, 32)) == 2


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=lambda recipe: type(recipe).__name__)
def test_layers_with_another_spec_or_state_share_nothing(recipe: Recipe, casts: list[tuple[int, ...]]) -> None:
    other = recipe if recipe.delayed is not None else CurrentScaling(power_of_two_scales=True)
    a, b = octavo.Linear(32, 16, recipe=recipe), octavo.Linear(32, 16, recipe=other)
    x = torch.randn(8, 32)
    a(x)
    b(x)
    assert casts.count((8, 32)) == 2


def test_an_evaluation_before_a_training_has_codes_in_one_layout_only(casts: list[tuple[int, ...]]) -> None:
    a, b = octavo.Linear(32, 16, recipe=(recipe := CurrentScaling())), octavo.Linear(32, 16, recipe=recipe)
    x = torch.randn(8, 32)
    with torch.no_grad():
        a(x)
    b(x).sum().backward()
    assert casts.count((8, 32)) == 2


def test_the_codes_go_with_the_input() -> None:
    layer = octavo.Linear(32, 16, recipe=CurrentScaling())
    x = torch.randn(8, 32)
    with torch.no_grad():
        layer(x)
    assert shared_input._LAST.made is not None
    del x
    gc.collect()
    assert shared_input._LAST.made is None
