"""QuantizeSpec: how one operand of one matrix product becomes codes. Frozen data, complete when built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from octavo.formats import Format
from octavo.kernels import ScaleRule
from octavo.scaling import TENSOR, Granularity

Scaling = Literal["current", "delayed", "static"]


@dataclass(frozen=True, kw_only=True)
class QuantizeSpec:
    """Format, granularity and scale rule of an operand.

    Attributes:
        format: of the codes.
        granularity: of their scale, along the rows of the operand as it enters the product (K-major). For the other
            layout, the transposed matrix, it holds along that matrix's rows: two sets of codes where they differ.
        scaling: "current" measures the amax now; "delayed" takes the scale from the owner's state; "static" from
            `static_scale`.
        power_of_two: multipliers are rounded down to a power of two (current scaling).
        epsilon: amaxes below it count as it (current scaling).
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients.
        static_scale: the scale, value = code * scale, of static scaling.
    """

    format: Format
    granularity: Granularity = TENSOR
    scaling: Scaling = "current"
    power_of_two: bool = False
    epsilon: float = 0.0
    inf_to_nan: bool = False
    static_scale: float | None = None

    @property
    def rule(self) -> ScaleRule:
        """How current scaling makes a scale of an amax."""
        rule: ScaleRule = self.__dict__["_rule"]
        return rule

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rule", ScaleRule(float(self.epsilon).hex(), self.power_of_two))
        if self.scaling not in ("current", "delayed", "static"):
            raise ValueError(f"scaling is {self.scaling!r}: expected 'current', 'delayed' or 'static'")
        if self.epsilon < 0:
            raise ValueError(f"epsilon is {self.epsilon}: it must be 0 or positive")
        if self.scaling != "current" and self.granularity is not TENSOR:
            raise ValueError(
                f"{self.scaling} scaling keeps one scale a tensor, found granularity {self.granularity}:"
                " use scaling='current', or granularity TENSOR"
            )
        if (self.scaling == "static") != (self.static_scale is not None):
            raise ValueError(
                f"scaling is {self.scaling!r} and static_scale is {self.static_scale}: give both or neither"
            )
        if self.static_scale is not None and not 0 < self.static_scale < float("inf"):
            raise ValueError(f"static_scale is {self.static_scale}: a scale is positive and finite")
        if self.static_scale is not None:
            # In float32, as it is used; with it, 1 / scale in float64 rounds to float32's quotient.
            single = torch.tensor(self.static_scale, dtype=torch.float32).item()
            if not 2.0**-126 <= single <= 2.0**126:
                raise ValueError(
                    f"static_scale is {self.static_scale}: a float32 scale and its reciprocal must be normal numbers,"
                    " from 2^-126 to 2^126"
                )
            object.__setattr__(self, "static_scale", single)
