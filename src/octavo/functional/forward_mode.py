"""Derivatives that no layer here has: those of forward mode, and the transforms of torch.func.

A kernel reads the values of a tensor and not the tangent that goes with them, `torch.autograd.forward_ad.make_dual` or
`torch.func.jvp`. With gradients enabled torch refuses that by itself, at the autograd Function of the layer; without
them there is none, and what came out would have no tangent, or that of a part of the layer. So it is looked for.

The check is one of an attribute where no forward-mode derivative is being taken. Compiled code is not checked.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from octavo.tensor import QuantizedTensor

_REMEDY = "Run it under octavo.autocast(enabled=False); of a frozen model, take the one it was frozen from"
FP8_PRODUCTS = f"FP8 products have no forward-mode derivative: the tangent would be lost here, or wrong. {_REMEDY}"


def refuse_tangents(*tensors: Tensor | None, why: str = FP8_PRODUCTS) -> None:
    """Raise RuntimeError if one of these has a tangent.

    Args:
        tensors: what a layer computes its output of.
        why: what the error says.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    if any(tensor is not None and _has_tangent(tensor) for tensor in tensors):
        raise RuntimeError(f"{why} (asked for by torch.func.jvp, jacfwd or torch.autograd.forward_ad)")


def refuse_transforms() -> None:
    """Raise RuntimeError: a transform of torch.func is active, and gradients are enabled."""
    raise RuntimeError(
        "a transform of torch.func (grad, vjp, jvp, vmap, …) is active, and FP8 products know backward() and"
        f" torch.autograd.grad alone. {_REMEDY}"
    )


def _has_tangent(tensor: Tensor) -> bool:
    # One that consists of codes and scales has none. What a transform has wrapped may have one of an outer level.
    if isinstance(tensor, QuantizedTensor):
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None
