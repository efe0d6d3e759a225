"""octavo.TransformerLayer on a GPU: as close as emulated, the same bits from a graph, and compiled by Inductor."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.attention_reference import allowed_pairs, layer_steps, leaves
from torch import Tensor

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

pytestmark = pytest.mark.gpu

# What the layer adds to its input and to the gradient, emulated, in decibels: tests/modules/test_transformer_layer.py.
RECIPES: list[tuple[Recipe, float, float]] = [
    (DelayedScaling(initialise_from_first_batch=True), 26.2, 21.4),
    (CurrentScaling(), 26.2, 21.4),
    (RowwiseScaling(), 26.2, 25.2),
    (BlockScaling(), 26.2, 25.2),
]


def run(layer: Any, x: Tensor, dy: Tensor, recipe: Recipe | None) -> tuple[Tensor, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    with octavo.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad  # type: ignore[return-value]


@pytest.mark.parametrize(("recipe", "output", "gradient"), RECIPES)
def test_native_fp8_is_as_close_as_emulated(recipe: Recipe, output: float, gradient: float) -> None:
    torch.manual_seed(0)
    layer = octavo.TransformerLayer(64, 128, 4, 2)
    x, dy = torch.randn(64, 8, 64), torch.randn(64, 8, 64)
    state, x64 = leaves(layer), x.double().requires_grad_()
    exact = layer_steps(x64, state, (4, 2), allowed_pairs("causal", None, (8, 64, 64)))
    exact.backward(dy.double())
    y, dx = (part.cpu() for part in run(layer.cuda(), x.cuda(), dy.cuda(), recipe))
    assert sqnr_db(exact.detach() - x, y - x) == pytest.approx(output, abs=0.5)
    assert sqnr_db(x64.grad - dy, dx - dy) == pytest.approx(gradient, abs=0.5)  # type: ignore[operator]


@pytest.mark.parametrize("recipe", [entry[0] for entry in RECIPES])
@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_gives_the_bits_of_the_layer(recipe: Recipe, fused: bool) -> None:
    layer = octavo.TransformerLayer(
        256,
        512,
        4,
        2,
        attn_input_format="bshd",
        fuse_qkv_params=fused,
        device="cuda",
        dtype=torch.bfloat16,
        recipe=recipe,
    )
    graphed = copy.deepcopy(layer)
    x, dy = (torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for each in (layer, graphed):
        for _ in range(2):
            run_once(each, x, dy)
    octavo.make_graphed_callables(graphed, (x.clone().requires_grad_(),))
    for _ in range(3):
        x = torch.randn_like(x)
        for one, other in zip(run_once(layer, x, dy), run_once(graphed, x, dy), strict=True):
            assert torch.equal(one, other)


def run_once(layer: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """With the layer's own recipe."""
    leaf = x.detach().clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    octavo.update_scales(layer)
    return y.detach().clone(), leaf.grad.clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("recipe", [None, *(entry[0] for entry in RECIPES)])
def test_compiled_by_inductor_it_is_the_eager_layer_to_rounding(recipe: Recipe | None) -> None:
    torch._dynamo.reset()
    layer = octavo.TransformerLayer(256, 512, 4, 2, attn_input_format="bshd", device="cuda", dtype=torch.bfloat16)
    copied = copy.deepcopy(layer)
    compiled = torch.compile(copied, fullgraph=True)
    x, dy = (torch.randn(2, 128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for one, other in zip(run(layer, x, dy, recipe), run(compiled, x, dy, recipe), strict=True):
        # Roundings to bfloat16 that Inductor leaves out, 2^-9 each, move some codes by a step: less than FP8 costs.
        assert relative_error(one, other) < 2.0**-6


def test_paged_generation_is_contiguous_generation() -> None:
    layer = octavo.TransformerLayer(
        256, 512, 4, 2, attn_input_format="bshd", device="cuda", dtype=torch.bfloat16
    ).eval()
    x = torch.randn(3, 20, 256, device="cuda", dtype=torch.bfloat16)
    angles = octavo.RotaryPositionEmbedding(64)(32, device="cuda")
    outcomes = []
    for cache in (octavo.KVCache(3, 32), octavo.PagedKVCache(3, 32, page_size=8)):
        cache.expect([9, 4, 7])
        with torch.no_grad():
            parts = [layer(x[:, :9], rotary_pos_emb=angles, kv_cache=cache)]
            cache.expect(None)
            parts += [layer(x[:, n : n + 1], rotary_pos_emb=angles, kv_cache=cache) for n in range(9, 20)]
        outcomes.append(torch.cat(parts, 1))
    assert torch.equal(*outcomes)
