"""Swapping the linear layers of a model, and the end of a step."""

from __future__ import annotations

import copy
import enum
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import octavo.distributed  # noqa: F401  puts the agreement of amaxes across ranks in force
from octavo.compat.float8_experimental.float8_dynamic_linear import Float8DynamicLinear
from octavo.compat.float8_experimental.float8_linear import Float8Linear, Float8Options, TensorScalingType
from octavo.conversion.selection import candidates, checked_selection
from octavo.runtime import update_scales

Float8Layer = Float8Linear | Float8DynamicLinear
LayerFilter = Callable[[nn.Linear], bool]


class LinearType(enum.Enum):
    """The two kinds of layers."""

    DELAYED = "delayed"
    DYNAMIC = "dynamic"


def linear_requires_sync(
    linear_type: LinearType | TensorScalingType = TensorScalingType.DELAYED, *others: TensorScalingType
) -> bool:
    """True if a layer of this type, or with these scaling types of its operands, needs a sync each step."""
    return any(kind.value == "delayed" for kind in (linear_type, *others))


def get_float8_layers(model: nn.Module) -> list[Float8Linear]:
    """The layers of a model that need a sync."""
    return [module for module in model.modules() if isinstance(module, Float8Linear)]


def swap_linear_with_float8_linear(
    module: nn.Module,
    module_cls: type[Float8Layer] = Float8Linear,
    *,
    skip_fqn_list: Sequence[str] | None = None,
    emulate: bool = False,
    linear_layer_filter: LayerFilter | None = None,
    scaling_type_x: TensorScalingType = TensorScalingType.DELAYED,
    scaling_type_w: TensorScalingType = TensorScalingType.DELAYED,
) -> nn.Module:
    """Turn the `nn.Linear`s of a model into FP8 layers, in place; parameters stay the same objects.

    Args:
        module: the model. A root Linear is not changed: its FP8 twin, with the same Parameters, is returned.
        module_cls: Float8Linear (delayed scaling) or Float8DynamicLinear.
        skip_fqn_list: qualified names of modules that stay as they are, with all below them.
        emulate: products by emulation, as Octavo does where there are no FP8 units.
        linear_layer_filter: only layers for which it is true.
        scaling_type_x, scaling_type_w: DYNAMIC measures that operand in every call (Float8Linear).

    Returns:
        the model.
    """
    options = Float8Options(scaling_type_x, scaling_type_w, emulate=emulate)
    if isinstance(module, nn.Linear):
        if linear_layer_filter is None or linear_layer_filter(module):
            new = module_cls.from_float(module, emulate)
            new.become_float8(None, options)
            return new
        return module
    skipped = _checked_skips(module, skip_fqn_list or ())
    for layer in candidates(module, checked_selection(None, None, "all")):
        linear = layer.module
        if not isinstance(linear, nn.Linear) or isinstance(linear, (Float8Linear, Float8DynamicLinear)):
            continue
        if any(layer.name == fqn or layer.name.startswith(f"{fqn}.") for fqn in skipped):
            continue
        if linear_layer_filter is not None and not linear_layer_filter(linear):
            continue
        if layer.reasons:
            warnings.warn(f"{layer.name} stays in high precision: {layer.reasons[0]}", stacklevel=2)
            continue
        linear.__class__ = module_cls
        linear.become_float8(layer.name, options)  # type: ignore[operator]
    return module


def _checked_skips(module: nn.Module, names: Sequence[str]) -> Sequence[str]:
    known = {name for name, _ in module.named_modules()}
    for name in names:
        if name not in known:
            warnings.warn(f"skip_fqn_list: the model has no module {name!r}", stacklevel=3)
    return names


@torch.compiler.disable  # type: ignore[untyped-decorator]
def sync_float8_amax_and_scale_history(model: nn.Module, fp8_layers: Sequence[Float8Linear] | None = None) -> None:
    """End a step: new scales from the amaxes since the last sync, over all ranks if there are several.

    Call it after the backward and before `optimizer.step()`.

    Args:
        model: the model, compiled or not.
        fp8_layers: its layers, if the caller has them at hand from `get_float8_layers`.
    """
    layers = get_float8_layers(model) if fp8_layers is None else list(fp8_layers)
    if not layers:
        warnings.warn(
            "sync_float8_amax_and_scale_history: the model has no Float8Linear; was"
            " swap_linear_with_float8_linear(model, Float8Linear) called?",
            # Torch's function that keeps the compiler out calls this one.
            stacklevel=3,
        )
        return
    update_scales(nn.ModuleList(layers))
    for layer in layers:
        layer.amax_and_scale_synced = True


def get_float8_linear(
    linear_type: LinearType, linear_ref: nn.Linear, emulate: bool = False, **kwargs: Any
) -> Float8Layer:
    """A copy of `linear_ref` as an FP8 layer of the given type, with Parameters of its own."""
    kinds: dict[LinearType, type[Float8Layer]] = {
        LinearType.DELAYED: Float8Linear,
        LinearType.DYNAMIC: Float8DynamicLinear,
    }
    return kinds[linear_type].from_float(copy.deepcopy(linear_ref), emulate, **kwargs)
