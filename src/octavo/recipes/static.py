"""StaticScaling: scales that are known beforehand, calibrated or given; the cheapest cast, for inference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.recipes.recipe import HYBRID, OPERANDS, FormatChoice, Gemm, OperandName, Recipe, keep_format, operand_spec
from octavo.tensor import QuantizeSpec, checked_scale


@dataclass(frozen=True, kw_only=True)
class StaticScaling(Recipe):
    """Given scales, value = code * scale, one an operand.

    Attributes:
        format: HYBRID (E4M3 forward, E5M2 gradients), E4M3 or E5M2.
        input_scale, weight_scale, grad_output_scale: positive and finite; None measures that operand each time.
            Of several layers each has a recipe of its own, by the overrides of another one.
    """

    format: FormatChoice = HYBRID
    input_scale: float | None = None
    weight_scale: float | None = None
    grad_output_scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        keep_format(self)
        if self.input_scale is self.weight_scale is self.grad_output_scale is None:
            raise ValueError("StaticScaling without any scale: give input_scale or another, or use CurrentScaling")
        for operand in OPERANDS:
            scale = getattr(self, f"{operand}_scale")
            if isinstance(scale, Mapping):
                raise ValueError(
                    f"{operand}_scale is a {type(scale).__name__}: a scale is a number, positive and finite; of several"
                    f" layers: overrides={{pattern: StaticScaling({operand}_scale=...)}} of a CurrentScaling"
                )
            if scale is not None:
                checked_scale(f"{operand}_scale", scale)
        if self.grad_output_scale is not None and self.backward == "high_precision":
            raise ValueError("grad_output_scale has no use with backward='high_precision': leave one of them out")
        self.complete()

    def spec(self, gemm: Gemm, operand: OperandName) -> QuantizeSpec | None:
        """The given scale, or a measured one."""
        scale = getattr(self, f"{operand}_scale")
        return operand_spec(self, gemm, operand, scaling="current" if scale is None else "static", static_scale=scale)
