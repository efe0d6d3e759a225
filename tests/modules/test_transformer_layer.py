"""octavo.TransformerLayer against float64 steps, with every recipe, compiled, checkpointed, and in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.attention_reference import allowed_pairs, chained, layer_steps, leaves
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling

HIDDEN, FFN, HEADS, GROUPS = 64, 128, 4, 2
# SQNR in decibels of what the layer adds to its input, and to the gradient; emulated. (A GPU may be 0.5 dB away.)
RECIPES: dict[str, tuple[Recipe, float, float]] = {
    "delayed": (DelayedScaling(initialise_from_first_batch=True), 26.16, 21.27),
    "current": (CurrentScaling(), 26.16, 21.27),
    "current E4M3": (CurrentScaling(format=octavo.E4M3), 26.16, 24.71),
    "rowwise": (RowwiseScaling(), 26.18, 25.05),
    "block": (BlockScaling(), 26.18, 25.05),
}
STATIC = StaticScaling(input_scale=0.02, weight_scale=0.002, grad_output_scale=0.01)


def layer_of(**options: Any) -> octavo.TransformerLayer:
    return octavo.TransformerLayer(HIDDEN, FFN, HEADS, GROUPS, **options)


def run(layer: nn.Module, x: Tensor, dy: Tensor, **call: Any) -> list[Tensor]:
    """y, dx, and the gradient of each parameter."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x, **call)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def exact(layer: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in float64, by the steps."""
    state, x64 = leaves(layer), x.detach().double().requires_grad_()
    y = layer_steps(x64, state, (HEADS, GROUPS), allowed_pairs("causal", None, (x.shape[1], x.shape[0], x.shape[0])))
    y.backward(dy.double())
    return [y.detach(), x64.grad, *(p.grad for p in state.values())]  # type: ignore[list-item]


def data(tokens: int = 12, batch: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, batch, HIDDEN), torch.randn(tokens, batch, HIDDEN)


def test_high_precision_is_the_steps() -> None:
    layer, (x, dy) = layer_of(), data()
    names = ["y", "dx", *(name for name, _ in layer.named_parameters())]
    for name, value, reference in zip(names, run(layer, x, dy), exact(layer, x, dy), strict=True):
        if name.endswith("key_bias"):
            # What all keys of a query have in common moves no probability: the gradient is 0, and here its rounding.
            assert value.abs().max() < 1e-5
            continue
        # Ten products one after the other, the longest of FFN terms.
        assert relative_error(reference, value) < chained(FFN, 10), name


@pytest.mark.parametrize("name", RECIPES)
def test_fp8_is_near_the_steps(name: str) -> None:
    recipe, of_output, of_gradient = RECIPES[name]
    torch.manual_seed(0)
    layer, (x, dy) = layer_of(), data(64, 4)
    with octavo.autocast(recipe=recipe):
        values = run(layer, x, dy)
    references = exact(layer, x, dy)
    # Of what the layer adds to its input: the residual is exact.
    output = sqnr_db(references[0] - x, values[0] - x)
    gradient = sqnr_db(references[1] - dy, values[1] - dy)
    assert of_output - 0.5 < output < of_output + 0.5
    assert of_gradient - 0.5 < gradient < of_gradient + 0.5


@pytest.mark.parametrize("recipe", [None, *(entry[0] for entry in RECIPES.values())], ids=lambda r: type(r).__name__)
def test_twenty_steps_of_training_follow_those_in_high_precision(recipe: Recipe | None) -> None:
    model = nn.Sequential(layer_of(), layer_of(fuse_qkv_params=True))
    plain = copy.deepcopy(model)
    x, target = torch.randn(16, 4, HIDDEN), torch.randn(16, 4, HIDDEN)
    losses: list[list[float]] = [[], []]
    for history, trained, enabled in ((losses[0], model, recipe is not None), (losses[1], plain, False)):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=2e-3)
        for _ in range(20):
            optimizer.zero_grad()
            with octavo.autocast(enabled=enabled, recipe=recipe):
                y = trained(x)
            loss = (y - target).square().mean()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
    # Random targets are learnt by heart: the loss falls from 2 by a third in 20 steps.
    assert losses[1][-1] < 0.75 * losses[1][0]
    # E4M3 and E5M2 lose 2.5 and 5 % of a value; of a loss, in which errors of random sign average out, far less.
    assert losses[0][-1] == pytest.approx(losses[1][-1], rel=0.02)
    assert (losses[0] == losses[1]) == (recipe is None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", [None, STATIC, *(entry[0] for entry in RECIPES.values())])
def test_compiled_without_a_break_it_gives_the_same_bits(recipe: Recipe | None, fused: bool) -> None:
    torch._dynamo.reset()
    layer, (x, dy) = layer_of(fuse_qkv_params=fused), data()
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        outcomes = []
        for each in (layer, compiled):
            leaf = x.clone().requires_grad_()
            with octavo.autocast(enabled=recipe is not None, recipe=recipe):
                y = each(leaf)
            y.backward(dy)
            outcomes.append((y, leaf.grad))
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
    for (name, own), (_, other) in zip(layer.named_parameters(), copied.named_parameters(), strict=True):
        assert torch.equal(own.grad, other.grad), name


@pytest.mark.parametrize("recipe", [STATIC, *(entry[0] for entry in RECIPES.values())])
def test_checkpointing_is_invisible(recipe: Recipe) -> None:
    layer = layer_of(attention_dropout=0.1, hidden_dropout=0.1, drop_path_rate=0.2)
    copied = copy.deepcopy(layer)
    for step in range(3):
        x, dy = data()
        outcomes = []
        for each, function in ((layer, layer), (copied, lambda x: octavo.checkpoint(copied, x))):
            leaf = x.clone().requires_grad_()
            torch.manual_seed(step)
            with octavo.autocast(recipe=recipe):
                y = function(leaf)
            y.backward(dy)
            outcomes.append([y, leaf.grad, *(p.grad for p in each.parameters())])
        for plain, recomputed in zip(*outcomes, strict=True):
            assert torch.equal(plain, recomputed)
    for (name, own), (_, other) in zip(layer.state_dict().items(), copied.state_dict().items(), strict=True):
        assert torch.equal(own, other), name
