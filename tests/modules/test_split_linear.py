"""Linear layers with a weight in parts give the bits of the same layers with one weight, states and caches included."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.modules.split_linear import LayerNormSplitLinear, SplitLinear
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

PARTS = {"query": 48, "key": 16, "value": 16}
RECIPES: list[Recipe | None] = [None, DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()]


def pair(normed: bool, bias: bool = True) -> tuple[Any, Any]:
    """A layer in parts, and one with the same numbers as one weight."""
    kind, whole_kind = (LayerNormSplitLinear, octavo.LayerNormLinear) if normed else (SplitLinear, octavo.Linear)
    layer, whole = kind(32, PARTS, bias), whole_kind(32, 80, bias)
    with torch.no_grad():
        whole.weight.copy_(layer.weight)
        if bias:
            whole.bias.copy_(layer.bias)
    return layer, whole


def run(layer: nn.Module, x: Tensor, dy: Tensor, recipe: Recipe | None, **call: Any) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    with octavo.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **call)
    y.backward(dy)
    return y, x.grad  # type: ignore[return-value]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_parts_are_the_rows_of_one_weight(recipe: Recipe | None, normed: bool, bias: bool) -> None:
    layer, whole = pair(normed, bias)
    for _ in range(3):
        x, dy = torch.randn(20, 32), torch.randn(20, 80)
        for one, other in zip(run(layer, x, dy, recipe), run(whole, x, dy, recipe), strict=True):
            assert torch.equal(one, other)
    for kind in ("weight", "bias") if bias else ("weight",):
        joined = torch.cat([getattr(layer, f"{name}_{kind}").grad for name in PARTS])
        assert torch.equal(joined, getattr(whole, kind).grad)
    states = [
        {name: value for name, value in each.state_dict().items() if "scale" in name or "amax" in name}
        for each in (layer, whole)
    ]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert bool(states[0]) == isinstance(recipe, DelayedScaling)


def test_each_part_has_its_name_in_the_state_dict() -> None:
    names = [f"{part}_{kind}" for part in PARTS for kind in ("weight", "bias")]
    assert list(SplitLinear(32, PARTS).state_dict()) == names
    assert list(LayerNormSplitLinear(32, PARTS).state_dict()) == ["layer_norm_weight", "layer_norm_bias", *names]


def test_each_part_is_drawn_as_a_linear_of_its_own() -> None:
    torch.manual_seed(3)
    layer = SplitLinear(32, PARTS)
    # kaiming_uniform of nn.Linear: up to 1 / sqrt(inputs), whatever the number of outputs.
    for name in PARTS:
        for parameter in (getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_bias")):
            assert parameter.abs().max() <= 32**-0.5
            assert parameter.abs().max() > 0.7 * 32**-0.5
    before = layer.query_weight.detach().clone()
    layer.reset_parameters()
    assert not torch.equal(layer.query_weight, before)


@pytest.mark.parametrize("change", ["in place", "optimizer", "data", "load"])
def test_a_cached_weight_is_used_again_until_any_part_changes(change: str) -> None:
    layer, _ = pair(False)
    x, dy, recipe = torch.randn(20, 32), torch.randn(20, 80), CurrentScaling()
    first = run(layer, x, dy, recipe, cached_weight="refresh")
    kept = layer._weight_cache
    again = run(layer, x, dy, recipe, cached_weight="reuse")
    assert torch.equal(first[0], again[0])
    assert layer._weight_cache is kept
    with torch.no_grad():
        if change == "in place":
            layer.value_weight.mul_(2)
        elif change == "optimizer":
            torch.optim.SGD([layer.value_weight], lr=1.0).step()
        elif change == "data":
            layer.value_weight.data = layer.value_weight * 2
        else:
            layer.load_state_dict({name: 2 * value for name, value in layer.state_dict().items()})
    after = run(layer, x, dy, recipe, cached_weight="reuse")
    assert torch.equal(after[0], run(layer, x, dy, recipe)[0])
    assert not torch.equal(after[0], first[0])


def test_a_copy_is_independent_and_keeps_no_cache() -> None:
    layer, _ = pair(True)
    x, dy = torch.randn(20, 32), torch.randn(20, 80)
    run(layer, x, dy, DelayedScaling(), cached_weight="refresh")
    copied = copy.deepcopy(layer)
    assert torch.equal(run(layer, x, dy, DelayedScaling())[0], run(copied, x, dy, DelayedScaling())[0])
    with torch.no_grad():
        copied.key_weight.zero_()
    assert layer.key_weight.any()


def test_weights_of_codes_are_refused_with_the_way_out() -> None:
    with octavo.quantized_init(), pytest.raises(ValueError, match="build the layer with fuse_qkv_params=True"):
        SplitLinear(32, PARTS)


def test_forgotten_updates_are_noticed() -> None:
    layer = SplitLinear(32, PARTS, recipe=DelayedScaling())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)

    def train() -> None:
        for _ in range(20):
            layer(torch.randn(20, 32)).sum().backward()
            optimizer.step()

    with pytest.warns(UserWarning, match=r"call octavo.update_scales\(model\) once a step"):
        train()
