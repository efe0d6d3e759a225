"""From values to codes and back: the one definition of rounding.

`cast` does not rest on `Tensor.to(float8)` for anything out of range, since that differs between torch versions and
formats. In range, `Tensor.to` rounds to nearest, ties to even, in all of them, and is used for its speed; the tests
hold it to that over every bf16 and fp16 value.

What becomes of everything (M is the largest finite value):

    |x| beyond M          saturating: ±M.    Otherwise: NaN in a format without inf, else ±inf.
                          Overflow is judged after rounding: up to the tie above M a value rounds to M.
    ±inf                  as any overflow.
    NaN                   NaN, always the same code (`Format.nan_code`).
    -0                    -0 where the format has one.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from octavo.formats.format import E8M0, Format, format_given

Rounding = Literal["nearest", "stochastic"]


def cast(
    x: Tensor,
    format: Format | torch.dtype | str,
    *,
    rounding: Rounding = "nearest",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Codes of `x`, same shape, dtype `format.dtype`.

    Args:
        x: any floating-point tensor; float64 is rounded once, not by way of float32.
        format: octavo.E4M3, octavo.E5M2 or another eight-bit format; its torch dtype or its name will do.
        rounding: "nearest" (ties to even), or "stochastic": to one of the two neighbours, with the probability of the
            distance to the other, so that the expectation is x.
        saturate: what becomes of overflow, see the module.
        generator: source of randomness of stochastic rounding; torch's default one if None.

    Raises:
        ValueError: x is not floating point, the rounding is unknown, or E8M0 is to be rounded stochastically.
    """
    if not x.is_floating_point():
        raise ValueError(f"cast needs a floating-point tensor, found {x.dtype}: convert it first, x.float()")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"unknown rounding {rounding!r}: expected 'nearest' or 'stochastic'")
    format = format_given(format)
    if format is E8M0:
        if rounding == "stochastic":
            raise ValueError("E8M0 holds scales and has no stochastic rounding: use rounding='nearest'")
        return _cast_e8m0(_to_float32(x), saturate)
    x32 = _to_float32(x)
    if rounding == "stochastic":
        uniform = torch.rand(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        x32 = round_stochastically(x32, format, uniform)
    return cast_float32(x32, format, saturate)


def cast_float32(x: Tensor, format: Format, saturate: bool = True) -> Tensor:
    """`cast` to nearest of a float32 tensor, without checks: the step that every quantizer ends with."""
    limit = format.max
    # 1. One NaN, and no inf: nan_to_num writes a positive NaN, which every dtype encodes as its canonical one.
    finite = x.nan_to_num(nan=math.nan, posinf=limit, neginf=-limit)
    # 2. In range, torch rounds to nearest even in every version.
    codes = finite.clamp_(-limit, limit).to(format.dtype)
    if torch.compiler.is_compiling():
        # Inductor's vectorized conversion (torch 2.13, CPU) sets the sign of NaN. Writing the code out costs nothing in
        # a fused loop; as an operation of its own it would double the time of an eager cast.
        codes = torch.where(x.isnan(), format.nan_code, codes.view(torch.uint8)).view(format.dtype)
    if saturate:
        return codes
    # 3. Overflow after rounding; the tie itself goes to the even neighbour, which is M where M's last bit is 0.
    threshold = format.overflow_threshold
    max_is_even = format.nan == "all_ones"
    over = x.abs() > threshold if max_is_even else x.abs() >= threshold
    inf_code = format.nan_code - 2**format.mantissa_bits + 1
    bits = codes.view(torch.uint8)
    special = (bits & 0x80) | inf_code if format.has_inf else torch.full_like(bits, format.nan_code)
    return torch.where(over, special, bits).view(format.dtype)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `codes`, exact in float32, bf16 and (but for E8M0) fp16."""
    if codes.dtype == E8M0.dtype:
        bits = codes.view(torch.uint8)
        exponent = bits.to(torch.float64) - E8M0.bias
        value = torch.exp2(exponent).masked_fill(bits == E8M0.nan_code, math.nan)
        return value.to(dtype)
    return codes.to(dtype)


def _to_float32(x: Tensor) -> Tensor:
    """float32, exact for narrower dtypes; float64 is rounded to odd, which the second rounding cannot notice.

    Rounding to odd (the nearest float32 toward zero, last bit set if anything was cut off) keeps on which side of every
    tie of a format with fewer than 22 fraction bits the value lies (Boldo and Melquiond, 2008).
    """
    if x.dtype != torch.float64:
        return x.to(torch.float32)
    nearest = x.to(torch.float32)
    away = nearest.double().abs() > x.abs()
    toward_zero = torch.where(away, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    inexact = (toward_zero.double() != x) & x.isfinite()
    bits = toward_zero.view(torch.int32)
    return torch.where(inexact, bits | 1, bits).view(torch.float32)


def round_stochastically(x: Tensor, format: Format, uniform: Tensor) -> Tensor:
    """x on the grid of `format`, float32, to the neighbour that `uniform` says; `cast_float32` of it changes nothing.

    P(away from 0) = (|x| - lower) / (upper - lower), exact to 2^-53: the expectation is x, also among subnormals. A
    value of the format has the probability 0 and never changes, zero among them. Beyond M the grid goes on, and
    `cast_float32` says what becomes of that. NaN and inf stay.

    Args:
        x: float32.
        format: the format.
        uniform: float64 of x's shape, in [0, 1).
    """
    # 1. The distance of neighbours at x: 2^(exponent - m), at least that of the subnormals.
    _, exponent = torch.frexp(x)
    lowest = round(math.log2(format.min_normal))
    quantum = torch.exp2((exponent - 1).clamp(min=lowest).double() - format.mantissa_bits)
    # 2. |x| in these steps; division by a power of two is exact, and so is the difference.
    steps = x.double().abs() / quantum
    lower = torch.floor(steps)
    # 3. Away from zero with the probability of the rest.
    rounded = (lower + (uniform < steps - lower)) * quantum
    rounded = torch.where(x.isfinite(), rounded, x.double().abs())
    return torch.copysign(rounded, x.double()).to(torch.float32)


def _cast_e8m0(x: Tensor, saturate: bool) -> Tensor:
    """Nearest power of two, ties to the even code; 0 becomes the smallest scale; negative and NaN become NaN."""
    bits = x.view(torch.int32)
    exponent, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    # 1. Of a normal value 2^e * (1 + f): up if f > 1/2, or if f = 1/2 and the code is odd.
    half = 1 << 22
    up = (fraction > half) | ((fraction == half) & (exponent % 2 == 1))
    code = exponent + up.to(torch.int32)
    # 2. A subnormal float32 lies below 2^-126: nearer to 2^-126 if above 1.5 * 2^-127, the tie going to code 0.
    code = torch.where(exponent == 0, (fraction > half + (half >> 1)).to(torch.int32), code)
    top = E8M0.nan_code - 1
    code = torch.where((code > top) & ~x.isnan(), top if saturate else E8M0.nan_code, code)
    code = torch.where(x.isnan() | (x < 0), E8M0.nan_code, code)
    return code.to(torch.uint8).view(E8M0.dtype)
