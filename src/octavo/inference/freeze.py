"""`freeze`: a trained model for serving in FP8."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from octavo.conversion.fuse import fuse as fuse_structures
from octavo.conversion.fuse import unfuse
from octavo.conversion.fused import kind_of
from octavo.conversion.report import no_layers
from octavo.conversion.selection import Candidate, candidates, checked_selection, unmatched_patterns
from octavo.conversion.siblings import siblings
from octavo.inference.freeze_report import FreezeReport, LeftLayer
from octavo.inference.freezing import freezes, frozen_form
from octavo.inference.frozen_layer import FrozenLayer, check_input_scale
from octavo.inference.frozen_linear import FrozenLinear
from octavo.inference.scheme import Scheme, scheme_named
from octavo.modules import FP8LinearMixin, LayerNormMLP, LMHead, MLPPart
from octavo.runtime.given_model import check_model
from octavo.tensor import OperandState


def freeze(
    model: nn.Module,
    scheme: str = "row",
    *,
    input_scales: Mapping[str, float] | None = None,
    exclude: str | Iterable[str] = (),
    high_precision_ends: int | tuple[int, int] = 0,
    fuse: bool = True,
) -> FreezeReport:
    """Replace every linear layer of `model` by its frozen form, in place -> the qualified names of those replaced.

    The list also knows what was left (`report.left`) and what runs as one (`report.structures`); it prints as a table.

    `FrozenLinear` stands for an `nn.Linear`, an `octavo.Linear` and their kin, `FrozenLayerNormLinear`,
    `FrozenLayerNormMLP` and `FrozenGroupedLinear` for those layers of Octavo's, which are frozen as a whole; of
    attention and transformer layers, which stay, the projections and the MLP. A layer that stands in several places is
    replaced in all of them, and named once. Left as they are: layers whose weight is tied to another module's, such as
    a language model's head, since they would be untied; an `octavo.LMHead`, which takes targets as well; layers with a
    forward of somebody's own; what `nn.MultiheadAttention` reads without calling it; and layers that hand out a bias
    instead of adding it.

    Args:
        model: trained; converted layers are taken as well. The root itself must not be a linear layer.
        scheme: "tensor_static", "tensor_dynamic", "row", "block128" or "mxfp8", see `octavo.inference.SCHEMES`.
        input_scales: what `calibrate` gave, for "tensor_static"; those of an MLP are called `mlp.fc1` and `mlp.fc2`,
            those of experts `moe.expert0` and so on.
        exclude: regular expressions on qualified names of layers that stay as they are. A warning is given if one
            matches no linear layer, or if nothing is left to replace.
        high_precision_ends: how many blocks stay as they are at each end, or (first, last), counted as `octavo.convert`
            counts them. The head is in no block: `exclude` it. A layer of theirs that was converted stays so.
        fuse: compute known MLPs as one, and have normalisations cast ahead for frozen layers, as `octavo.convert` does.

    Raises:
        TypeError: the model is no module.
        ValueError: an unknown scheme, no regular expression, no truth value, no count or ends that are all of the
            model, a static scheme without a usable scale for some layer, a pattern or an end that leaves out a part of
            a layer that is frozen as a whole, or a layer whose channels are smoothed (`smooth_swiglu`). The model is
            unchanged then.
    """
    check_model(model, "octavo.freeze")
    chosen = scheme_named(scheme)
    scales = _checked_scales(chosen, input_scales)
    _check_fuse(fuse)
    selection = checked_selection(None, exclude, "all", high_precision_ends)
    found = candidates(model, selection)
    layers, left = _sorted_out(_whole_layers(found), _tied(model))
    _check_layers(layers, chosen, scales)
    for pattern in unmatched_patterns(found, selection):
        warnings.warn(f"octavo.freeze: exclude pattern {pattern!r} matches no linear layer", stacklevel=2)
    if not layers:
        warnings.warn(f"octavo.freeze replaced nothing: {_why_none(model, left)}", stacklevel=2)
    frozen = {id(layer.module): _frozen(layer, chosen, scales) for layer in layers}
    # What ran as one with a layer that goes, runs by itself again.
    for remark in unfuse(model):
        warnings.warn(f"octavo.freeze: {remark}", stacklevel=2)
    _replace(model, frozen)
    _leave_fast_path(model)
    _share_inputs(model)
    structures = fuse_structures(model, set(), fuse)
    return FreezeReport([(layer.name, layer.kind) for layer in layers], left, scheme, structures)


class _Layer(NamedTuple):
    """What is replaced as a whole: its name, the module, and the linear parts in it (itself, if it is one)."""

    name: str
    module: nn.Module
    parts: list[Candidate]

    @property
    def kind(self) -> str:
        """Its class, as reports call it."""
        return kind_of(self.parts[0].module)


def _whole_layers(found: list[Candidate]) -> list[_Layer]:
    """Linear layers, those of one MLP or of several experts together."""
    layers: dict[int, _Layer] = {}
    for candidate in found:
        module, name = candidate.module, candidate.name
        if isinstance(module, MLPPart):
            module, name = module.owner, name.rpartition(".")[0]
        layers.setdefault(id(module), _Layer(name, module, [])).parts.append(candidate)
    return list(layers.values())


def _sorted_out(layers: list[_Layer], tied: set[int]) -> tuple[list[_Layer], list[LeftLayer]]:
    """Those that are replaced, and those that are left."""
    reasons = [(layer, list(dict.fromkeys(_reasons(layer, tied)))) for layer in layers]
    left = [LeftLayer(layer.name, layer.kind, "; ".join(why)) for layer, why in reasons if why]
    return [layer for layer, why in reasons if not why], left


def _check_fuse(fuse: bool) -> None:
    if not isinstance(fuse, bool):
        raise ValueError(f"fuse is {fuse!r}: it must be True or False")


def _checked_scales(scheme: Scheme, scales: Mapping[str, float] | None) -> dict[str, float]:
    if scales is None:
        return {}
    if not scheme.static:
        raise ValueError(
            f"scheme {scheme.name!r} measures its activations and takes no input_scales: leave them out, or use"
            " 'tensor_static'"
        )
    if not isinstance(scales, Mapping):
        raise ValueError(
            f"input_scales is a {type(scales).__name__}: expected {{name of a layer: scale}}, which"
            " octavo.calibrate gives"
        )
    for name, scale in scales.items():
        check_input_scale(scale, f"of {name!r} ")
    return {name: float(scale) for name, scale in scales.items()}


def _reasons(layer: _Layer, tied: set[int]) -> list[str]:
    """Why a layer stays as it is."""
    reasons = [reason for part in layer.parts for reason in _reasons_of_part(part, tied)]
    foreign = _foreign_forward(layer.module)
    if foreign is not None:
        reasons.append(f"{foreign.__name__} has a forward of its own")
    excluded = [part for part in layer.parts if part.reasons]
    if 0 < len(excluded) < len(layer.parts):
        raise ValueError(
            f"the choice of layers leaves out {excluded[0].name!r}, a part of {layer.name!r}, a {layer.kind}"
            f" ({excluded[0].reasons[0]}), which is frozen as a whole: exclude all of it"
            f" (exclude=[{re.escape(layer.name)!r}]), or nothing"
        )
    return reasons


def _reasons_of_part(part: Candidate, tied: set[int]) -> list[str]:
    reasons, module = list(part.reasons), part.module
    if reasons and isinstance(module, FP8LinearMixin) and module.recipe is not None:
        reasons[0] += ", but it was converted before: octavo.unconvert turns it back"
    if isinstance(module, LMHead):
        reasons.append("it computes the loss as well, of targets, which a frozen layer does not take")
    weights = module.weight_parts() if isinstance(module, FP8LinearMixin) else [module.weight]
    if any(id(weight) in tied for weight in weights):
        reasons.append("its weight is tied to another module's")
    if isinstance(module, FP8LinearMixin) and module.bias is not None and _adds_no_bias(module):
        reasons.append("it hands its bias out")
    return reasons


def _adds_no_bias(module: FP8LinearMixin) -> bool:
    """True for a linear part whose product does not add its bias."""
    if not isinstance(module, MLPPart):
        return module.added_bias() is None
    freezing = freezes(module.owner)
    return freezing is not None and freezing.added_bias(module) is None


def _foreign_forward(module: nn.Module) -> type[nn.Module] | None:
    """The class of somebody else's whose forward a layer derived from one of Octavo's has."""
    if isinstance(module, nn.Linear) or freezes(module) is None:
        return None
    owner = next(kind for kind in type(module).__mro__ if "forward" in kind.__dict__)
    return None if owner.__module__.partition(".")[0] in ("octavo", "transformers") else owner


def _check_layers(layers: list[_Layer], scheme: Scheme, scales: Mapping[str, float]) -> None:
    """Refuse what cannot be frozen, before anything is changed."""
    if any(layer.name == "" for layer in layers):
        raise ValueError("the model is itself a linear layer: put it into a module, such as nn.Sequential")
    for layer in layers:
        _refuse_smoothed(layer)
        _check_calibrated(layer, scheme, scales)


def _check_calibrated(layer: _Layer, scheme: Scheme, scales: Mapping[str, float]) -> None:
    for part in layer.parts:
        if scheme.static and part.name not in scales:
            raise ValueError(
                f"scheme {scheme.name!r} has no input scale for {part.name!r}: calibrate with batches that reach it, or"
                f" exclude {'it' if part.name == layer.name else repr(layer.name)}"
            )


def _refuse_smoothed(layer: _Layer) -> None:
    if isinstance(layer.module, LayerNormMLP) and layer.module.smooth_swiglu:
        raise ValueError(
            f"{layer.name!r} measures the scales of its channels in every call (smooth_swiglu=True), which codes made"
            " once cannot follow: set its smooth_swiglu to False to serve it without, and look at the error; or exclude"
            f" it (exclude=[{re.escape(layer.name)!r}])"
        )


def _why_none(model: nn.Module, left: list[LeftLayer]) -> str:
    frozen = sum(isinstance(module, FrozenLayer) for module in model.modules())
    reasons = [f"{layer.name}: {layer.reason}" for layer in left[:5]]
    return "; ".join(reasons + ([no_layers(frozen)] if frozen or not left else []))


def _frozen(layer: _Layer, scheme: Scheme, scales: Mapping[str, float]) -> FrozenLayer:
    own = [scales.get(part.name) for part in layer.parts]
    frozen = frozen_form(layer.module, scheme, own).train(layer.module.training)
    frozen.layer_name = layer.name
    return frozen


def _replace(model: nn.Module, frozen: dict[int, FrozenLayer]) -> None:
    """Put the frozen layers, by the id of what they replace, into all places where those stand."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in frozen:
                parent._modules[name] = frozen[id(child)]


def _share_inputs(model: nn.Module) -> None:
    """Have the layers that always run on one input know of each other."""
    for group in siblings(model, FrozenLinear):
        shared = OperandState()
        shared.shared = True
        for layer in group.values():
            layer.input_group = shared


def _leave_fast_path(model: nn.Module) -> None:
    """nn.TransformerEncoder's fused inference path reads weights without calling its layers: it is turned off where
    they are frozen."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(layer, FrozenLinear) for layer in (module.linear1, module.linear2)
        ):
            module.activation_relu_or_gelu = 0
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            getattr(layer, "activation_relu_or_gelu", 1) == 0 for layer in module.layers
        ):
            # Its nested tensors are for that path alone.
            module.use_nested_tensor = False


def _tied(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(id(module))
    return {key for key, modules in holders.items() if len(modules) > 1}
