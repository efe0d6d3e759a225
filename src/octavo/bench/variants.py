"""Ways to train a model: a library, its recipe, and how the step is launched; named as in "octavo-delayed-compiled"."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from torch import nn

from octavo.bench.peers import (
    TE_RECIPES,
    TORCHAO_RECIPES,
    Context,
    convert_for_torchao,
    peer_reason,
    swap_for_te,
    swap_layers_for_te,
    te_context,
    te_recipe,
)
from octavo.bench.rivals import octavo_recipes
from octavo.conversion import convert
from octavo.modules import TransformerLayer
from octavo.recipes import Recipe
from octavo.runtime import update_scales

# Which layer stays as it is in every library, but for a variant that says otherwise: the model's head.
HEAD_PATTERN = r"(^|\.)(lm_)?head$"
COMPILED = {"": "", "compiled": "blocks", "reduced": "reduced", "whole": "whole"}
# Further words of a name, the last first, and the libraries that they are for.
_WORDS = {"lean": ("torch", "octavo"), "linears": ("octavo",), "head": ("octavo",)}
# Scales of delayed scaling are measured at first, those of gradients until the third step: a graph each time.
_UNTIL_KNOWN = 3
GRAPHS = ("graphed", "captured")
# In this order, so that a time limit leaves out what says least.
ON_GPU = (
    "bf16",
    "bf16-compiled",
    "octavo-delayed-compiled",
    "octavo-delayed",
    "octavo-current-compiled",
    "te-delayed",
    "torchao-tensorwise-compiled",
    "octavo-current",
    "octavo-delayed-compiled-captured",
    "octavo-delayed-reduced",
    "octavo-delayed-linears-reduced",
    "octavo-delayed-lean-compiled-captured",
    "octavo-delayed-head-lean-reduced",
    "bf16-compiled-captured",
    "bf16-reduced",
    "bf16-lean-compiled",
    "octavo-rowwise-compiled",
    "te-current",
    "torchao-rowwise-compiled",
    "octavo-delayed-graphed",
    "bf16-graphed",
    "octavo-block-compiled",
    "octavo-rowwise",
    "octavo-block",
    "te-block",
)
QUICK = ON_GPU[:7]
ON_CPU = ("bf16", "octavo-delayed", "octavo-current", "octavo-rowwise")


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    Attributes:
        key: its name.
        library: "torch", "octavo", "te" or "torchao".
        recipe: of the library; "" for none.
        lean: what a norm or an activation gave out is made again: by the compiler, or by Octavo, which keeps inputs and
            not codes.
        linears: Octavo converts linear layers alone, and fuses none of them with what is around.
        head: Octavo converts the model's head too.
        compiled: "" for no compiler, "blocks" for one region a block, "reduced" for those with mode="reduce-overhead",
            "whole" for the whole model.
        graph: "" for none; "graphed" for forward and backward, "captured" for the whole step in one CUDA graph.
    """

    key: str
    library: str
    recipe: str = ""
    lean: bool = False
    linears: bool = False
    head: bool = False
    compiled: str = ""
    graph: str = ""


def parse_variant(key: str) -> Variant:
    """The variant of that name. Raises ValueError that says what a name is made of."""
    first, *rest = key.split("-")
    variant = Variant(key, "torch" if first == "bf16" else first)
    if rest and rest[-1] in GRAPHS:
        variant = replace(variant, graph=rest.pop())
    if rest and rest[-1] in COMPILED:
        variant = replace(variant, compiled=COMPILED[rest.pop()])
    for word, libraries in _WORDS.items():
        if rest and rest[-1] == word and variant.library in libraries:
            changes: dict[str, Any] = {rest.pop(): True}
            variant = replace(variant, **changes)
    known = {"torch": ("",), "octavo": RECIPES, "te": tuple(TE_RECIPES), "torchao": TORCHAO_RECIPES}
    recipe = "-".join(rest)
    if variant.library not in known or (first == "torch") or recipe not in known[variant.library]:
        raise ValueError(
            f"--variants names {key!r}, which is unknown: write bf16, octavo-RECIPE ({', '.join(RECIPES)}),"
            f" te-RECIPE ({', '.join(TE_RECIPES)}) or torchao-RECIPE ({', '.join(TORCHAO_RECIPES)}), then what it"
            " is of -head, -linears, -lean, of -compiled, -reduced, -whole, of -graphed, -captured, in this order"
        )
    return replace(variant, recipe=recipe)


