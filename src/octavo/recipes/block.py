"""BlockScaling: one scale for 128 neighbours along K, one for 128x128 of a weight; DeepSeek-V3's way."""

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
from octavo.scaling import BLOCK_1X128, BLOCK_128X128
from octavo.tensor import QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class BlockScaling(Recipe):
    """Current scaling by blocks: 1x128 of input and grad_output along K of each product, 128x128 of the weight.

    An outlier costs only its own block of 128 its precision. A product promotes the sum of every 128 of K to float32,
    to scale it: all three are precise. Native on Hopper with CUDA 12.9 or later, in E4M3; elsewhere emulated.

    Attributes:
        format: E4M3 for all operands; HYBRID or E5M2 are emulated everywhere.
        power_of_two_scales: multipliers are rounded down to powers of two.
    """

    accumulate: Accumulate = field(default_factory=all_precise)
    format: FormatChoice = E4M3
    power_of_two_scales: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        keep_precise(self, "products by block sum precisely, every 128 of K in float32")
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """One scale a block, measured."""
        return operand_spec(
            self,
            gemm,
            operand,
            granularity=BLOCK_128X128 if operand == "weight" else BLOCK_1X128,
            power_of_two=self.power_of_two_scales,
        )
