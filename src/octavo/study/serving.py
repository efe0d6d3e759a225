"""Served models: the forms in which a finished model can be put to work, each a method with one key.

A method turns a model with 16-bit weights into its served form in place. Which form runs on the device's own FP8 or
INT8 hardware and which is emulated is said by `execution`, never guessed by the reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from octavo.inference import FrozenLinear, calibrate, freeze
from octavo.study.integer_linear import Int4Linear, Int8Linear, int8_is_native

HIGH, NATIVE, EMULATED = "high precision", "native", "emulated"


@dataclass(frozen=True, kw_only=True)
class ServingMethod:
    """How weights and activations of linear layers are held when serving."""

    key: str
    label: str
    weights: str
    activations: str
    scheme: str | None = None  # of octavo.inference.SCHEMES, for FP8
    layer: Callable[[nn.Linear], nn.Module] | None = None  # for integers

    def apply(self, model: nn.Module, calibration: Sequence[torch.Tensor]) -> None:
        """Turn `model` into its served form in place; `calibration` is token batches for static scales."""
        if self.layer is not None:
            for name, linear in linear_layers(model).items():
                replace_module(model, name, self.layer(linear))
        elif self.scheme is not None:
            scales = calibrate(model, calibration) if self.scheme == "tensor_static" else None
            freeze(model, self.scheme, input_scales=scales, exclude=head_patterns(model))


def execution_of(served: nn.Module) -> str:
    """`native`, `emulated` or `high precision`: how the products of a served model's linear layers run."""
    frozen = [module for module in served.modules() if isinstance(module, FrozenLinear)]
    if frozen:
        return NATIVE if all(module.is_native for module in frozen) else EMULATED
    integer = [module for module in served.modules() if isinstance(module, Int8Linear)]
    if integer:
        return NATIVE if int8_is_native(integer[0].codes.device) else EMULATED
    return HIGH


def serving_methods(half: str) -> dict[str, ServingMethod]:
    """All methods by key, the 16-bit one (`half`, "bf16" or "fp16") first, then by what is missed most if time ends."""
    name = half.upper()
    methods = [
        ServingMethod(key=half, label=name, weights=name, activations=name),
        ServingMethod(
            key="rowwise",
            label="FP8 row-wise",
            weights="E4M3, one scale an output channel",
            activations="E4M3, one scale a token",
            scheme="row",
        ),
        ServingMethod(
            key="tensor_static",
            label="FP8 tensor, static",
            weights="E4M3, one scale a tensor",
            activations="E4M3, one calibrated scale a tensor",
            scheme="tensor_static",
        ),
        ServingMethod(
            key="tensor_dynamic",
            label="FP8 tensor, dynamic",
            weights="E4M3, one scale a tensor",
            activations="E4M3, one scale a tensor, as they come",
            scheme="tensor_dynamic",
        ),
        ServingMethod(
            key="block128",
            label="FP8 block 128",
            weights="E4M3, 128×128 blocks",
            activations="E4M3, 1×128 blocks",
            scheme="block128",
        ),
        ServingMethod(key="mxfp8", label="MXFP8", weights="E4M3, MX 1×32", activations="E4M3, MX 1×32", scheme="mxfp8"),
        ServingMethod(
            key="int8",
            label="INT8",
            weights="INT8, one scale an output channel",
            activations="INT8, one scale a token",
            layer=Int8Linear,
        ),
        ServingMethod(
            key="int4", label="INT4 weights", weights="INT4, groups of 128", activations=name, layer=Int4Linear
        ),
    ]
    return {method.key: method for method in methods}


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that methods change, by qualified name; the head is not among them."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name != model.head_name
    }


def head_patterns(model: nn.Module) -> list[str]:
    """The regular expressions that leave the head of `model` (with `head_name`) out of conversions."""
    return [f"^{re.escape(str(model.head_name))}$"] if model.head_name else []


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` in the place called `name`."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def weight_bytes(model: nn.Module, names: Sequence[str]) -> int:
    """Bytes of the layers called `names`, scales included and biases not."""
    total = 0
    for name in names:
        for key, tensor in model.get_submodule(name).state_dict().items():
            if key != "bias":
                total += tensor.numel() * tensor.element_size()
    return total


def model_bytes(model: nn.Module) -> int:
    """Bytes of all tensors of the model, tied ones once."""
    seen: dict[int, int] = {}
    for tensor in model.state_dict().values():
        seen[tensor.data_ptr()] = max(seen.get(tensor.data_ptr(), 0), tensor.numel() * tensor.element_size())
    return sum(seen.values())