RECIPES = ("delayed", "current", "rowwise", "block")


@dataclass(frozen=True)
class Converted:
    """What a variant made of a model.

    Attributes:
        layers: how many run in FP8.
        context: what surrounds the forward.
        after_step: follows the optimizer's step.
        eager_steps: to be run before anything is compiled.
    """

    layers: int
    context: Context = nullcontext
    after_step: Callable[[], None] = lambda: None
    eager_steps: int = 0


def variant_reason(variant: Variant, device: torch.device) -> str | None:
    """Why a variant is not measured here, or None."""
    if variant.library in ("te", "torchao"):
        return peer_reason(variant.library, device)
    if variant.library == "octavo" and variant.recipe not in octavo_recipes():
        return f"this version has no recipe {variant.recipe}"
    if variant.graph and device.type != "cuda":
        return "CUDA graphs need a GPU"
    return None


def apply_variant(variant: Variant, model: nn.Module) -> Converted:
    """Convert a model in place, as the variant's library does; its head stays as it is, unless the variant has it.

    A model of Octavo's TransformerLayers gets the recipe there, or Transformer Engine's in their place.

    Raises:
        ValueError: the library converts nothing of this model.
    """
    if variant.library == "torch":
        return Converted(0, _lean if variant.lean else nullcontext)
    if variant.library == "octavo":
        recipe = octavo_recipes()[variant.recipe]
        if variant.lean:
            recipe = recipe.replaced(saved_input="high_precision")
        layers = _give_recipe(model, recipe)
        if layers and (variant.head or variant.linears):
            raise ValueError("TransformerLayers take their recipe as a whole: leave out -head and -linears")
        if not layers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a model without a layer to convert: `_counted` raises
                exclude = None if variant.head else HEAD_PATTERN
                layers = len(convert(model, recipe, exclude=exclude, fuse=not variant.linears).converted)
        if recipe.delayed is None:
            return _counted(Converted(layers, nullcontext), variant)
        after = functools.partial(update_scales, model)
        return _counted(Converted(layers, nullcontext, after, _UNTIL_KNOWN), variant)
    if variant.library == "te":
        layers = swap_layers_for_te(model) or swap_for_te(model)
        return _counted(Converted(layers, te_context(te_recipe(variant.recipe))), variant)
    if _transformer_layers(model):
        raise ValueError("torchao has no TransformerLayer: the model vit, of Linears, is where it is measured")
    return _counted(Converted(convert_for_torchao(model, variant.recipe)), variant)


def _transformer_layers(model: nn.Module) -> list[TransformerLayer]:
    return [module for module in model.modules() if isinstance(module, TransformerLayer)]


def _give_recipe(model: nn.Module, recipe: Recipe) -> int:
    """Switch FP8 on in the TransformerLayers of a model -> how many there are."""
    layers = _transformer_layers(model)
    for layer in layers:
        for module in layer.modules():
            part: Any = module
            if "delayed_state" in module.__dict__:
                part.recipe = recipe
    return len(layers)


def _lean() -> Any:
    """Context, in which the compiler may make again what takes little to make; it reads it when it compiles."""
    return torch._functorch.config.patch(ban_recompute_materialized_backward=False)


def _counted(converted: Converted, variant: Variant) -> Converted:
    if not converted.layers:
        raise ValueError(f"{variant.library} converts no layer of this model: it would be measured in bf16")
    return converted
