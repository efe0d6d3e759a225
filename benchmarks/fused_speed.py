"""What `check_fused.py` times: each fused operation, and torch's operation followed by the cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import E4M3, E5M2
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.amax import partial_amax
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose
from octavo.kernels.norm_cast import Norm, norm_cast, norm_output

SHAPES = ((8192, 1280), (8192, 5120), (16384, 4096), (16384, 14336))
NORMS = ("layer", "rms")
FORWARD = (
    "layer norm delayed", "layer norm current", "rms norm delayed", "rms norm current",
    "gelu_erf delayed", "gelu_erf current", "gelu_tanh delayed", "swiglu delayed", "swiglu current", "srelu delayed",
)  # fmt: skip
BACKWARD = (
    "gelu_erf backward delayed", "gelu_erf backward current", "gelu_tanh backward delayed", "swiglu backward delayed",
    "swiglu backward current",
)  # fmt: skip
BF16 = torch.bfloat16
RULE = ScaleRule()


class Family(NamedTuple):
    """A fused operation, the pair that it replaces, and the bytes that the fused one must move."""

    name: str
    fused: Callable[[], Any]
    pair: Callable[[], Any]
    moved: float


def families(shape: tuple[int, int], names: tuple[str, ...]) -> Iterator[Family]:
    """Those of `names`, on normal data; shape is that of the result, before the gate if there is one."""
    for name in names:
        if "norm" in name:
            yield norm_family(shape, name)
        elif "backward" in name:
            yield backward_family(shape, name)
        else:
            yield forward_family(shape, name)


class Operand:
    """How a result is cast: by a scale, gathering its amax, or by its own amax."""

    def __init__(self, name: str, backward: bool = False) -> None:
        self.current, self.format = "current" in name, E5M2 if backward else E4M3
        self.scale = torch.tensor(0.02, device="cuda")
        self.gathered = torch.zeros((), device="cuda")
        self.options = {"inf_to_nan": backward, "column_sum": backward}

    def cast(self, y: Tensor, amaxes: Tensor | None = None) -> Any:
        """Both layouts of y; its amaxes are measured unless given."""
        if self.current:
            amaxes = partial_amax(y) if amaxes is None else amaxes
            return cast_transpose(y, self.format, amaxes, amaxes, rule=RULE, **self.options)
        return cast_transpose(y, self.format, self.scale, self.scale, gathered=self.gathered, **self.options)


def norm_family(shape: tuple[int, int], name: str) -> Family:
    """LayerNorm or RMSNorm with weight, and bias of the first."""
    kind = "layer" if name.startswith("layer") else "rms"
    x, norm, operand = torch.randn(shape, device="cuda").to(BF16), Norm(kind, through=BF16), Operand(name)
    weight = torch.rand(shape[1], device="cuda").add(0.5).to(BF16)
    bias = torch.randn(shape[1], device="cuda").to(BF16) if kind == "layer" else None

    def fused() -> Any:
        if operand.current:
            result = norm_output(x, norm, weight, bias)
            return operand.cast(result.output, result.amaxes)
        return norm_cast(x, norm, weight, bias, E4M3, operand.scale, gathered=operand.gathered)

    def pair() -> Any:
        if kind == "layer":
            return operand.cast(F.layer_norm(x, (shape[1],), weight, bias))
        return operand.cast(F.rms_norm(x, (shape[1],), weight, 1e-5))

    return Family(name, fused, pair, (8 if operand.current else 4) * x.numel())


def forward_family(shape: tuple[int, int], name: str) -> Family:
    """An activation; a gated one reads twice as much."""
    activation, operand = name.split()[0], Operand(name)
    gated = activation == "swiglu"
    x = torch.randn(shape[0], shape[1] * (2 if gated else 1), device="cuda").to(BF16)
    plain: dict[str, Callable[[], Tensor]] = {
        "gelu_erf": lambda: F.gelu(x),
        "gelu_tanh": lambda: F.gelu(x, approximate="tanh"),
        "swiglu": lambda: F.silu(x[:, : shape[1]]) * x[:, shape[1] :],
        "srelu": lambda: F.relu(x).square(),
    }

    def fused() -> Any:
        if operand.current:
            result = activation_output(x, activation, BF16)
            return operand.cast(result.output, result.amaxes)
        return activation_cast(x, activation, E4M3, operand.scale, through=BF16, gathered=operand.gathered)

    elements = shape[0] * shape[1]
    moved = ((4 if gated else 2) + (6 if operand.current else 2)) * elements
    return Family(name, fused, lambda: operand.cast(plain[activation]()), moved)


def backward_family(shape: tuple[int, int], name: str) -> Family:
    """The gradient of an activation's input, with column sums."""
    activation, operand = name.split()[0], Operand(name, backward=True)
    gated = activation == "swiglu"
    x = torch.randn(shape[0], shape[1] * (2 if gated else 1), device="cuda").to(BF16)
    grad, aten = torch.randn(shape, device="cuda").to(BF16), torch.ops.aten

    def swiglu() -> Tensor:
        first, second = x[:, : shape[1]], x[:, shape[1] :]
        return torch.cat([aten.silu_backward(grad * second, first), grad * F.silu(first)], dim=1)

    plain: dict[str, Callable[[], Tensor]] = {
        "gelu_erf": lambda: aten.gelu_backward(grad, x),
        "gelu_tanh": lambda: aten.gelu_backward(grad, x, approximate="tanh"),
        "swiglu": swiglu,
    }

    def fused() -> Any:
        if operand.current:
            result = activation_backward_output(grad, x, activation, BF16)
            return operand.cast(result.output, result.amaxes)
        return activation_backward_cast(
            grad, x, activation, E5M2, operand.scale, through=BF16, gathered=operand.gathered, column_sum=True
        )

    elements, width = shape[0] * shape[1], 2 if gated else 1
    moved = (2 + 2 * width + (6 if operand.current else 2) * width) * elements
    return Family(name, fused, lambda: operand.cast(plain[activation]()), moved)
