"""How much each linear layer loses to a method: signal-to-noise ratios of weight, input and output, layer by layer.

    SQNR = 10 log10( sum x² / sum (x - x̂)² )  in dB

A layer's inputs are those of the 16-bit model, so that its own error is seen and not the ones before it. The output is
the served layer's own, against the fp32 product of unquantized operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from octavo.formats import E4M3, finfo
from octavo.study.integer_linear import dequantize_int4, quantize_int4, quantize_int8
from octavo.study.record import Row
from octavo.study.serving import linear_layers
from octavo.tensor import quantize

_ROWS = 1024  # tokens kept of each layer's input
_FP8_GRANULARITY = {  # key: (of the weight [N, K], of the input [M, K])
    "tensor_static": ("tensor", "tensor"),
    "tensor_dynamic": ("tensor", "tensor"),
    "rowwise": ("row", "row"),
    "block128": ((128, 128), (1, 128)),
    "mxfp8": ("mx", "mx"),
}


@dataclass(frozen=True)
class LayerSample:
    """What one layer saw: some rows of its input [M, K], its amax over all batches, its weight [N, K] and bias."""

    rows: torch.Tensor
    amax: float
    weight: torch.Tensor
    bias: torch.Tensor | None


def sample_layers(
    model: nn.Module, batches: Sequence[torch.Tensor], context: Callable[[], AbstractContextManager[object]]
) -> dict[str, LayerSample]:
    """Run `model` over token batches and keep what each linear layer saw."""
    rows: dict[str, torch.Tensor] = {}
    amaxes: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            rows.setdefault(name, x[:_ROWS].clone())
            amax = x.abs().amax()
            amaxes[name] = torch.maximum(amaxes[name], amax) if name in amaxes else amax

        return hook

    layers = linear_layers(model)
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad(), context():
            for batch in batches:
                model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        name: LayerSample(rows[name], float(amaxes[name]), layer.weight.detach().clone(), _detached(layer.bias))
        for name, layer in layers.items()
    }


def layer_error_rows(
    key: str,
    samples: Mapping[str, LayerSample],
    served: nn.Module,
    context: Callable[[], AbstractContextManager[object]],
) -> list[Row]:
    """The `layer_error` rows of one method, whose served model is `served`."""
    result = []
    for name, sample in samples.items():
        x, weight = sample.rows.float(), sample.weight.float()
        weight_stored = stored_weight(key, weight)
        input_stored, saturation = stored_input(key, x, sample.amax)
        with torch.no_grad(), context():
            output = served.get_submodule(name)(sample.rows).float()
        exact = F.linear(x, weight, None if sample.bias is None else sample.bias.float())
        nonzero = x != 0
        result.append(
            {
                "kind": "layer_error",
                "method": key,
                "layer": name,
                "weight_sqnr_db": sqnr_db(weight, weight_stored),
                "input_sqnr_db": sqnr_db(x, input_stored),
                "output_sqnr_db": sqnr_db(exact, output),
                "input_amax": sample.amax,
                "underflow": float(((input_stored == 0) & nonzero).sum() / nonzero.sum().clamp(min=1)),
                "saturation": saturation,
            }
        )
    return result


def stored_weight(key: str, weight: torch.Tensor) -> torch.Tensor:
    """The fp32 values that a method stores of a weight [N, K]."""
    if key == "int8":
        codes, scale = quantize_int8(weight)
        return codes.float() * scale
    if key == "int4":
        return dequantize_int4(*quantize_int4(weight), weight.shape[1])
    return quantize(weight, E4M3, _FP8_GRANULARITY[key][0]).dequantize()


def stored_input(key: str, x: torch.Tensor, calibrated_amax: float) -> tuple[torch.Tensor, float]:
    """The fp32 values that a method makes of an input [M, K], and the share of them that saturates."""
    if key == "int8":
        codes, scale = quantize_int8(x)
        return codes.float() * scale, 0.0
    if key == "int4":
        return x, 0.0
    if key == "tensor_static":
        scale_value = calibrated_amax / finfo(E4M3).max if calibrated_amax > 0 else 1.0
        values = quantize(x, E4M3, "tensor", scale=scale_value).dequantize()
        return values, float((x.abs() > calibrated_amax).float().mean())
    return quantize(x, E4M3, _FP8_GRANULARITY[key][1]).dequantize(), 0.0


def sqnr_db(exact: torch.Tensor, approximate: torch.Tensor) -> float | None:
    """10 log10 of signal over noise; None where there is no noise or no signal."""
    signal = float(exact.double().square().sum())
    noise = float((exact.double() - approximate.double()).square().sum())
    if signal == 0 or noise == 0 or not math.isfinite(noise):
        return None
    return 10 * math.log10(signal / noise)


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
