"""From an amax to a scale. `value = code * scale` throughout; the reciprocal, the multiplier, is what a cast needs.

    m = M / amax            rounded to nearest in float32; 1 if amax is 0, so that zeros stay exact zeros
    m = clamp(m, 2^-126, 2^126)
    codes = cast(x * m)
    scale = 1 / m           rounded to nearest in float32

with M the largest finite value of the format. These are the roundings of Transformer Engine and of torchao, so that
codes can be compared byte by byte. With power-of-two scales m is rounded *down* to a power of two: nothing saturates,
and multiplying by m or by the scale is exact.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.formats import Format, decode
from octavo.formats.format import E8M0

# Within these bounds a float32 and its reciprocal are both normal numbers.
SMALLEST_MULTIPLIER = 2.0**-126
LARGEST_MULTIPLIER = 2.0**126

ScaleRounding = Literal["up", "floor"]


def multiplier_from_amax(amax: Tensor, format: Format, *, epsilon: float = 0.0, power_of_two: bool = False) -> Tensor:
    """The multiplier that brings `amax` (float32, any shape) to the largest value of `format`.

    Args:
        amax: largest finite magnitudes.
        epsilon: amaxes below it count as it; 0 leaves them alone.
        power_of_two: round down to a power of two.
    """
    raised = amax.clamp(min=epsilon) if epsilon else amax
    multiplier = torch.full_like(raised, format.max) / raised
    multiplier = torch.where(raised == 0, 1.0, multiplier).clamp(SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER)
    if power_of_two:
        # Clearing the fraction of a normal float32 rounds it down to a power of two.
        multiplier = (multiplier.view(torch.int32) & -(1 << 23)).view(torch.float32)
    return multiplier


def scale_from_multiplier(multiplier: Tensor) -> Tensor:
    """1 / m in float32, which is also m = 1 / scale."""
    return torch.ones_like(multiplier) / multiplier


def mx_scale(amax: Tensor, format: Format, rounding: ScaleRounding = "up") -> Tensor:
    """The shared power of two of an MX block, as codes of E8M0.

    "up": 2^ceil(log2(amax / M)), the least power of two with which nothing saturates (NVIDIA's recipe for training with
    MXFP8). "floor": 2^(floor(log2(amax)) - emax), the rule of OCP MX 1.0, which saturates what lies between M and the
    next power of two. An amax of 0 gives the smallest scale, 2^-127.
    """
    # In float64 the quotient is exact enough: amax / M is a power of two only if the float64 division says so exactly.
    exact = amax.double()
    if rounding == "up":
        fraction, exponent = torch.frexp(exact / format.max)
        exponent = torch.where(fraction == 0.5, exponent - 1, exponent)
    else:
        _, exponent = torch.frexp(exact)
        exponent = exponent - 1 - format.max_exponent
    code = (exponent + E8M0.bias).clamp(0, E8M0.nan_code - 1)
    return torch.where(amax == 0, 0, code).to(torch.uint8).view(E8M0.dtype)


def mx_multiplier(scale: Tensor) -> Tensor:
    """1 / scale of E8M0 codes as float32, exact but for the two ends of the range, where it is clamped."""
    return decode(scale).reciprocal().clamp(max=2.0**127)
