"""The fused inference path of nn.TransformerEncoder reads weights without calling its Linears.

Where those are converted, evaluation would silently run in high precision, so the path is switched off: of a layer by
its activation flag, of an encoder by not packing padded sequences into a nested tensor, which only that path takes.
"""

from __future__ import annotations

from torch import nn

_SAVED = "_fast_path_switch"


def leave_fast_path(model: nn.Module, converted: set[int]) -> list[str]:
    """Switch the path off around the layers whose ids are in `converted` -> a remark for each transformer layer."""
    remarks = []
    for name, module in model.named_modules():
        layers = [layer for layer in module.modules() if isinstance(layer, nn.TransformerEncoderLayer)]
        if not any({id(layer.linear1), id(layer.linear2)} & converted for layer in layers):
            continue
        if isinstance(module, nn.TransformerEncoder):
            _switch(module, "use_nested_tensor", False)
        elif isinstance(module, nn.TransformerEncoderLayer):
            _switch(module, "activation_relu_or_gelu", 0)
            remarks.append(f"{name or '(root)'}: the fused inference path is off, it would bypass its FP8 layers.")
    return remarks


def restore_fast_path(module: nn.Module) -> None:
    """Put back what `leave_fast_path` changed in one module."""
    if _SAVED in module.__dict__:
        name, value = module.__dict__.pop(_SAVED)
        setattr(module, name, value)


def _switch(module: nn.Module, name: str, off: int) -> None:
    module.__dict__.setdefault(_SAVED, (name, getattr(module, name)))
    setattr(module, name, off)
