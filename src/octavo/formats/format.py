"""Eight-bit number formats as frozen data.

A code of `exponent_bits` E and `mantissa_bits` m, with stored exponent e and stored mantissa f, means

    normal     (e > 0):  (-1)^s * 2^(e - bias) * (1 + f / 2^m)
    subnormal  (e = 0):  (-1)^s * 2^(1 - bias) * (f / 2^m)

What the top codes mean differs and is data too (`has_inf`, `nan`). Everything else is derived: no limit of a format is
written down anywhere but here, and here only through its bits.

Source: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0 for E8M0; the FNUZ pair is
the one of AMD's CDNA 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Format:
    """One eight-bit floating-point format.

    Attributes:
        name: how people call it, "E4M3".
        exponent_bits, mantissa_bits, bias: the layout.
        has_inf: the top exponent is kept for inf and NaN, as in IEEE 754.
        nan: where NaN lives: "ieee" (top exponent, mantissa not 0), "all_ones" (only the code of all ones), or
            "negative_zero" (the code 0x80, so there is no -0).
        dtype: the torch dtype that stores the codes.
        signed: False for E8M0, which has neither sign nor zero nor subnormals.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_inf: bool
    nan: Literal["ieee", "all_ones", "negative_zero"]
    dtype: torch.dtype
    signed: bool = True

    @property
    def bits(self) -> int:
        """Width of a code."""
        return self.exponent_bits + self.mantissa_bits + int(self.signed)

    @property
    def max(self) -> float:
        """Largest finite value."""
        top = 2**self.exponent_bits - 1
        steps = 2**self.mantissa_bits
        if self.has_inf:
            exponent, fraction = top - 1, (steps - 1) / steps
        elif self.nan == "all_ones":
            exponent, fraction = (top, (steps - 2) / steps) if self.mantissa_bits else (top - 1, 0.0)
        else:
            exponent, fraction = top, (steps - 1) / steps
        return float(2.0 ** (exponent - self.bias) * (1 + fraction))

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)): the "emax" of the MX specification."""
        top = (1 << self.exponent_bits) - 1
        return top - self.bias - int(self.has_inf or not self.signed)

    @property
    def min_normal(self) -> float:
        """Smallest positive normal value."""
        return float(2.0 ** ((1 if self.signed else 0) - self.bias))

    @property
    def min_subnormal(self) -> float:
        """Smallest positive value (of E8M0, which has no subnormals, the smallest normal)."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits)) if self.signed else self.min_normal

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger value."""
        return float(2.0**-self.mantissa_bits)

    @property
    def overflow_threshold(self) -> float:
        """The tie between `max` and the next value of an unbounded exponent range."""
        return self.max + 2.0 ** (self.max_exponent - self.mantissa_bits - 1)

    @property
    def nan_code(self) -> int:
        """The one NaN that Octavo writes; its sign bit is clear where the format has a choice."""
        if self.nan == "negative_zero":
            return 1 << (self.bits - 1)
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and unpickled formats are the format itself, so that `is` holds.
        return format_named, (self.name,)

    def __repr__(self) -> str:
        return self.name


E4M3 = Format("E4M3", 4, 3, 7, has_inf=False, nan="all_ones", dtype=torch.float8_e4m3fn)
E5M2 = Format("E5M2", 5, 2, 15, has_inf=True, nan="ieee", dtype=torch.float8_e5m2)
E8M0 = Format("E8M0", 8, 0, 127, has_inf=False, nan="all_ones", dtype=torch.float8_e8m0fnu, signed=False)
E4M3FNUZ = Format("E4M3FNUZ", 4, 3, 8, has_inf=False, nan="negative_zero", dtype=torch.float8_e4m3fnuz)
E5M2FNUZ = Format("E5M2FNUZ", 5, 2, 16, has_inf=False, nan="negative_zero", dtype=torch.float8_e5m2fnuz)

FORMATS: tuple[Format, ...] = (E4M3, E5M2, E8M0, E4M3FNUZ, E5M2FNUZ)
_BY_NAME = {format.name: format for format in FORMATS}
_BY_DTYPE = {format.dtype: format for format in FORMATS}


def format_named(name: str) -> Format:
    """The format called `name`; ValueError with the known names otherwise."""
    if name not in _BY_NAME:
        raise ValueError(f"unknown format {name!r}: the known ones are {', '.join(_BY_NAME)}")
    return _BY_NAME[name]


def format_of(dtype: torch.dtype) -> Format:
    """The format that `dtype` stores; ValueError for a dtype of more than eight bits."""
    if dtype not in _BY_DTYPE:
        known = ", ".join(str(known) for known in _BY_DTYPE)
        raise ValueError(f"{dtype} stores no eight-bit format: expected one of {known}")
    return _BY_DTYPE[dtype]


def format_given(format: Format | torch.dtype | str) -> Format:
    """What a user names a format by, itself, its dtype or its name, as a `Format`; ValueError for anything else."""
    if isinstance(format, Format):
        return format
    if isinstance(format, torch.dtype):
        return format_of(format)
    if not isinstance(format, str):
        raise ValueError(f"format is {format!r}: expected one of {', '.join(_BY_NAME)}, its name or its dtype")
    return format_named(format)
