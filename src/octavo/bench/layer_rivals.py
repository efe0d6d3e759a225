"""One TransformerLayer in every hand: of torch's own parts, Octavo's with and without a recipe, Transformer Engine's.

Two layers stand for BF16: Octavo's under no recipe, "bf16", and one composed of torch's own modules, "bf16-composed".
The faster of the two in a run is what FP8 is compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.bench.peers import TE_RECIPES, Context, peer_reason, te_context, te_graphed, te_recipe, te_transformer_layer
from octavo.bench.rivals import octavo_recipes
from octavo.bench.shapes import LayerShape
from octavo.modules import TransformerLayer
from octavo.recipes import Recipe
from octavo.runtime import autocast, make_graphed_callables

GRAPHED = "graphed"


@dataclass(frozen=True)
class BuiltLayer:
    """A layer ready to be measured.

    Attributes:
        forward: x [S, B, hidden] -> y of that shape.
        layer: whose gradients are asked for.
        context: what surrounds a forward.
    """

    forward: Callable[[Tensor], Tensor]
    layer: nn.Module
    context: Context = nullcontext


@dataclass(frozen=True)
class LayerRival:
    """One way to run a TransformerLayer.

    Attributes:
        key: its name in the record.
        library: "torch" for BF16 of Octavo's and torch's, "octavo" or "te".
        recipe: of the library; "" for none.
        graph: "graphed" for forward and backward as CUDA graphs, or "".
        build: of the shape, and of an x [S, B, hidden] like those to come, on whose device it is.
        reason: why it is not measured here, or None.
    """

    key: str
    library: str
    recipe: str
    graph: str
    build: Callable[[LayerShape, Tensor], BuiltLayer]
    reason: str | None = None


class ComposedLayer(nn.Module):
    """x + proj(attention(qkv(norm(x)))), and h + fc2(gelu(fc1(norm(h)))), of torch's own modules; x [S, B, hidden]."""

    def __init__(self, shape: LayerShape, **place: Any) -> None:
        super().__init__()
        hidden = shape.hidden
        self.heads = shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, **place), nn.LayerNorm(hidden, **place)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, **place), nn.Linear(hidden, hidden, **place)
        self.fc1, self.fc2 = nn.Linear(hidden, shape.ffn, **place), nn.Linear(shape.ffn, hidden, **place)

    def forward(self, x: Tensor) -> Tensor:
        """y [S, B, hidden]; causal."""
        seq, batch, hidden = x.shape
        # [S, B, 3 hidden] -> three of [B, heads, S, hidden / heads]
        parts = self.qkv(self.norm1(x)).view(seq, batch, 3, self.heads, hidden // self.heads)
        q, k, v = parts.permute(2, 1, 3, 0, 4).unbind()
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.proj(attended.permute(2, 0, 1, 3).reshape(seq, batch, hidden))
        # The tanh form, as Octavo's and Transformer Engine's "gelu".
        y: Tensor = h + self.fc2(nn.functional.gelu(self.fc1(self.norm2(h)), approximate="tanh"))
        return y


def _octavo_layer(shape: LayerShape, x: Tensor) -> nn.Module:
    return TransformerLayer(shape.hidden, shape.ffn, shape.heads, device=x.device, dtype=x.dtype)


def _composed_layer(shape: LayerShape, x: Tensor) -> nn.Module:
    return ComposedLayer(shape, device=x.device, dtype=x.dtype)


def in_bf16(make: Callable[[LayerShape, Tensor], nn.Module], graphed: bool) -> Callable[..., BuiltLayer]:
    """A layer under no recipe."""

    def build(shape: LayerShape, x: Tensor) -> BuiltLayer:
        layer = make(shape, x)
        capture: Any = torch.cuda.make_graphed_callables
        return BuiltLayer(capture(layer, (_sample(x),)) if graphed else layer, layer)

    return build


def with_octavo(recipe: Recipe, graphed: bool) -> Callable[..., BuiltLayer]:
    """Octavo's layer inside `octavo.autocast`, whose exit updates scales, as Transformer Engine's does."""

    def build(shape: LayerShape, x: Tensor) -> BuiltLayer:
        layer = _octavo_layer(shape, x)

        def context() -> autocast:
            return autocast(enabled=True, recipe=recipe)

        if graphed:
            with context():
                layer = make_graphed_callables(layer, (_sample(x),))
        return BuiltLayer(layer, layer, context)

    return build


def with_te(recipe: str, graphed: bool) -> Callable[..., BuiltLayer]:
    """Transformer Engine's layer; without FP8 for recipe ""."""

    def build(shape: LayerShape, x: Tensor) -> BuiltLayer:
        layer: Any = te_transformer_layer(shape.hidden, shape.ffn, shape.heads, device=x.device, dtype=x.dtype)
        made = te_recipe(recipe) if recipe else None
        forward = te_graphed(layer, _sample(x), made) if graphed else layer
        return BuiltLayer(forward, layer, te_context(made) if recipe else nullcontext)

    return build


def _sample(x: Tensor) -> Tensor:
    return torch.randn_like(x).requires_grad_()


def layer_rivals(device: torch.device) -> list[LayerRival]:
    """Who is measured, each by itself and graphed; in this order, so that a time limit leaves out what says least."""
    te, no_graphs = peer_reason("te", device), None if device.type == "cuda" else "CUDA graphs need a GPU"
    found = []
    for graph in ("", GRAPHED):
        suffix, graphed = f"-{graph}" if graph else "", bool(graph)
        reason = no_graphs if graphed else None
        for key, make in (("bf16", _octavo_layer), ("bf16-composed", _composed_layer)):
            found.append(LayerRival(f"{key}{suffix}", "torch", "", graph, in_bf16(make, graphed), reason))
        for name, recipe in octavo_recipes().items():
            found.append(
                LayerRival(f"octavo-{name}{suffix}", "octavo", name, graph, with_octavo(recipe, graphed), reason)
            )
        for name in ("", *TE_RECIPES):
            key = f"te-{name or 'bf16'}{suffix}"
            found.append(LayerRival(key, "te", name, graph, with_te(name, graphed), te or reason))
    return found
