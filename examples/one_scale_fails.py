"""Why every tensor has a scale of its own: one global scale against one a tensor, on the magnitudes of a training step.

    python examples/one_scale_fails.py      # a few seconds on a CPU

Activations of about 1e2, weights of about 1e-2 and gradients of about 1e-5 lie seven decades apart. E4M3 spans five
from its smallest value to its largest, and keeps its precision over four and a half: no single scale fits all three.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import octavo
from octavo.recipes import CurrentScaling, StaticScaling

TOKENS, IN, OUT = 256, 512, 256


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    noise = (reference.double() - value.double()).square().sum()
    return math.inf if noise == 0 else float(10 * torch.log10(reference.double().square().sum() / noise))


def cast_row(name: str, x: Tensor, format: octavo.Format, scale: float) -> str:
    """Share of values that became 0, share that saturated, and signal to noise, under value = code * scale."""
    codes = octavo.cast(x / scale, format).float()
    underflow = ((codes == 0) & (x != 0)).float().mean()
    saturated = ((x / scale).abs() > format.max).float().mean()
    db = sqnr_db(x, codes * scale)
    return f"   {name:<12} {format!r:<6} {scale:9.2e}  {underflow:9.1%}  {saturated:9.1%}  {db:9.1f} dB"


def layer_sqnr(layer: octavo.Linear, x: Tensor, dy: Tensor, recipe: octavo.recipes.Recipe | None) -> dict[str, Tensor]:
    """Output and gradients of one step."""
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    with octavo.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(leaf)
    y.backward(dy)
    return {"output": y.detach(), "input grad": leaf.grad, "weight grad": layer.weight.grad}


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = 1e2 * torch.randn(TOKENS, IN, device=device)
    dy = 1e-5 * torch.randn(TOKENS, OUT, device=device)
    layer = octavo.Linear(IN, OUT, bias=False, device=device)
    with torch.no_grad():
        layer.weight.copy_(1e-2 * torch.randn(OUT, IN))
    tensors = {
        "activations": (x, octavo.E4M3),
        "weights": (layer.weight.detach(), octavo.E4M3),
        "gradients": (dy, octavo.E5M2),
    }
    fitting = {name: float(t.abs().max()) / format.max for name, (t, format) in tensors.items()}
    choices = {
        "one scale for all, fitting the activations": dict.fromkeys(tensors, fitting["activations"]),
        "one scale for all, fitting the weights": dict.fromkeys(tensors, fitting["weights"]),
        "one scale for all, between the two": dict.fromkeys(
            tensors, math.sqrt(fitting["activations"] * fitting["weights"])
        ),
        "one scale a tensor": fitting,
    }
    print("value = code * scale      format     scale  became 0  saturated   signal to noise")
    for title, scales in choices.items():
        print(title)
        for name, (tensor, format) in tensors.items():
            print(cast_row(name, tensor, format, scales[name]))

    reference = layer_sqnr(layer, x, dy, None)
    print("\na Linear's step, signal to noise in dB   output  input grad  weight grad")
    for title, scales in choices.items():
        recipe: octavo.recipes.Recipe = StaticScaling(
            input_scale=scales["activations"], weight_scale=scales["weights"], grad_output_scale=scales["gradients"]
        )
        row = layer_sqnr(layer, x, dy, CurrentScaling() if scales is fitting else recipe)
        values = [f"{sqnr_db(reference[name], row[name]):10.1f}" for name in reference]
        print(f"   {title:<42}" + "  ".join(values))


if __name__ == "__main__":
    main()
