"""Layers that always run on one input: their inputs share one state of delayed scaling, and are quantized once.

Known by their names in the models of `transformers` and `diffusers`: query, key and value of self-attention, gate and
up of a gated MLP. (With other scalings there is no state, and `octavo.functional.shared_input` needs no names.) In
cross-attention query and key run on different inputs, so nothing is shared there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from octavo.modules import FP8LinearMixin

_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
Layer = TypeVar("Layer", bound=nn.Module)
_CROSS = re.compile(r"cross|encoder_attn|encdec|attn2|multihead_attn", re.IGNORECASE)


def share_inputs(model: nn.Module) -> list[tuple[str, ...]]:
    """Give siblings one state for their inputs -> the names of each group."""
    groups = []
    for group in siblings(model, FP8LinearMixin):
        members = list(group.values())
        if _alike(members):
            for layer in members[1:]:
                layer.delayed_state.share_input(members[0].delayed_state)
            groups.append(tuple(group))
    return groups


def siblings(model: nn.Module, kind: type[Layer]) -> Iterator[dict[str, Layer]]:
    """Layers of a class that always run on one input, by their names, group by group."""
    for name, parent in model.named_modules():
        if _CROSS.search(name) or _CROSS.search(type(parent).__name__):
            continue
        for names in _SIBLINGS:
            layers = {f"{name}.{one}" if name else one: getattr(parent, one, None) for one in names}
            members = {own: layer for own, layer in layers.items() if isinstance(layer, kind)}
            if len(members) == len(names):
                yield members


def _alike(layers: list[FP8LinearMixin]) -> bool:
    """True if nothing but their weights tells the layers apart."""
    first = layers[0]
    return len({id(layer) for layer in layers}) == len(layers) and all(
        layer.recipe is first.recipe
        and layer.matrix().shape[1] == first.matrix().shape[1]
        and not layer.delayed_state.input.is_known
        and not first.delayed_state.input.is_known
        for layer in layers
    )
