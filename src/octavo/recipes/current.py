"""CurrentScaling: scales from the amax of the very tensor that is cast; a second pass over memory, no state."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.recipes.recipe import HYBRID, FormatChoice, Gemm, OperandName, Recipe, keep_format, operand_spec
from octavo.tensor import QuantizeSpec, check_epsilon


@dataclass(frozen=True, kw_only=True)
class CurrentScaling(Recipe):
    """Current ("just in time") scaling of all three operands, one scale a tensor.

    Attributes:
        format: HYBRID (E4M3 forward, E5M2 gradients), E4M3 or E5M2.
        power_of_two_scales: multipliers are rounded down to powers of two.
        amax_epsilon: amaxes below it count as it; up to 2^64.
    """

    format: FormatChoice = HYBRID
    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        check_epsilon("amax_epsilon", self.amax_epsilon)
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """One scale a tensor, measured, the same in every product."""
        return operand_spec(self, gemm, operand, power_of_two=self.power_of_two_scales, epsilon=self.amax_epsilon)
