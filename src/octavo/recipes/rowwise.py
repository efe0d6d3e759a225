"""RowwiseScaling: one scale a token, or an output channel; two sets of codes, one for each layout."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.formats import E4M3
from octavo.recipes.recipe import FormatChoice, Gemm, OperandName, Recipe, keep_format, operand_spec
from octavo.scaling import ROW
from octavo.tensor import QuantizeSpec


@dataclass(frozen=True, kw_only=True)
class RowwiseScaling(Recipe):
    """Current scaling with one scale a row of each operand as it enters its product.

    Attributes:
        format: E4M3 for all operands, or HYBRID, or E5M2.
        power_of_two_scales: multipliers are rounded down to powers of two.
        high_precision_wgrad: the weight gradient runs in the dtype of the forward.
    """

    format: FormatChoice = E4M3
    power_of_two_scales: bool = True
    high_precision_wgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        if self.high_precision_wgrad and self.backward == "high_precision":
            raise ValueError("backward='high_precision' holds for wgrad too: leave high_precision_wgrad out")
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """One scale a row, measured."""
        if gemm == "wgrad" and self.high_precision_wgrad:
            return None
        return operand_spec(self, gemm, operand, granularity=ROW, power_of_two=self.power_of_two_scales)
