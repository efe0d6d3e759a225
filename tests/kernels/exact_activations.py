"""Activations by torch in float64, their gradients by autograd, and how far float32 may be; for tests of kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from tests.kernels.agreement import steps_between
from torch import Tensor
from torch.nn import functional as F

from octavo.formats import E4M3, E5M2, cast
from octavo.kernels.activations import GATED

UNIT = 2.0**-24
TRANSCENDENTAL = ("gelu_tanh", "gelu_erf", "silu", "qgelu", "sigmoid")
PLAIN = {
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "silu": F.silu,
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
}
GATED_EXACT = {
    "geglu_tanh": "gelu_tanh", "geglu_erf": "gelu_erf", "swiglu": "silu", "qgeglu": "qgelu", "reglu": "relu",
    "sreglu": "srelu", "glu": "sigmoid",
}  # fmt: skip


def exact(x: Tensor, activation: str) -> Tensor:
    """By torch, in the dtype of x; of a gated kind the first half is activated."""
    if activation in GATED_EXACT:
        half = x.shape[1] // 2
        return PLAIN[GATED_EXACT[activation]](x[:, :half]) * x[:, half:]
    return PLAIN[activation](x)


def exact_gradient(grad: Tensor, x: Tensor, activation: str) -> Tensor:
    """By autograd, in the dtype of x."""
    x = x.detach().clone().requires_grad_()
    exact(x, activation).backward(grad)
    assert x.grad is not None
    return x.grad


def bounds(x: Tensor, base: str) -> tuple[Tensor, Tensor]:
    """(of f, of f'): how far float32 may be from the exact value at a finite x, float64; as `triton_functions` has it.

    relu's and srelu's are exact but for one rounding.
    """
    if base in ("relu", "srelu"):
        size = PLAIN[base](x).abs()
        return UNIT * size + 2.0**-149, torch.full_like(x, 2.0**-149) + (2 * UNIT * x.abs() if base == "srelu" else 0)
    flushed = 2.0**-125
    if base == "gelu_erf":
        near = torch.where(x.abs() > 14, 0.0, x.abs())
        return 11 * UNIT * x.abs() + flushed * (1 + x.abs()), 12 * UNIT + 6 * UNIT * near + flushed
    linear, cubic = 2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715
    if base == "gelu_tanh":
        z, slope = x * (linear + cubic * x * x), linear + 3 * cubic * x * x
    else:
        z, slope = x * (1.702 if base == "qgelu" else 1.0), torch.full_like(x, 1.702 if base == "qgelu" else 1.0)
    s = torch.sigmoid(z)
    # Where s is 0 or 1 in float32, so is what it is made of.
    reach = torch.where(z.abs() > 200, 0.0, (x * slope).abs())
    relative = (13 + 4 * z.abs().clamp(max=200)) * UNIT
    size = s if base == "sigmoid" else (x * s).abs()
    if base == "sigmoid":
        reach = torch.ones_like(x)
    gradient = 2 * relative * (s + reach * s * (1 - s)) + torch.where(z > 18, 0.0, 6 * UNIT * s * reach)
    # torch's 1 + tanh cancels, in float64 as well.
    cancelled = 2.0**-51 if base == "gelu_tanh" else 0.0
    return relative * size + (flushed + cancelled) * (1 + x.abs()), gradient + (flushed + cancelled) * (1 + reach)


def base_of(activation: str) -> str:
    return GATED_EXACT.get(activation, activation)


def input_of(shape: tuple[int, int], activation: str, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """x for a result of that shape: normal numbers, three times as wide; twice the columns if gated."""
    columns = shape[1] * (2 if activation in GATED else 1)
    return (torch.randn(shape[0], columns, device=device) * 3).to(dtype)


class Range(NamedTuple):
    """Where a float32 result may lie, float64 [M, N]."""

    low: Tensor
    high: Tensor

    @staticmethod
    def around(value: Tensor, error: Tensor) -> Range:
        """What is not finite is sure, and so is the 0 that relu makes of it."""
        error = torch.where(value.isfinite() & error.isfinite(), error, 0.0)
        return Range(value - error, value + error)

    def rounded(self, through: torch.dtype | None) -> Range:
        """By float32 and then by another dtype: rounding keeps an order."""
        low, high = (value.float().to(through or torch.float32) for value in self)
        return Range(low, high)


def result_range(x: Tensor, activation: str) -> Range:
    """Of f(x): the bound of f, and two roundings of the product if gated."""
    x64 = x.double()
    value = exact(x64, activation)
    if activation not in GATED_EXACT:
        return Range.around(value, finite_bounds(x64, activation)[0])
    first, second = x64.chunk(2, dim=1)
    return Range.around(value, finite_bounds(first, base_of(activation))[0] * second.abs() + 2 * UNIT * value.abs())


def gradient_range(grad: Tensor, x: Tensor, activation: str) -> Range:
    """Of the gradient of x: the bound of f', and two or three roundings of products."""
    grad64, x64 = grad.double(), x.double()
    value = exact_gradient(grad64, x64, activation)
    if activation not in GATED_EXACT:
        error = finite_bounds(x64, activation)[1] * grad64.abs()
    else:
        first, second = x64.chunk(2, dim=1)
        f, slope = finite_bounds(first, base_of(activation))
        error = torch.cat([slope * (grad64 * second).abs(), f * grad64.abs()], dim=1)
    return Range.around(value, error + 4 * UNIT * value.abs() + 2.0**-148)


def finite_bounds(x: Tensor, base: str) -> tuple[Tensor, Tensor]:
    """What becomes of infinity and NaN is sure."""
    finite = x.isfinite()
    f, slope = (torch.where(finite, bound, 0.0) for bound in bounds(torch.where(finite, x, 0.0), base))
    return f, slope


def assert_codes_within(
    codes: Tensor | None,
    codes_t: Tensor | None,
    gathered: Tensor,
    values: Range,
    scale: Tensor,
    through: torch.dtype | None,
    start: float,
    inf_to_nan: bool = False,
) -> int:
    """Codes, their transpose and the amax gathered from `start` on are those of some result within its range.

    Where both ends of the range have the same code, so has the result. Gives the number of the others.
    """
    low, high = values.rounded(through)
    rows, columns = low.shape
    format = E4M3 if (codes if codes is not None else codes_t).dtype == E4M3.dtype else E5M2
    multiplier = 1 / scale
    ends = []
    for end in (low, high):
        scaled = end.float() * multiplier
        ends.append(cast(torch.where(end.isinf(), float("nan"), scaled) if inf_to_nan else scaled, format))
    unsure = steps_between(*ends)
    for found in (codes, None if codes_t is None else codes_t.view(torch.uint8).t().contiguous().view(format.dtype)):
        if found is not None:
            assert found.shape == (-(-rows // 16) * 16, -(-columns // 16) * 16)
            assert not found.view(torch.uint8)[rows:].any()
            assert not found.view(torch.uint8)[:, columns:].any()
            distance = [steps_between(found[:rows, :columns], end) for end in ends]
            assert (distance[0] + distance[1] <= unsure).all()
    if codes is not None and codes_t is not None:
        assert torch.equal(codes_t.view(torch.uint8), codes.view(torch.uint8).t())
    finite, crossing = low.isfinite() & high.isfinite(), (low < 0) & (high > 0)
    sizes = torch.where(finite & ~crossing, torch.minimum(low.abs(), high.abs()), 0).float()
    larger = torch.where(finite, torch.maximum(low.abs(), high.abs()), 0).float()
    assert max(start, sizes.max().item()) <= gathered.item() <= max(start, larger.max().item())
    return int((unsure > 0).sum())
