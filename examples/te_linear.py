"""Where the error of an FP8 Linear comes from: Transformer Engine's first example, taken apart.

    python examples/te_linear.py        # a few seconds on a CPU, where FP8 is emulated; native on a Hopper GPU

A Linear 768 -> 768 runs on (1024, 768) in float32, in FP8, and in FP8 on an input and a weight that FP8 holds exactly.
The first two differ by the rounding of FP8 (about 4 % on normal data; less once scales follow the data), the last from
its float32 twin by accumulation and output alone: emulated, the sums of such values are exact in float32 and nothing is
left; Hopper's accumulator leaves about 3e-4.
"""

from __future__ import annotations

import torch
from octavo.compat.transformer_engine.common.recipe import DelayedScaling, Format
from torch import Tensor

import octavo
import octavo.compat.transformer_engine.pytorch as te

torch.manual_seed(12345)

fp8_recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max")


def fp8_forward_backward(layer: te.Linear, inp: Tensor) -> Tensor:
    """The forward inside the context, the backward outside."""
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        out = layer(inp)
    out.mean().backward()
    return out.detach()


def relative(error: Tensor, reference: Tensor) -> float:
    return float(error.double().norm() / reference.double().norm())


def corner(name: str, tensor: Tensor) -> None:
    print(f"{name}, {tuple(tensor.shape)} {tensor.dtype}, upper left corner")
    for row in tensor[:3, :5].tolist():
        print("   " + "  ".join(f"{value:9.5f}" for value in row))


def split_error(inp: Tensor, layer: te.Linear, scale: Tensor, out_fp8: Tensor) -> None:
    """Print how much each step adds: y8 - y = (x8 - x) w^T + x (w8 - w)^T + (x8 - x) (w8 - w)^T + the rest."""
    x, w, b = (t.detach().double() for t in (inp, layer.weight, layer.bias))
    x8 = octavo.cast_to_representable(inp, scale=float(scale[0])).double()
    w8 = octavo.cast_to_representable(layer.weight.detach(), scale=float(scale[1])).double()
    exact = x @ w.t() + b
    parts = {
        "cast of x": (x8 - x) @ w.t(),
        "cast of w": x @ (w8 - w).t(),
        "both at once": (x8 - x) @ (w8 - w).t(),
        "accumulation and output": out_fp8.double() - (x8 @ w8.t() + b),
    }
    print("\nwhere the difference comes from, relative to the exact product:")
    for name, part in parts.items():
        print(f"   {name:<24} {relative(part, exact):.2e}")
    total = sum(parts.values())
    print(f"   {'together':<24} {relative(total, exact):.2e}")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    my_linear = te.Linear(768, 768, bias=True, device=device)
    inp = torch.randn(1024, 768, device=device)
    scale = my_linear.fp8_meta["scaling_fwd"].scale  # 1: nothing has been seen yet

    out_fp32 = my_linear(inp).detach()
    out_fp8 = fp8_forward_backward(my_linear, inp)
    corner("fp32", out_fp32)
    corner("FP8", out_fp8)

    exact_linear = te.Linear(768, 768, bias=True, device=device)
    with torch.no_grad():
        exact_linear.weight.copy_(octavo.cast_to_representable(my_linear.weight))
    inp_representable = octavo.cast_to_representable(inp)
    out_representable_fp32 = exact_linear(inp_representable).detach()
    out_representable = fp8_forward_backward(exact_linear, inp_representable)
    corner("FP8 on representable input and weight", out_representable)

    plain = relative(out_fp8 - out_fp32, out_fp32)
    representable = relative(out_representable - out_representable_fp32, out_representable_fp32)
    print(f"\nFP8 against fp32:                                       {plain:.2e} = {100 * plain:.2f} %")
    print(f"FP8 against fp32, representable input and weight:       {representable:.2e}")
    split_error(inp, my_linear, scale, out_fp8)

    out_next = fp8_forward_backward(my_linear, inp)
    next_error = relative(out_next - out_fp32, out_fp32)
    print(f"\nthe next step, with scales from this one:               {next_error:.2e} = {100 * next_error:.2f} %")
    meta = my_linear.fp8_meta
    print("\nafter one step, amax and scale (TE's, a multiplier):")
    for direction, names in (("scaling_fwd", ("input", "weight")), ("scaling_bwd", ("grad_output",))):
        for i, name in enumerate(names):
            amax, multiplier = meta[direction].amax_history[-1, i], meta[direction].scale[i]
            print(f"   {name:<12} amax {amax:.3e}   scale {multiplier:.3e}")


if __name__ == "__main__":
    main()
