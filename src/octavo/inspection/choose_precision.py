"""`choose_precision`: which layers bear FP8, from a few batches forward and backward in high precision.

    1. Each layer's operands are cast as the recipe says, beside the model's own pass: figures per operand.
    2. The layer's error in y, weighed by dL/dy, predicts what it does to the loss (see `layer_probe`).
    3. A layer whose operands leave the bounds stays in high precision. Of the others, those that change the loss most
       stay too, until the predicted change of the loss keeps the budget.

Errors of different layers are taken as unrelated: the changes of several add as the root of the sum of their squares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.conversion.converted import is_conv1d
from octavo.conversion.selection import Candidate, candidates, checked_selection
from octavo.inspection.given_batches import Loss, left_as_it_was, loss_of
from octavo.inspection.layer_probe import LayerProbe, Parts, ProductRecorder, WatchedWeight
from octavo.inspection.precision_table import LayerPrecision, PrecisionBounds, PrecisionTable
from octavo.inspection.watch import is_compiled
from octavo.modules import FP8LinearMixin
from octavo.recipes import CurrentScaling, Recipe, check_recipe
from octavo.recipes.recipe import OPERANDS
from octavo.runtime import autocast
from octavo.runtime.given_model import check_batches, check_model, told_of_one_batch
from octavo.tensor import QuantizedTensor

DEFAULT_BUDGET = 0.05
_ONE_BATCH = "give a list of one: [(inputs, targets)]"


class PrecisionChoice(NamedTuple):
    """A recipe and the reasons; unpacks as (recipe, table), and prints as the table.

    Attributes:
        recipe: the given one, and an override to None for each layer that is to stay in high precision.
        table: figures and reasons, layer by layer.
    """

    recipe: Recipe
    table: PrecisionTable

    def __str__(self) -> str:
        return str(self.table)


class _Layer(NamedTuple):
    """A linear layer, its own recipe, and its probe or the reason why it has none."""

    name: str
    recipe: Recipe | None
    probe: LayerProbe | None
    reason: str


def choose_precision(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    recipe: Recipe | None = None,
    loss: Loss = None,
    budget: float = DEFAULT_BUDGET,
    bounds: PrecisionBounds | None = None,
) -> PrecisionChoice:
    """Run a few batches forward and backward, and choose which linear layers run in FP8 -> (recipe, table).

        recipe, table = octavo.choose_precision(model, batches, loss=nn.functional.cross_entropy)
        print(table)
        octavo.convert(model, recipe)

    The model runs in its own precision: FP8 is off, and a `torch.autocast` around the call counts. It is left as it
    was, also if an exception occurs: training flags, gradients, parameters, buffers, hooks, random state.

    Args:
        model: in training mode if that is what is asked about; converted or not, not compiled.
        batches: each a mapping of keyword arguments, a tuple or list of arguments, or a tensor. Two to eight will do.
        recipe: `CurrentScaling()` if None. Layers that its overrides keep in high precision stay so.
        loss: a function of (output, targets): the last entry of a tuple is the targets, which the model does not get;
            of a mapping or a tensor both get all of the batch. None takes the loss that the model returns, as
            transformers' models do.
        budget: how much the loss may change by what FP8 does to the layers' outputs, to first order and relative to the
            loss: 0.05 for 5 %. math.inf leaves the choice to the bounds.
        bounds: what operands may lose; `octavo.inspection.PrecisionBounds()` if None.

    Raises:
        TypeError: the model is no module.
        ValueError: no batch, one that the model does not take, no linear layer that can be measured, no parameter that
            needs a gradient, a compiled model, a loss that is no finite scalar with a gradient, a budget that is no
            positive number or 0.
    """
    check_model(model, "octavo.choose_precision")
    check_recipe(recipe)
    given, kept = recipe or CurrentScaling(), bounds or PrecisionBounds()
    _check_arguments(model, batches, loss, budget, bounds)
    # A parametrised weight may change its module's buffers as it is looked at.
    with left_as_it_was(model):
        layers, weights = _layers(model, given)
        losses = _run(model, batches, loss, weights)
    size = sum(abs(one) for one in losses) / len(losses)
    return _chosen(layers, given, _Rules(size, float(budget), kept), len(losses))


def _check_arguments(model: nn.Module, batches: Any, loss: Any, budget: Any, bounds: Any) -> None:
    if not (loss is None or callable(loss)):
        raise ValueError(
            f"loss is {loss!r}: expected a function of (output, targets), or None for the model's own loss"
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise ValueError(f"loss is the class {loss.__name__}: give an instance, {loss.__name__}()")
    if not (bounds is None or isinstance(bounds, PrecisionBounds)):
        raise ValueError(f"bounds is {bounds!r}: expected an octavo.inspection.PrecisionBounds, or None")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget >= 0:
        raise ValueError(f"budget is {budget!r}: expected a relative change of the loss, 0 or more, such as 0.05")
    check_batches(batches, "octavo.choose_precision")
    if is_compiled(model):
        raise ValueError(
            f"{type(model).__name__} is compiled, and choose_precision looks at eager code only: choose first, convert,"
            " and then compile"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient, and FP8 is judged by gradients: call"
            " model.requires_grad_(True), or unfreeze what is to be trained"
        )


def _layers(model: nn.Module, recipe: Recipe) -> tuple[list[_Layer], dict[Parts, WatchedWeight]]:
    """All linear layers of the model, and the weights that are watched, by their parts; tied layers share a probe."""
    layers, weights = [], dict[Parts, WatchedWeight]()
    for found in candidates(model, checked_selection(None, None, "all"), recipe):
        own, reason = recipe.for_layer(found.name), _unmeasured(found)
        if own is None:
            reason = "the recipe's overrides keep it in high precision"
        probe = None
        if own is not None and not reason:
            parts = _parts(found.module)
            key = tuple(id(part) for part in parts)
            if key not in weights:
                weights[key] = WatchedWeight(is_conv1d(found.module), LayerProbe(own, parts[0].device))
            probe = weights[key].probe
        # What convert leaves out for its structure runs in high precision in any case.
        layers.append(_Layer(found.name, None if found.reasons else own, probe, reason))
    if not weights:
        found_reasons = "; ".join(f"{layer.name or '(root)'}: {layer.reason}" for layer in layers[:3])
        raise ValueError(
            f"{type(model).__name__} has no linear layer to measure{f' ({found_reasons})' if layers else ''}: give a"
            " model with nn.Linear layers, or one whose layers octavo.convert takes"
        )
    return layers, weights


def _unmeasured(found: Candidate) -> str:
    """Why a layer cannot be measured; empty if it can."""
    if found.reasons:
        return found.reasons[0]
    if any(isinstance(part, QuantizedTensor) for part in _parts(found.module)):
        return "its weight exists in FP8 alone"
    return ""


def _parts(layer: nn.Module) -> list[Tensor]:
    """The parameters that make up a weight."""
    parts: list[Any] = layer.weight_parts() if isinstance(layer, FP8LinearMixin) else [layer.weight]
    return parts


def _unreached(probe: LayerProbe) -> str:
    """Why a layer that could be measured was not."""
    if probe.ran_without_gradients:
        return "it ran without gradients, as inside torch.no_grad or a reentrant checkpoint: not measured"
    return "no product of its weight was seen on the way to a loss: not measured"


def _run(model: nn.Module, batches: Iterable[Any], loss: Loss, weights: dict[Parts, WatchedWeight]) -> list[float]:
    """Measure all batches; their losses."""
    losses = []
    with torch.inference_mode(False), torch.enable_grad(), autocast(enabled=False):
        for batch in batches:
            recorder = ProductRecorder(weights)
            with told_of_one_batch(batches, "octavo.choose_precision", _ONE_BATCH), recorder:
                value = loss_of(model, batch, loss)
            recorder.measure(value)
            losses.append(value.item())
            for watched in weights.values():
                watched.probe.end_batch()
    if not losses:
        raise ValueError("choose_precision got no batch: give at least one, and no generator that has been used up")
    if not any(watched.probe.changes for watched in weights.values()):
        reason = _unreached(next(iter(weights.values())).probe)
        raise ValueError(
            f"none of the {len(weights)} linear layers of {type(model).__name__} was measured ({reason}): give a loss"
            " that depends on their outputs, and checkpoint with use_reentrant=False"
        )
    return losses


class _Rules(NamedTuple):
    """What a choice is made by."""

    loss: float
    budget: float
    bounds: PrecisionBounds

    def relative(self, probe: LayerProbe | None) -> float:
        """The predicted change of the loss, relative to it."""
        change = 0.0 if probe is None else probe.change
        return change / self.loss if self.loss else (math.inf if change else 0.0)

    def together(self, probes: Iterable[LayerProbe]) -> float:
        """That of several layers, each weight once."""
        return math.hypot(*(self.relative(probe) for probe in {id(probe): probe for probe in probes}.values()))


def _chosen(layers: list[_Layer], recipe: Recipe, rules: _Rules, batches: int) -> PrecisionChoice:
    measured = [layer.probe for layer in layers if layer.probe is not None]
    reasons = _reasons(measured, rules)
    rows, patterns = [], []
    for layer in layers:
        reason = layer.reason if layer.probe is None else reasons.get(id(layer.probe), "")
        high = layer.recipe is None or bool(layer.probe is not None and reason)
        if high and layer.recipe is not None:
            patterns.append((f"^{re.escape(layer.name)}$", None))
        if layer.probe is not None and not layer.probe.changes:
            reason = reason or _unreached(layer.probe)
        name = "" if high else type(layer.recipe).__name__
        rows.append(LayerPrecision(layer.name, name, rules.relative(layer.probe), _figures(layer.probe), reason))
    left = [probe for probe in measured if id(probe) not in reasons]
    table = PrecisionTable(
        tuple(rows), rules.loss, rules.budget, rules.together(left), rules.together(measured), batches
    )
    return PrecisionChoice(recipe.replaced(overrides=(*patterns, *recipe.overrides)), table)


def _figures(probe: LayerProbe | None) -> tuple[Any, ...]:
    seen = {} if probe is None else probe.operands
    return tuple(seen[operand] for operand in OPERANDS if operand in seen)


def _reasons(probes: list[LayerProbe], rules: _Rules) -> dict[int, str]:
    """Why layers stay in high precision, by the id of their probe."""
    reasons: dict[int, str] = {}
    for probe in probes:
        broken = [sentence for figures in _figures(probe) for sentence in rules.bounds.broken_by(figures)]
        if broken:
            reasons[id(probe)] = "; ".join(broken)
    left = {id(probe): probe for probe in probes if id(probe) not in reasons}
    while left and (total := rules.together(left.values())) > rules.budget:
        largest = max(left.values(), key=rules.relative)
        reasons[id(largest)] = (
            f"loss: changes it by {rules.relative(largest):.2%}, the most of layers that together change it by"
            f" {total:.2%}, above the budget of {rules.budget:.2%}"
        )
        del left[id(largest)]
    return reasons
