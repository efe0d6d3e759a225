"""`calibrate`: scales of activations from a few batches, for serving with static scales.

The scale of a layer's input is chosen once from what was seen:

    max          scale = amax / M: nothing seen saturates
    percentile   scale = (the 99.99th percentile of magnitudes, of each batch, the largest) / M
    mse          of amax * (1, 0.9, …, 0.4), the one whose cast has the least squared error on the last batch
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo.conversion.converted import is_conv1d
from octavo.formats import E4M3
from octavo.tensor import quantize

Method = Literal["max", "percentile", "mse"]
PERCENTILE = 0.9999
# torch.quantile takes at most 2^24 elements.
_SAMPLE = 1 << 20


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], method: Method = "max") -> dict[str, float]:
    """Run `model` on batches and choose a scale for the input of each linear layer -> {qualified name: scale}.

    Args:
        model: in high precision; its training flag is put back afterwards.
        batches: each a tensor, a tuple of arguments, or a dict of keyword arguments of the model.
        method: "max", "percentile" or "mse".

    Raises:
        ValueError: an unknown method, or no batch.
    """
    if method not in ("max", "percentile", "mse"):
        raise ValueError(f"method is {method!r}: expected 'max', 'percentile' or 'mse'")
    seen: dict[str, float] = {}
    handles = [
        module.register_forward_pre_hook(_hook(name, method, seen))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or is_conv1d(module)
    ]
    was_training = model.training
    model.eval()
    try:
        count = 0
        for batch in batches:
            _call(model, batch)
            count += 1
    finally:
        model.train(was_training)
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ValueError("calibrate got no batch: give at least one")
    return {name: (value or 1.0) / E4M3.max for name, value in seen.items()}


def _hook(name: str, method: Method, seen: dict[str, float]) -> Any:
    def look(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        x = arguments[0].detach().float()
        if method == "mse":
            seen[name] = _least_error(x)
        else:
            seen[name] = max(seen.get(name, 0.0), _magnitude(x, method))

    return look


def _magnitude(x: Tensor, method: Method) -> float:
    magnitude = x.abs().flatten()
    magnitude = magnitude[magnitude.isfinite()]
    if not magnitude.numel():
        return 0.0
    if method == "max":
        return magnitude.amax().item()
    stride = -(-magnitude.numel() // _SAMPLE)
    return torch.quantile(magnitude[::stride], PERCENTILE).item()


def _least_error(x: Tensor) -> float:
    largest = _magnitude(x, "max")
    if largest == 0:
        return 0.0
    errors = {}
    for tenths in range(10, 3, -1):
        amax = largest * tenths / 10
        error = quantize(x, E4M3, scale=amax / E4M3.max).dequantize() - x
        errors[amax] = error.square().sum().item()
    return min(errors, key=lambda amax: errors[amax])


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, dict):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        model(batch)
