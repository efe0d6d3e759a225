"""`octavo.state_dict`: a model's parameters without FP8 state, for the way back."""

from __future__ import annotations

from typing import Any

from torch import nn

from octavo.modules import FP8LinearMixin, MLPPart
from octavo.recipes.recipe import OPERANDS
from octavo.tensor import QuantizedTensor


def state_dict(model: nn.Module, plain: bool = True) -> dict[str, Any]:
    """The state dict of a model.

    Args:
        model: any module.
        plain: leave the delayed-scaling state out and decode FP8 weights, so that it loads strictly into the model as
            it was before conversion. False gives `model.state_dict()`.
    """
    entries = model.state_dict()
    if not plain:
        return entries
    for name, module in model.named_modules():
        if isinstance(module, FP8LinearMixin):
            # A part of a larger layer has its entries among those of the layer.
            prefix = f"{name}{'_' if isinstance(module, MLPPart) else '.'}" if name else ""
            for operand in OPERANDS:
                entries.pop(f"{prefix}{operand}_scale", None)
                entries.pop(f"{prefix}{operand}_amax_history", None)
    for key, value in entries.items():
        if isinstance(value, QuantizedTensor):
            entries[key] = value.dequantize()
    return entries
