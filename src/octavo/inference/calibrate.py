"""`calibrate`: scales of activations from a few batches, for serving with static scales.

The scale of a layer's input is chosen once, from all that was seen:

    max          scale = amax / M: nothing seen saturates
    percentile   scale = (the 99.99th percentile of magnitudes) / M
    mse          of amax * (1, 0.9, …, 0.4), the one whose cast has the least squared error

The last two count magnitudes rounded to bf16 in a histogram of all its 2^15 values: exact for bf16 models, within 2^-9
for others, and the same in whatever order the batches come. What is not finite is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from octavo.formats import E4M3
from octavo.inference.freezing import Freezing, freezes
from octavo.runtime.given_model import check_batches, check_model, output_of, told_of_one_batch
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from octavo.tensor import quantize, warn_user

Method = Literal["max", "percentile", "mse"]
METHODS = ("max", "percentile", "mse")
PERCENTILE = 0.9999
# Magnitudes of bf16 below infinity, by their bits.
_MAGNITUDES = 0x7F80
_REMEDY = (
    "leave out what it does not take, such as targets. Of batches that are (inputs, targets), as those of a DataLoader,"
    " give (inputs for inputs, _ in batches)"
)
_ONE_BATCH = "give a list of one without what the model does not take: [inputs]"


@torch.no_grad()
def calibrate(model: nn.Module, batches: Iterable[Any], method: Method = "max") -> dict[str, float]:
    """Run `model` on batches and choose a scale for the input of each linear layer -> {qualified name: scale}.

    Layers that no batch reached have no entry; nor have experts that no token reached. One whose inputs were all zero
    gets 1 / M; so does one, with a warning, of whose inputs none was finite. Of an `octavo.LayerNormLinear` it is the
    scale of the normalised input; an `octavo.LayerNormMLP` has an entry `<name>.fc1` for that, and `<name>.fc2` for
    the output of its activation; an `octavo.GroupedLinear` one for each expert, `<name>.expert0` and so on.

    Args:
        model: in high precision; runs in evaluation mode, and every module's training flag is put back afterwards.
        batches: each a tensor, a tuple or list of arguments, or a mapping of keyword arguments of the model. What the
            model does not take is left out before: `calibrate(model, (inputs for inputs, _ in loader))`.
        method: "max", "percentile" or "mse".

    Returns:
        value = code * scale; positive, from 2^-126 to 2^126.

    Raises:
        TypeError: the model is no module.
        ValueError: an unknown method, weights on the meta device, no batch, one batch instead of several, a batch
            that the model does not take, or a model without linear layers.
    """
    check_model(model, "octavo.calibrate")
    check_batches(batches, "octavo.calibrate")
    _check_has_values(model)
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected 'max', 'percentile' or 'mse'")
    layers = {name: (module, freezes(module)) for name, module in model.named_modules()}
    if not any(freezing for _, freezing in layers.values()):
        raise ValueError(f"{type(model).__name__} has no linear layer to calibrate: calibrate before freezing")
    seen: dict[str, _Seen] = {}
    training = [(module, module.training) for module in model.modules()]
    handles: list[Any] = []
    count = 0
    try:
        for name, (layer, freezing) in layers.items():
            if freezing is not None:
                handles.append(layer.register_forward_pre_hook(_hook(name, freezing, seen), with_kwargs=True))
        model.eval()
        for batch in batches:
            with told_of_one_batch(batches, "octavo.calibrate", _ONE_BATCH):
                output_of(model, batch, "octavo.calibrate", _REMEDY)
            count += 1
    finally:
        for module, flag in training:
            module.training = flag
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ValueError("calibrate got no batch: give at least one")
    _warn_of_nothing_finite([name for name, inputs in seen.items() if inputs.any and not inputs.any_finite])
    return {name: _scale(inputs.amax_for(method)) for name, inputs in seen.items()}


def _check_has_values(model: nn.Module) -> None:
    """Raise ValueError if a weight is on the meta device."""
    for name, tensor in model.named_parameters():
        if tensor.is_meta:
            raise ValueError(
                f"octavo.calibrate: {name} is on the meta device, which has shapes and no values: give the model its"
                " weights first, model.to_empty(device=...) and model.load_state_dict(...)"
            )


def _warn_of_nothing_finite(names: list[str]) -> None:
    if names:
        shown = ", ".join(repr(name) for name in names[:4]) + (", …" if len(names) > 4 else "")
        warn_user(
            f"octavo.calibrate: of {len(names)} layer{'s' if len(names) > 1 else ''} ({shown}) every input was NaN or"
            f" inf, and the scale is that of zeros, 1 / {E4M3.max:g}: look for what is not finite in the batches and in"
            " the weights before these layers, and calibrate again"
        )


class _Seen:
    """What one layer's inputs were: the largest magnitude, and how often each one came."""

    def __init__(self) -> None:
        self.amax = 0.0
        # Elements were seen, and whether one of them was finite.
        self.any = self.any_finite = False
        self.counts: Tensor = torch.zeros(_MAGNITUDES, dtype=torch.int64)

    def add(self, x: Tensor) -> None:
        magnitude = x.detach().float().abs().flatten()
        self.any |= magnitude.numel() > 0
        magnitude = magnitude[magnitude.isfinite()]
        if magnitude.numel():
            self.any_finite = True
            self.amax = max(self.amax, magnitude.amax().item())
            bits = magnitude.bfloat16().view(torch.int16).int().clamp(max=_MAGNITUDES - 1)
            self.counts += torch.bincount(bits, minlength=_MAGNITUDES).cpu()

    def amax_for(self, method: Method) -> float:
        """The amax to provide for."""
        if method == "max" or self.amax == 0:
            return self.amax
        magnitudes = torch.arange(_MAGNITUDES, dtype=torch.int16).view(torch.bfloat16).float()
        if method == "percentile":
            cumulative = self.counts.cumsum(0).double()
            return magnitudes[int((cumulative < PERCENTILE * cumulative[-1]).sum())].item() or self.amax
        present = self.counts > 0
        return _least_error(magnitudes[present], self.counts[present].double(), self.amax)


def _least_error(magnitudes: Tensor, counts: Tensor, largest: float) -> float:
    """Of shares of `largest`, the one under whose scale the magnitudes lose least."""
    errors = {}
    for tenths in range(10, 3, -1):
        amax = largest * tenths / 10
        error = quantize(magnitudes, E4M3, scale=_scale(amax)).dequantize().double() - magnitudes.double()
        errors[amax] = (error.square() * counts).sum().item()
    return min(errors, key=lambda amax: errors[amax])


def _scale(amax: float) -> float:
    """amax / M as a float32 whose reciprocal is a normal number too; 1 / M of an amax of 0."""
    return min(max((amax or 1.0) / E4M3.max, SMALLEST_MULTIPLIER), LARGEST_MULTIPLIER)


def _hook(
    name: str, freezing: Freezing, seen: dict[str, _Seen]
) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    def look(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        for suffix, x in freezing.inputs(module, arguments, keywords):
            seen.setdefault(f"{name}{suffix}".removeprefix("."), _Seen()).add(x)

    return look
