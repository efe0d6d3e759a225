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

from octavo.formats import E4M3
from octavo.inference import FrozenLinear
from octavo.inspection import statistics
from octavo.study.integer_linear import Int4Linear, Int8Linear, dequantize_int4, quantize_int8
from octavo.study.record import Row
from octavo.study.serving import linear_layers
from octavo.tensor import QuantizedTensor, quantize

_ROWS = 1024  # tokens kept of each layer's input


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
        layer = served.get_submodule(name)
        x, weight = sample.rows.float(), sample.weight.float()
        with torch.no_grad(), context():
            output = layer(sample.rows).float()
        exact = F.linear(x, weight, None if sample.bias is None else sample.bias.float())
        row: Row = {"kind": "layer_error", "method": key, "layer": name}
        row |= input_figures(layer, x) | {"input_amax": sample.amax}
        row |= {"weight_sqnr_db": sqnr_db(weight, stored_weight(layer)), "output_sqnr_db": sqnr_db(exact, output)}
        result.append(row)
    return result


def stored_weight(layer: nn.Module) -> torch.Tensor:
    """The fp32 values [N, K] that a served layer holds."""
    if isinstance(layer, Int8Linear):
        return layer.codes.float() * layer.scale.t()
    if isinstance(layer, Int4Linear):
        return dequantize_int4(layer.codes, layer.scale, layer.offset, layer.columns)
    assert isinstance(layer, FrozenLinear), "the served forms are FP8, INT8 and INT4"
    return QuantizedTensor(layer.weight, layer.weight_scale, layer.scheme.weight, torch.float32).dequantize()


def input_figures(layer: nn.Module, x: torch.Tensor) -> Row:
    """SQNR, underflow and saturation of a served layer's cast of its input x [M, K]; None where it casts nothing."""
    if isinstance(layer, FrozenLinear):
        scheme = layer.scheme
        codes = quantize(x, E4M3, scheme.activation, scale=layer.input_scale, power_of_two=scheme.power_of_two)
        figures = statistics(x, codes)
        return {
            "input_sqnr_db": figures.sqnr_db,
            "underflow": figures.underflow,
            "saturation": figures.saturation,
        }
    if isinstance(layer, Int8Linear):
        integer, scale = quantize_int8(x)
        lost = (integer == 0) & (x != 0)
        values = integer.float() * scale
        return {"input_sqnr_db": sqnr_db(x, values), "underflow": float(lost.float().mean()), "saturation": 0.0}
    return {"input_sqnr_db": None, "underflow": None, "saturation": 0.0}


def sqnr_db(exact: torch.Tensor, approximate: torch.Tensor) -> float | None:
    """10 log10 of signal over noise; None where there is no noise or no signal."""
    signal = float(exact.double().square().sum())
    noise = float((exact.double() - approximate.double()).square().sum())
    if signal == 0 or noise == 0 or not math.isfinite(noise):
        return None
    return 10 * math.log10(signal / noise)


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
