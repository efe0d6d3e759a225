"""`freeze`: a trained model for serving in FP8."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from octavo.conversion.converted import is_conv1d
from octavo.conversion.fused import is_fused, kind_of
from octavo.conversion.selection import Candidate, candidates, checked_selection, unmatched_patterns
from octavo.inference.frozen_linear import FrozenLinear, check_input_scale
from octavo.inference.scheme import Scheme, scheme_named
from octavo.modules import FP8LinearMixin
from octavo.tensor import QuantizedTensor


def freeze(
    model: nn.Module,
    scheme: str = "row",
    *,
    input_scales: Mapping[str, float] | None = None,
    exclude: str | Iterable[str] = (),
) -> list[str]:
    """Replace every linear layer of `model` by a `FrozenLinear`, in place -> the qualified names of those replaced.

    A layer that stands in several places is replaced in all of them, and named once. Left as they are: layers whose
    weight is tied to another module's, such as a language model's head, since they would be untied; subclasses of
    nn.Linear with a forward of their own; and what `nn.MultiheadAttention` reads without calling it.

    Args:
        model: trained; converted layers are taken as well. The root itself must not be a linear layer.
        scheme: "tensor_static", "tensor_dynamic", "row", "block128" or "mxfp8", see `octavo.inference.SCHEMES`.
        input_scales: what `calibrate` gave, for "tensor_static".
        exclude: regular expressions on qualified names of layers that stay as they are. A warning is given if one
            matches no linear layer, or if nothing is left to replace.

    Raises:
        ValueError: an unknown scheme, no regular expression, a static scheme without a usable scale for some layer, or
            a layer that is more than a matrix product, such as `octavo.LayerNormLinear`, and is not excluded. The model
            is unchanged then.
    """
    chosen = scheme_named(scheme)
    scales = _checked_scales(chosen, input_scales)
    selection = checked_selection(None, exclude, "all")
    found = candidates(model, selection)
    tied = _tied(model)
    layers = [layer for layer in found if not _reasons(layer, tied)]
    if any(layer.name == "" for layer in layers):
        raise ValueError("the model is itself a linear layer: put it into a module, such as nn.Sequential")
    for layer in layers:
        _refuse_fused(layer)
        if chosen.static and layer.name not in scales:
            raise ValueError(
                f"scheme {scheme!r} has no input scale for {layer.name!r}: calibrate with batches that reach it, or"
                " exclude it"
            )
    for pattern in unmatched_patterns(found, selection):
        warnings.warn(f"octavo.inference.freeze: exclude pattern {pattern!r} matches no linear layer", stacklevel=2)
    if not layers:
        warnings.warn(f"octavo.inference.freeze replaced nothing: {_why_none(found, tied)}", stacklevel=2)
    frozen = {id(layer.module): _frozen(layer.module, chosen, scales.get(layer.name)) for layer in layers}
    _replace(model, frozen)
    _leave_fast_path(model)
    return [layer.name for layer in layers]


def _checked_scales(scheme: Scheme, scales: Mapping[str, float] | None) -> dict[str, float]:
    if scales is None:
        return {}
    if not scheme.static:
        raise ValueError(
            f"scheme {scheme.name!r} measures its activations and takes no input_scales: leave them out, or use"
            " 'tensor_static'"
        )
    for name, scale in scales.items():
        check_input_scale(scale, f"of {name!r} ")
    return {name: float(scale) for name, scale in scales.items()}


def _reasons(layer: Candidate, tied: set[int]) -> list[str]:
    """Why a layer stays as it is."""
    reasons = list(layer.reasons)
    module = layer.module
    if id(module.weight) in tied:
        reasons.append("its weight is tied to another module's")
    if isinstance(module, FP8LinearMixin) and module.bias is not None and module.added_bias() is None:
        reasons.append("it hands its bias out")
    return reasons


def _refuse_fused(layer: Candidate) -> None:
    """Raise ValueError for what a `FrozenLinear` cannot stand for."""
    if is_fused(layer.module):
        raise ValueError(
            f"{layer.name!r} is a {kind_of(layer.module)}, which is more than a matrix product and cannot be frozen:"
            f" exclude it (exclude=[{re.escape(layer.name)!r}]), or build the model of octavo.LayerNorm and"
            " octavo.Linear"
        )


def _why_none(found: list[Candidate], tied: set[int]) -> str:
    if not found:
        return "the model has no linear layer"
    return "; ".join(f"{layer.name}: {_reasons(layer, tied)[0]}" for layer in found[:5])


def _frozen(module: nn.Module, scheme: Scheme, input_scale: float | None) -> FrozenLinear:
    bias: Any = module.bias
    return FrozenLinear(_matrix(module), bias, scheme, input_scale).train(module.training)


def _matrix(module: nn.Module) -> Tensor:
    """The weight's values [N, K]."""
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer has a weight"
    values = weight.detach()
    if isinstance(values, QuantizedTensor):
        values = values.dequantize()
    return values.t() if is_conv1d(module) else values


def _replace(model: nn.Module, frozen: dict[int, FrozenLinear]) -> None:
    """Put the frozen layers, by the id of what they replace, into all places where those stand."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and id(child) in frozen:
                parent._modules[name] = frozen[id(child)]


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
