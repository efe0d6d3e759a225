"""MXFP8Scaling: one power of two for 32 neighbours along K, of all operands; the microscaling standard's way."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.formats import E4M3
from octavo.recipes.recipe import (
    Accumulate,
    FormatChoice,
    Gemm,
    OperandName,
    Recipe,
    all_precise,
    keep_format,
    keep_precise,
    operand_spec,
)
from octavo.scaling import MX, ScaleRounding
from octavo.tensor import QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class MXFP8Scaling(Recipe):
    """Current scaling by blocks of 1x32 along K of each product, of input, weight and grad_output; scales in E8M0.

    Every operand is quantized from high precision for each product that it enters, since its blocks lie along another
    dimension there. Sources: OCP Microscaling Formats (MX) 1.0, of blocks and scales; Mishra et al., "Recipes for
    Pre-training LLMs with MXFP8", arXiv:2506.08027, of E4M3 for all operands and of exponents that are rounded up.

    Products are emulated on every device in this version: exact values in float32, products and sums in float32. They
    are precise.

    Attributes:
        format: E4M3 for all operands; HYBRID has E5M2 for gradients.
        scale_rounding: of a scale's exponent. "up": 2^ceil(log2(amax / M)), nothing saturates. "floor": the standard's
            2^(floor(log2(amax)) - emax), under which what lies beyond M saturates; see `octavo.scaling.rules`.
    """

    accumulate: Accumulate = field(default_factory=all_precise)
    format: FormatChoice = E4M3
    scale_rounding: ScaleRounding = "up"

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        keep_precise(self, "products of MX blocks sum precisely, every 32 of K in float32")
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """One scale a block, measured."""
        return operand_spec(self, gemm, operand, granularity=MX, power_of_two=True, scale_rounding=self.scale_rounding)
