"""`freeze`: a trained model for serving in FP8."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from octavo.conversion.converted import is_conv1d
from octavo.inference.frozen_linear import FrozenLinear
from octavo.inference.scheme import scheme_named
from octavo.tensor import QuantizedTensor


def freeze(
    model: nn.Module,
    scheme: str = "row",
    *,
    input_scales: Mapping[str, float] | None = None,
    exclude: Iterable[str] = (),
) -> list[str]:
    """Replace every linear layer of `model` by a `FrozenLinear`, in place -> the qualified names of those replaced.

    Args:
        model: trained; converted layers are taken as well. The root itself must not be a linear layer.
        scheme: "tensor_static", "tensor_dynamic", "row", "block128" or "mxfp8", see `octavo.inference.SCHEMES`.
        input_scales: what `calibrate` gave, for "tensor_static".
        exclude: regular expressions on qualified names of layers that stay as they are. A layer whose weight is tied to
            another module's, such as a language model's head, would be untied: it stays as well.

    Raises:
        ValueError: an unknown scheme, or a static one without a scale for some layer.
    """
    chosen = scheme_named(scheme)
    scales = input_scales or {}
    tied = _tied(model)
    patterns = list(exclude)
    names = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(module))
        and not any(re.search(pattern, name) for pattern in patterns)
        and id(module.weight) not in tied
    ]
    if "" in names:
        raise ValueError("the model is itself a linear layer: put it into a module, such as nn.Sequential")
    missing = [name for name in names if chosen.static and name not in scales]
    if missing:
        raise ValueError(f"scheme {scheme!r} has no input scale for {missing[0]!r}: calibrate the model first")
    for name in names:
        parent, _, child = name.rpartition(".")
        module = model.get_submodule(name)
        frozen = FrozenLinear(_matrix(module), module.bias, chosen, scales.get(name) if chosen.static else None)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), child, frozen.train(module.training))
    return names


def _matrix(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer has a weight"
    values = weight.detach()
    if isinstance(values, QuantizedTensor):
        values = values.dequantize()
    return values.t() if is_conv1d(module) else values


def _tied(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(id(parameter), set()).add(id(module))
    return {key for key, modules in holders.items() if len(modules) > 1}
