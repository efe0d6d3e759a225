"""`convert` and `unconvert`: FP8 layers in a model that exists, and the way back.

A layer changes its class in place; one of Octavo's own, or a part of one, takes the recipe. Parameters stay the same
objects under the same names, with their dtype, device, hooks, `requires_grad` and ties; an optimizer built before goes
on.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from torch import nn

from octavo.conversion.causal_loss import fuse_losses
from octavo.conversion.converted import fp8_class, is_conv1d, original_class
from octavo.conversion.elsewhere import elsewhere_remarks
from octavo.conversion.fast_path import leave_fast_path, restore_fast_path
from octavo.conversion.fuse import fuse as fuse_structures
from octavo.conversion.fuse import unfuse
from octavo.conversion.fused import kind_of
from octavo.conversion.gain import expected_gain, method_of, unmodelled
from octavo.conversion.known_parts import is_replaced
from octavo.conversion.report import NO_DEVICE, ConversionReport, LayerReport
from octavo.conversion.selection import Candidate, LayerFilter, candidates, checked_selection, unmatched_patterns
from octavo.conversion.siblings import share_inputs
from octavo.modules import FixedWeights, FP8LinearMixin
from octavo.recipes import CurrentScaling, Recipe, check_recipe
from octavo.runtime.given_model import check_model
from octavo.tensor import QuantizedTensor

# What a layer of Octavo's own had before it was converted: (recipe, name). None: it has become one by conversion.
_BEFORE = "_before_conversion"


def convert(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
    filter: LayerFilter = None,
    high_precision_ends: int | tuple[int, int] = 0,
    fuse: bool = True,
    dry_run: bool = False,
) -> ConversionReport:
    """Run the linear layers of `model` in FP8, in place.

    FP8 is on from then on without any context; an enclosing `octavo.autocast` with a recipe, or with `enabled=False`,
    wins. With delayed scaling call `octavo.update_scales(model)` once a step, or use the context; the first batch's
    scales are measured from it.

    Args:
        model: any module; a Linear itself too. Octavo's own layers in it take the recipe by the names of their linear
            parts: `mlp.fc1`, `attention.layernorm_qkv`, `moe.expert0`.
        recipe: `CurrentScaling()` if None. Its overrides are matched against qualified names.
        include: regular expressions on qualified names; with any, only layers that one of them matches.
        exclude: regular expressions; layers that one of them matches stay as they are.
        filter: None leaves out layers that FP8 would slow down on the device where they lie: move the model first.
            "all" takes them too; a function of (module, qualified name) decides by itself.
        high_precision_ends: how many blocks stay as they are at each end of the model's lists of blocks, or (first,
            last). Layers outside of those, such as the head, are not counted: `exclude` them. In a model without
            blocks the linear layers are counted themselves.
        fuse: compute known MLPs as one, have normalisations cast their output ahead for the layers behind them, and, on
            a GPU, transformers' loss of tokens without float32 logits. False leaves all but linear layers as they are.
        dry_run: change nothing, only report.

    Returns:
        what was converted and fused, what was not and why; a warning is given as well if nothing was converted, or if
        a pattern matched nothing, those of the recipe's overrides included.

    Raises:
        TypeError: the model is no module.
        ValueError: what is given is of no use: a recipe, a pattern, a filter, a flag, ends that are all of the model.
    """
    check_model(model, "octavo.convert")
    check_recipe(recipe)
    if not isinstance(fuse, bool):
        raise ValueError(f"fuse is {fuse!r}: it must be True or False")
    chosen = recipe or CurrentScaling()
    selection = checked_selection(include, exclude, filter, high_precision_ends)
    found = candidates(model, selection, chosen)
    rows = [_convert_layer(layer, chosen, dry_run) for layer in found]
    converted = {id(layer.module) for layer, row in zip(found, rows, strict=True) if row.converted}
    remarks = [] if dry_run else leave_fast_path(model, converted) + _shared_inputs(model)
    remarks += elsewhere_remarks(found, converted, selection, chosen)
    structures = fuse_structures(model, converted, fuse, dry_run)
    structures += fuse_losses(model, fuse, dry_run) if converted else []
    unmatched = unmatched_patterns(found, selection, chosen)
    frozen = sum(isinstance(module, FixedWeights) for module in model.modules())
    device = _device(model)
    report = ConversionReport(tuple(rows), tuple(unmatched), tuple(remarks), dry_run, device, tuple(structures), frozen)
    for warning in report.warnings:
        warnings.warn(f"octavo.convert: {warning}", stacklevel=2)
    return report


def unconvert(model: nn.Module) -> nn.Module:
    """Turn every FP8 linear layer of `model` back into the class it came from, in place; weights stay.

    Delayed-scaling state is dropped. A weight that exists in FP8 alone becomes a parameter of its decoded values. A
    class of somebody's own, derived from an FP8 layer, stays: in high precision outside of `octavo.autocast`. Octavo's
    own layers that `convert` met get back the recipe and name that they had; those it did not meet stay, but for an
    `octavo.Linear`, which is taken for a converted one. What somebody has put on top of a fused module since (FSDP2, a
    parametrisation), or wrapped around its forward or a layer's, stays as well, in high precision and unfused, and a
    warning names it.
    """
    check_model(model, "octavo.unconvert")
    remarks = unfuse(model)
    decoded: dict[int, nn.Parameter] = {}  # by the weight, so that what was tied stays so
    held = []
    for name, module in model.named_modules():
        if isinstance(module, FP8LinearMixin) and _stays(module):
            before = module.__dict__.pop(_BEFORE, None)
            if before is not None:
                module.become_fp8(*before)
        elif isinstance(module, FP8LinearMixin):
            weight = module.weight
            if isinstance(weight, QuantizedTensor):
                values = nn.Parameter(weight.detach().dequantize(), requires_grad=weight.requires_grad)
                module.weight = decoded.setdefault(id(weight), values)
                held.append(weight)  # an id is one weight's only as long as that exists
            if is_replaced(module):
                remarks.append(f"{name or '(root)'}: its forward was replaced after conversion: its class stays")
            _leave_fp8(module)
        restore_fast_path(module)
    for remark in remarks:
        warnings.warn(f"octavo.unconvert: {remark}", stacklevel=2)
    return model


def _stays(module: FP8LinearMixin) -> bool:
    """True for a layer that was Octavo's before it was converted, or that is no `nn.Linear` in any case."""
    plain = isinstance(module, nn.Linear) or is_conv1d(module)
    return module.__dict__.get(_BEFORE) is not None or not plain


