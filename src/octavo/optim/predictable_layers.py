"""Which layers of a model have a weight whose scale can be predicted, and which param group each weight is in.

A weight has one group, or none (`FROZEN`), or its parts have several (`MEASURED`): see `bound_table`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from octavo.modules import FP8LinearMixin
from octavo.optim.bound_table import FROZEN, MEASURED
from octavo.runtime import takes_bound
from octavo.scaling import TENSOR
from octavo.tensor import QuantizedTensor


def group_indices(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    """The index of the group of each parameter, by its identity."""
    return {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


def group_of(layer: Any, indices: dict[int, int]) -> int:
    """The one group of a weight; FROZEN if it has none, or is there no more; MEASURED if its parts differ."""
    if not isinstance(layer, FP8LinearMixin):
        return FROZEN
    groups = {indices.get(id(part), FROZEN) for part in layer.weight_parts()}
    return groups.pop() if len(groups) == 1 else MEASURED


# The reason of a layer that another prediction has.
PREDICTED_ALREADY = "it is predicted already: remove() that first"
_NO_PARAMETER = ", no plain parameter"
_FOREIGN = "its weight is trained, and not by this optimizer"
_IN_FP8_ALONE = "its weight exists in FP8 alone"
_IN_SEVERAL_GROUPS = "its weight lies in several param groups"
_OTHER_RECIPE = "octavo.convert(model, CurrentScaling()) or DelayedScaling() first"
# Layer and param group, of all layers of one device and dtype; those of one group side by side.
Rows = list[tuple[Any, int]]


def predictable_layers(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[list[str], dict[str, str], list[Rows]]:
    """(names of the layers that can be predicted, reasons of those that cannot, the rows of each table)."""
    groups = group_indices(optimizer)
    left: dict[str, str] = {}
    found: dict[tuple[torch.device, torch.dtype], list[tuple[str, Any, int]]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, FP8LinearMixin):
            reason = _reason(layer, groups)
            if reason:
                left[name] = reason
                continue
            part = layer.weight_parts()[0]
            found.setdefault((part.device, part.dtype), []).append((name, layer, group_of(layer, groups)))
    tables = [sorted(rows, key=lambda row: row[2]) for rows in found.values()]
    names = [name for rows in tables for name, _, _ in rows]
    return names, left, [[(layer, group) for _, layer, group in rows] for rows in tables]


def remedies(reasons: Iterable[str]) -> str:
    """What to do about layers that are left for these reasons, of each kind once; empty where the reasons say it."""
    known = {
        _FOREIGN: "give the optimizer that trains these weights",
        _IN_FP8_ALONE: "build the model without octavo.quantized_init",
        _IN_SEVERAL_GROUPS: "give the parts of a weight one param group",
        PREDICTED_ALREADY: "",
    }
    found = dict.fromkeys(
        "" if reason.endswith(_NO_PARAMETER) else known.get(reason, _OTHER_RECIPE) for reason in reasons
    )
    return "; ".join(filter(None, found))


def _reason(layer: FP8LinearMixin, groups: dict[int, int]) -> str:
    """Why the weight of a layer is measured; empty if its scale can be predicted."""
    parts = layer.weight_parts()
    spec = None if layer.recipe is None else layer.recipe.linear.weight
    if spec is not None and (spec.granularity is not TENSOR or spec.scaling == "static"):
        return f"{type(layer.recipe).__name__} measures no scale of the whole weight"
    if layer.recipe is not None and not takes_bound(layer.recipe.linear):
        return f"{type(layer.recipe).__name__} rounds the weight by chance, or casts it in two ways"
    if any(isinstance(part, QuantizedTensor) for part in parts):
        return _IN_FP8_ALONE
    if any(type(part) is not nn.Parameter for part in parts):
        return f"its weight is a {type(parts[0]).__name__}{_NO_PARAMETER}"
    if layer.delayed_state.weight_bound is not None:
        return PREDICTED_ALREADY
    of_parts = {groups.get(id(part), FROZEN) for part in parts}
    if any(part.requires_grad and id(part) not in groups for part in parts):
        return _FOREIGN
    return _IN_SEVERAL_GROUPS if len(of_parts) > 1 else ""
