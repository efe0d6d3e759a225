"""What the default filter would choose where a model is going: conversion looks at where the parameters lie.

A model that is converted on the CPU, or on the meta device, and moved to a GPU then keeps every layer in FP8, those too
that FP8 slows down there. The report says how many they are.
"""

from __future__ import annotations

import torch

from octavo.conversion.gain import method_of
from octavo.conversion.selection import Candidate, Selection, is_weighed, speed_reasons
from octavo.kernels.scaled_mm import device_reasons
from octavo.recipes import Recipe


def elsewhere_remarks(found: list[Candidate], converted: set[int], selection: Selection, recipe: Recipe) -> list[str]:
    """What to know of a choice that was made where speed is no matter; at most one remark.

    Args:
        found: layers that were looked at.
        converted: ids of those that are in FP8 now, or would be.
        selection: only the default filter weighs anything.
        recipe: of the conversion, with its overrides.
    """
    layers = [layer for layer in found if id(layer.module) in converted and not is_weighed(layer.module)]
    if selection.filter is not None or not layers:
        return []
    card, kind = card_at_hand(), _device_type(layers[0])
    if card is None and kind != "meta":
        return [
            f"the default filter leaves no layer out for its speed on {kind}, and its choice stays when the model"
            " moves: for a GPU's, move the model first, then convert."
        ]
    slower = sum(_slows_down(layer, recipe) for layer in layers)
    if not slower:
        return []
    where = "a GPU with FP8 units" if card is None else card
    return [
        f"{slower} of these layers would be left out on {where}: move the model first, then convert (filter='all' keeps"
        " them)."
    ]


def card_at_hand() -> str | None:
    """The name of the CUDA device in use, if it multiplies FP8."""
    if not torch.cuda.is_available() or device_reasons(torch.device("cuda", torch.cuda.current_device())):
        return None
    return torch.cuda.get_device_name()


def _device_type(layer: Candidate) -> str:
    device: torch.device = layer.module.weight.device  # type: ignore[assignment]
    return device.type


def _slows_down(layer: Candidate, recipe: Recipe) -> bool:
    own = recipe.for_layer(layer.name)
    method = None if own is None else method_of(own)
    return method is not None and bool(speed_reasons(layer.in_features, layer.out_features, method=method))
