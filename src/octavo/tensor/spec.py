"""QuantizeSpec: how one operand of one matrix product becomes codes. Frozen data, complete when built."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

import torch

from octavo.formats import E4M3, E5M2, Format, Rounding, format_given
from octavo.kernels import ScaleRule
from octavo.scaling import MX, PRODUCT_BLOCKS, ROW, TENSOR, Granularity, ScaleRounding, granularity_named
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER
from octavo.tensor.fields_by_name import FieldsByName, needs

Scaling = Literal["current", "delayed", "static"]
# Of the operands of all products; a quantized tensor may have others.
_OF_PRODUCTS = (TENSOR, ROW, *PRODUCT_BLOCKS)


def _needed(missing: list[str]) -> str:
    return "format='E4M3' or 'E5M2'"


@needs(_needed)
@dataclass(frozen=True, kw_only=True)
class QuantizeSpec(FieldsByName):
    """Format, granularity, scale rule and rounding of an operand.

    Attributes:
        format: of the codes, E4M3 or E5M2; a dtype or a name becomes the format.
        granularity: of their scale, along the rows of the operand as it enters the product (K-major): TENSOR, ROW,
            BLOCK_1X128, BLOCK_128X128 or MX. For the other layout, the transposed matrix, it holds along that matrix's
            rows: two sets of codes where they differ. As of `octavo.quantize`, a name or an extent will do.
        scaling: "current" measures the amax now; "delayed" takes the scale from the owner's state; "static" from
            `static_scale`.
        power_of_two: multipliers are rounded down to a power of two (current scaling).
        scale_rounding: of the exponent of MX scales, "up" or "floor", see `octavo.scaling.rules.mx_scale`.
        epsilon: amaxes below it count as it (current scaling; not of MX).
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients.
        static_scale: the scale, value = code * scale, of static scaling.
        rounding: "nearest", or "stochastic": by chance, unbiased, and slower, see `octavo.kernels.stochastic_cast`.
    """

    format: Format
    granularity: Granularity = TENSOR
    scaling: Scaling = "current"
    power_of_two: bool = False
    scale_rounding: ScaleRounding = "up"
    epsilon: float = 0.0
    inf_to_nan: bool = False
    static_scale: float | None = None
    rounding: Rounding = "nearest"

    @property
    def rule(self) -> ScaleRule:
        """How current scaling makes a scale of an amax."""
        rule: ScaleRule = self.__dict__["_rule"]
        return rule

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", format_given(self.format))
        if self.format not in (E4M3, E5M2):
            raise ValueError(f"format is {self.format}, which no product takes: use 'E4M3' or 'E5M2'")
        object.__setattr__(self, "granularity", _granularity_given(self.granularity))
        self._check_rule()
        object.__setattr__(self, "_rule", ScaleRule(float(self.epsilon).hex(), self.power_of_two, self.scale_rounding))
        if self.scaling != "current" and self.granularity is not TENSOR:
            raise ValueError(
                f"{self.scaling} scaling keeps one scale a tensor, found granularity {self.granularity}:"
                " use scaling='current', or granularity='tensor'"
            )
        self._check_mx()
        if (self.scaling == "static") != (self.static_scale is not None):
            raise ValueError(
                f"scaling is {self.scaling!r} and static_scale is {self.static_scale}: give both or neither"
            )
        if self.static_scale is not None:
            object.__setattr__(self, "static_scale", checked_scale("static_scale", self.static_scale))

    def _check_rule(self) -> None:
        """Raise ValueError if the rule of the scale, or the rounding, is none."""
        if self.scaling not in ("current", "delayed", "static"):
            raise ValueError(f"scaling is {self.scaling!r}: expected 'current', 'delayed' or 'static'")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f"rounding is {self.rounding!r}: expected 'nearest' or 'stochastic'")
        for name in ("power_of_two", "inf_to_nan"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected True or False")
        check_epsilon("epsilon", self.epsilon)
        if self.scaling != "current" and (self.power_of_two or self.epsilon):
            named = "power_of_two" if self.power_of_two else "epsilon"
            raise ValueError(
                f"{named} is {getattr(self, named)}, which says how a measured scale is made, and scaling is"
                f" {self.scaling!r}: leave it out, or use scaling='current'"
            )

    def __repr__(self) -> str:
        """What differs from the defaults."""
        shown = [(one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown)})"

    def _check_mx(self) -> None:
        """Raise ValueError if something is said of MX scales that is not so."""
        if self.scale_rounding not in ("up", "floor"):
            raise ValueError(f"scale_rounding is {self.scale_rounding!r}: expected 'up' or 'floor'")
        if self.granularity is not MX and self.scale_rounding != "up":
            raise ValueError(
                f"scale_rounding is {self.scale_rounding!r}, which MX scales alone have, found granularity"
                f" {self.granularity}: leave it out"
            )
        if self.granularity is MX and self.epsilon:
            raise ValueError(f"epsilon is {self.epsilon}: MX scales have none, leave it out")


def _granularity_given(granularity: Any) -> Granularity:
    """A granularity that products take, by whatever it was named."""
    expected = "'tensor', 'row', (1, 128), (128, 128) or 'mx', along the rows of the operand as it enters its product"
    try:
        named = granularity_named(granularity)
    except ValueError:
        raise ValueError(f"unknown granularity {granularity!r}: expected {expected}") from None
    if named not in _OF_PRODUCTS:
        raise ValueError(f"granularity is {granularity!r}, which no product takes: expected {expected}")
    return named


# Two scales of such amaxes have a product that float32 holds, with room for what is multiplied by it.
LARGEST_EPSILON = 2.0**64


def check_epsilon(name: str, epsilon: Any) -> None:
    """Raise ValueError unless amaxes may count as this one at least.

    Args:
        name: what the user calls it.
        epsilon: 0, or a positive number.
    """
    if type(epsilon) not in (int, float) or not 0 <= epsilon <= LARGEST_EPSILON:
        raise ValueError(
            f"{name} is {epsilon!r}: expected 0 or a positive number up to 2^64: amaxes below it count as it, and with"
            " more the product of two scales leaves float32. A usual one is 1e-12"
        )


def checked_scale(name: str, scale: Any) -> float:
    """A given scale in float32, as it is used; with it, 1 / scale in float64 rounds to float32's quotient.

    Args:
        name: what the user calls it.
        scale: value = code * scale.

    Raises:
        ValueError: no positive finite number, or one whose float32 or whose reciprocal is not normal.
    """
    number: Any = scale
    if isinstance(scale, bool) or not isinstance(scale, Real) or not 0 < number < float("inf"):
        raise ValueError(f"{name} is {scale!r}: a scale is a number, positive and finite: amax / largest code")
    # (An integer may be larger than any float.)
    single: float = torch.tensor(float(min(number, 2.0**127)), dtype=torch.float32).item()
    if not SMALLEST_MULTIPLIER <= single <= LARGEST_MULTIPLIER:
        raise ValueError(
            f"{name} is {scale}: a float32 scale and its reciprocal must be normal numbers, from 2^-126 to 2^126"
        )
    return single
