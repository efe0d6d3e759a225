"""`octavo.quantized_init`: weights that exist in FP8 alone."""

from __future__ import annotations

import pickle

import pytest
import torch

import octavo
from octavo import QuantizedTensor
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling, StaticScaling
from octavo.scaling import BLOCK_128X128, ROW, TENSOR


def test_layers_built_inside_hold_codes_of_their_initialisation() -> None:
    torch.manual_seed(1)
    plain = octavo.Linear(32, 16)
    torch.manual_seed(1)
    with octavo.quantized_init():
        layer = octavo.Linear(32, 16)
    assert isinstance(layer.weight, QuantizedTensor)
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert torch.equal(layer.weight.detach(), octavo.quantize(plain.weight, octavo.E4M3))
    assert torch.equal(layer.bias, plain.bias)
    assert not isinstance(octavo.Linear(32, 16).weight, QuantizedTensor)


@pytest.mark.parametrize(
    ("recipe", "granularity", "format"),
    [
        (CurrentScaling(), TENSOR, octavo.E4M3),
        (DelayedScaling(format=octavo.E5M2), TENSOR, octavo.E5M2),
        (RowwiseScaling(), ROW, octavo.E4M3),
        (BlockScaling(), BLOCK_128X128, octavo.E4M3),
    ],
)
def test_the_recipe_decides_format_and_granularity(recipe, granularity, format) -> None:
    with octavo.quantized_init(recipe=recipe):
        weight = octavo.Linear(32, 16).weight
    assert (weight.granularity, weight.format) == (granularity, format)


def test_a_static_scale_and_an_epsilon_hold_for_the_weight() -> None:
    with octavo.quantized_init(recipe=StaticScaling(weight_scale=0.25)):
        assert octavo.Linear(32, 16).weight.scale.item() == 0.25
    with octavo.quantized_init(recipe=CurrentScaling(amax_epsilon=448.0)):
        assert octavo.Linear(32, 16).weight.scale.item() == 1.0


def test_contexts_nest_and_one_object_can_be_entered_within_itself() -> None:
    context = octavo.quantized_init()
    with context:
        with context:
            pass
        with octavo.quantized_init(enabled=False):
            assert not isinstance(octavo.Linear(4, 4).weight, QuantizedTensor)
        assert isinstance(octavo.Linear(4, 4).weight, QuantizedTensor)
    assert not isinstance(octavo.Linear(4, 4).weight, QuantizedTensor)


def test_the_initial_value_is_kept_until_it_is_cleared() -> None:
    torch.manual_seed(1)
    plain = octavo.Linear(32, 16)
    torch.manual_seed(1)
    with octavo.quantized_init(keep_high_precision=True):
        layer = octavo.Linear(32, 16)
    assert torch.equal(layer.weight.get_high_precision_init_val(), plain.weight)
    assert pickle.loads(pickle.dumps(layer)).weight.get_high_precision_init_val() is not None
    layer.weight.clear_high_precision_init_val()
    assert layer.weight.get_high_precision_init_val() is None


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling()])
@pytest.mark.parametrize("stepping", ["AdamW", "AdamW foreach", "AdamW fused", "SGD", "SGD foreach", "SGD fused"])
def test_training_moves_the_codes(recipe, stepping: str) -> None:
    """A regression on a fixed target: the loss falls by an order, with every way to step."""
    torch.manual_seed(0)
    with octavo.quantized_init(recipe=recipe):
        layer = octavo.Linear(16, 16)
    name, _, how = stepping.partition(" ")
    rate = 0.05 if name == "AdamW" else 0.5
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=rate, **({how: True} if how else {}))
    x, target = torch.randn(64, 16), torch.randn(64, 16) @ torch.eye(16)
    target = x @ torch.randn(16, 16) * 0.3
    losses = []
    for _ in range(25):
        with octavo.autocast(recipe=recipe):
            loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert isinstance(layer.weight, QuantizedTensor)
    assert losses[-1] < losses[0] / 8


def test_built_on_meta_emptied_and_loaded() -> None:
    with octavo.quantized_init():
        source = octavo.Linear(32, 16)
        layer = octavo.Linear(32, 16, device="meta")
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, QuantizedTensor)
    assert isinstance(layer.weight, torch.nn.Parameter)
    layer.load_state_dict(source.state_dict())
    x = torch.randn(4, 32)
    with octavo.autocast():
        assert torch.equal(layer(x), source(x))


def test_plain_weights_load_into_it_and_its_weights_into_a_plain_layer() -> None:
    with octavo.quantized_init():
        layer = octavo.Linear(32, 16)
    plain = torch.nn.Linear(32, 16)
    layer.load_state_dict(plain.state_dict(), strict=True)
    assert torch.equal(layer.weight.detach(), octavo.quantize(plain.weight, octavo.E4M3))
    plain.load_state_dict(octavo.state_dict(layer), strict=True)
    assert torch.equal(plain.weight, layer.weight.dequantize())
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), plain(x)), "outside of autocast a layer of high precision"
    layer(x).sum().backward()
    plain(x).sum().backward()
    assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_no_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of octavo\.recipes"):
        octavo.quantized_init(recipe="rowwise")
