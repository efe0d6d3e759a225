"""One Linear in every hand: bf16, Octavo's recipes, Transformer Engine, torchao."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo.recipes as recipes
from octavo.bench.peers import (
    TE_RECIPES,
    TORCHAO_RECIPES,
    Context,
    convert_for_torchao,
    peer_reason,
    te_context,
    te_linear,
    te_recipe,
)
from octavo.modules import Linear
from octavo.recipes import Recipe
from octavo.runtime import autocast, update_scales


@dataclass(frozen=True)
class Built:
    """A layer ready to be measured.

    Attributes:
        forward: x [M, K] -> y [M, N].
        weight: [N, K], whose gradient is asked for.
        context: what surrounds a step.
        settle: what follows a step of the warm-up.
        holds: kept alive; a captured graph does not do so.
    """

    forward: Callable[[Tensor], Tensor]
    weight: Tensor
    context: Context = nullcontext
    settle: Callable[[], None] = lambda: None
    holds: Any = None


Build = Callable[[nn.Linear], Built]


@dataclass(frozen=True)
class Rival:
    """One way to run a Linear.

    Attributes:
        key: its name in the record.
        library: "torch", "octavo", "te" or "torchao".
        recipe: of the library; "" for none.
        build: of a bf16 nn.Linear without a bias, which it may take over.
        reason: why it is not measured here, or None.
    """

    key: str
    library: str
    recipe: str
    build: Build
    reason: str | None = None


def octavo_recipes() -> dict[str, Recipe]:
    """Octavo's recipes with their defaults, by the names of the record."""
    known: dict[str, str] = {
        "delayed": "DelayedScaling",
        "current": "CurrentScaling",
        "rowwise": "RowwiseScaling",
        "block": "BlockScaling",
    }
    return {name: getattr(recipes, made)() for name, made in known.items() if hasattr(recipes, made)}


def plain(linear: nn.Linear) -> Built:
    """torch's own."""
    return Built(linear, linear.weight, holds=linear)


def with_octavo(recipe: Recipe, cached: bool = False) -> Build:
    """Octavo's layer with that recipe; `cached` reuses the weight's codes, as later micro-batches do."""

    def build(linear: nn.Linear) -> Built:
        layer = _octavo_layer(linear, recipe)
        if not cached:
            return Built(layer, layer.weight, settle=lambda: update_scales(layer), holds=layer)

        def settle() -> None:
            update_scales(layer)
            with torch.no_grad():
                layer(torch.zeros(16, linear.in_features, dtype=linear.weight.dtype, device=linear.weight.device),
                      cached_weight="refresh")  # fmt: skip

        return Built(lambda x: layer(x, cached_weight="reuse"), layer.weight, settle=settle, holds=layer)

    return build


def with_octavo_context(recipe: Recipe) -> Build:
    """Octavo's layer inside `octavo.autocast`, which ends a step each time it is left."""

    def build(linear: nn.Linear) -> Built:
        layer = _octavo_layer(linear, None)
        return Built(layer, layer.weight, context=lambda: autocast(enabled=True, recipe=recipe), holds=layer)

    return build


def _octavo_layer(linear: nn.Linear, recipe: Recipe | None) -> Linear:
    weight = linear.weight
    layer = Linear(
        linear.in_features, linear.out_features, bias=False, device=weight.device, dtype=weight.dtype, recipe=recipe
    )
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def with_te(recipe: str) -> Build:
    """Transformer Engine's layer and recipe."""

    def build(linear: nn.Linear) -> Built:
        layer: Any = te_linear(linear)
        return Built(layer, layer.weight, context=te_context(te_recipe(recipe)), holds=layer)

    return build


def with_torchao(recipe: str, compiled: bool) -> Build:
    """torchao's layer and recipe, by itself or compiled."""

    def build(linear: nn.Linear) -> Built:
        model: Any = nn.Sequential(linear)
        convert_for_torchao(model, recipe)
        weight = model[0].weight
        if not compiled:
            return Built(model, weight, holds=model)
        # One shape at a time: a graph for any shape would be a slower one.
        return Built(torch.compile(model, dynamic=False), weight, holds=model)

    return build


def _peers(device: torch.device, eager_torchao: bool) -> list[Rival]:
    te, ao = peer_reason("te", device), peer_reason("torchao", device)
    found = [Rival(f"te-{name}", "te", name, with_te(name), te) for name in TE_RECIPES]
    for name in TORCHAO_RECIPES:
        if eager_torchao:
            found.append(Rival(f"torchao-{name}", "torchao", name, with_torchao(name, False), ao))
        found.append(Rival(f"torchao-{name}-compiled", "torchao", name, with_torchao(name, True), ao))
    return found


def linear_rivals(device: torch.device) -> list[Rival]:
    """Who is measured on the device's time. bf16 twice: what differs is noise."""
    found = [Rival("bf16", "torch", "", plain), Rival("bf16-again", "torch", "", plain)]
    known = octavo_recipes()
    found += [Rival(f"octavo-{name}", "octavo", name, with_octavo(recipe)) for name, recipe in known.items()]
    if "block" not in known:
        found.append(Rival("octavo-block", "octavo", "block", plain, "this version has no BlockScaling"))
    found += [
        Rival(f"octavo-{name}-cached", "octavo", name, with_octavo(recipe, cached=True))
        for name, recipe in known.items()
    ]
    # Those by whom no target is judged come last, where time may be out.
    return found + sorted(_peers(device, eager_torchao=False), key=lambda rival: rival.recipe == "tensorwise")


def host_rivals(device: torch.device) -> list[Rival]:
    """Who is measured on the host's time; delayed scaling also inside its context, whose exit updates the scales."""
    found = [Rival("bf16", "torch", "", plain), Rival("bf16-again", "torch", "", plain)]
    known = octavo_recipes()
    found += [Rival(f"octavo-{name}", "octavo", name, with_octavo(recipe)) for name, recipe in known.items()]
    found += [
        Rival(f"octavo-{name}-context", "octavo", name, with_octavo_context(recipe))
        for name, recipe in known.items()
        if name in ("delayed", "current")
    ]
    found.append(
        Rival("octavo-delayed-cached", "octavo", "delayed", with_octavo(known["delayed"], cached=True)),
    )
    return found + _peers(device, eager_torchao=True)
