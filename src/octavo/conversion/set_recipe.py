"""`octavo.set_recipe`: another recipe for a model that trains, or none, from the next step on."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import TypeGuard

from torch import nn

from octavo.conversion.selection import linear_layers, unmatched_overrides
from octavo.conversion.siblings import share_inputs
from octavo.modules import FP8LinearMixin
from octavo.recipes import Recipe, check_recipe
from octavo.runtime.given_model import check_model


def set_recipe(model: nn.Module, recipe: Recipe | None) -> list[str]:
    """Run the converted layers of `model` with another recipe from now on, or in high precision -> their names.

        octavo.convert(model, DelayedScaling())
        for step, batch in enumerate(batches):
            if step == 1000:
                octavo.set_recipe(model, None)               # a phase in the model's own precision
            if step == 2000:
                octavo.set_recipe(model, CurrentScaling())   # and FP8 again
            ...

    Call it between two steps: after the optimizer's, before the next forward. A backward still to come would use the
    precision of its forward, but scales of gradients that are begun anew.

    Layers with a recipe of their own take part, from `octavo.convert` or `recipe=`, and those that this function has
    given one or none before; what `convert` has left in high precision stays. Overrides of the recipe hold, by the
    names that layers have from `convert`; a warning is given if one matches no linear layer. A recipe that equals the
    one in force changes nothing.

    Of delayed scaling, histories and scales go on from one delayed recipe to another, as far as the new one's length
    goes; in another format they provide for the same amaxes. For a phase without they are forgotten, in the state dict
    too: after it the first step's scales are measured from its data, as after `convert`. A state that was loaded from a
    checkpoint and has not been used yet is kept.

    Compiled code is compiled once for each recipe. `octavo.make_graphed_callables` replays its graphs under the recipe
    that they were captured with, and runs the layers themselves under others; a graph captured by hand goes on doing
    what was captured.

    Args:
        model: converted, or with layers of Octavo's that have a recipe.
        recipe: the recipe; None for high precision.

    Raises:
        TypeError: the model is no module.
        ValueError: no recipe; no layer takes part.
    """
    check_model(model, "octavo.set_recipe")
    check_recipe(recipe)
    layers = [(name, module) for name, module in model.named_modules() if _takes_part(module)]
    if not layers:
        raise ValueError(
            f"octavo.set_recipe: no layer of this {type(model).__name__} has a recipe: octavo.convert(model, recipe)"
            " gives them one; layers that run inside octavo.autocast(recipe=...) take the one given there"
        )
    for pattern in unmatched_overrides([_name(name, module) for name, module in linear_layers(model)], recipe):
        warnings.warn(f"octavo.set_recipe: the pattern {pattern!r} matched no linear layer", stacklevel=2)
    chosen = [(module, _own(recipe, name, module)) for name, module in layers]
    _part_unlike(chosen)
    for module, own in chosen:
        if own != module.recipe:
            _give(module, own)
    share_inputs(model)
    return [name for name, _ in layers]


def _takes_part(module: nn.Module) -> TypeGuard[FP8LinearMixin]:
    return isinstance(module, FP8LinearMixin) and (module.recipe is not None or module.takes_recipes)


def _name(name: str, layer: nn.Module) -> str:
    """What overrides call a layer: its name of before, or the one that it has in this model."""
    before = layer.layer_name if isinstance(layer, FP8LinearMixin) else None
    return name if before is None else before


def _own(recipe: Recipe | None, name: str, layer: FP8LinearMixin) -> Recipe | None:
    """The recipe of one layer by the overrides, and from now on they know its name."""
    layer.takes_recipes = True
    layer.layer_name = _name(name, layer)
    return None if recipe is None else recipe.for_layer(layer.layer_name)


def _give(layer: FP8LinearMixin, recipe: Recipe | None) -> None:
    before, state = layer.recipe, layer.delayed_state
    layer.recipe = recipe
    was_delayed = before is not None and before.delayed is not None
    if recipe is None or recipe.delayed is None:
        if was_delayed:
            # What a history knows would be as old as the phase that begins.
            state.leave_recipe()
        return
    loaded = state.recipe is None and state.is_used
    if not (was_delayed or loaded):
        state.measure_next()
    # Here, since compiled code that does it is other code.
    state.adopt_recipe(recipe)


def _part_unlike(chosen: list[tuple[FP8LinearMixin, Recipe | None]]) -> None:
    """What layers share, they share with layers of one recipe: others begin with a copy of it."""
    sharing = defaultdict[int, list[tuple[FP8LinearMixin, Recipe | None]]](list)
    for layer, own in chosen:
        if layer.delayed_state.shares_input:
            sharing[id(layer.delayed_state.input)].append((layer, own))
    for members in sharing.values():
        if any(own != members[0][1] for _, own in members):
            for layer, _ in members:
                layer.delayed_state.leave_shared_input()