def _leave_fp8(module: FP8LinearMixin) -> None:
    module.__dict__.pop(_BEFORE, None)
    original = original_class(type(module))
    if issubclass(original, FP8LinearMixin) or is_replaced(module):
        module.become_fp8(None)  # what replaces a forward mostly calls that of the class
    else:
        module.become_plain()
        module.__class__ = original  # type: ignore[assignment]


def _convert_layer(layer: Candidate, recipe: Recipe, dry_run: bool) -> LayerReport:
    module, own = layer.module, recipe.for_layer(layer.name)
    reason = layer.reasons[0] if layer.reasons else ""
    if own is None and not reason:
        reason = "the recipe's overrides keep it in high precision"
    kind = kind_of(module)
    if not dry_run and isinstance(module, FP8LinearMixin):
        module.__dict__.setdefault(_BEFORE, (module.recipe, module.layer_name))
    converts = not reason
    if not dry_run and (converts or (own is None and isinstance(module, FP8LinearMixin))):
        _become_fp8(module, own, layer.name)
    if not converts and isinstance(module, FP8LinearMixin) and module.recipe is not None and own is not None:
        converts, own = True, module.recipe
        reason += ", but it was converted before: octavo.unconvert turns it back"
    return LayerReport(
        layer.name,
        kind,
        layer.in_features,
        layer.out_features,
        converts,
        type(own).__name__ if converts else "",
        reason,
        *_gain(layer, own or recipe),
    )


def _gain(layer: Candidate, recipe: Recipe) -> tuple[float, str]:
    """The expected gain of a layer; or NaN, and why there is none."""
    why, method = unmodelled(recipe), method_of(recipe)
    if why or method is None:
        return math.nan, why
    return expected_gain(layer.in_features, layer.out_features, method=method), ""


def _shared_inputs(model: nn.Module) -> list[str]:
    groups = share_inputs(model)
    return [f"{len(groups)} groups of layers, such as {', '.join(groups[0])}, share their input."] if groups else []


def _become_fp8(module: nn.Module, recipe: Recipe | None, name: str) -> None:
    if isinstance(module, FP8LinearMixin):
        if recipe is not module.recipe:
            # What it shares, it shares with layers of one recipe.
            module.delayed_state.leave_shared_input()
        if module.recipe is None and recipe is not None and not module.delayed_state.is_used:
            module.delayed_state.measure_next()
        module.recipe, module.layer_name = recipe, name
        module.delayed_state.high_precision = False
        return
    module.__class__ = fp8_class(type(module), is_conv1d(module))
    assert isinstance(module, FP8LinearMixin), "the class it has just been given"
    module.become_fp8(recipe, name)
    module.__dict__[_BEFORE] = None
    module.delayed_state.measure_next()


def _device(model: nn.Module) -> str:
    for parameter in model.parameters():
        return str(parameter.device)
    return NO_DEVICE
