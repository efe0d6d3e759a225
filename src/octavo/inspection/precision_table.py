"""PrecisionTable: which layers run in FP8, with the figures and reasons. Data first; printed, a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.inspection.layer_probe import OperandFigures

# What breaks `rest_sqnr_db`, as reasons call it: by the table's column.
BESIDE_OUTLIERS = "rest (SQNR beside its outliers)"


@dataclass(frozen=True, kw_only=True)
class PrecisionBounds:
    """What an operand may lose before its layer stays in high precision.

    Attributes:
        sqnr_db: least signal over noise, dB, of every operand. Rounding alone leaves 31 in E4M3 and 25 in E5M2.
        rest_sqnr_db: least signal of the channels that are no outliers over the noise, dB, of inputs and weights.
        underflow: largest share of elements that become 0, from 0 to 1, of every operand.
        saturation: largest share of elements beyond the largest code, from 0 to 1, of every operand.
        kurtosis: largest kurtosis of inputs and weights. Of all layers none, by default: it tells of outliers, and
            floating-point codes bear those as long as `rest_sqnr_db` holds.
    """

    sqnr_db: float = 15.0
    rest_sqnr_db: float = 10.0
    underflow: float = 0.25
    saturation: float = 0.01
    kurtosis: float = math.inf

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
                raise ValueError(f"{name} is {value!r}: a bound is a number; math.inf or -math.inf bounds nothing")

    def broken_by(self, figures: OperandFigures) -> Iterator[str]:
        """A sentence for each bound that an operand leaves."""
        forward, name = figures.operand != "grad_output", figures.operand
        if figures.sqnr_db < self.sqnr_db:
            yield f"{name}: SQNR {figures.sqnr_db:.1f} dB, below {self.sqnr_db:g}"
        if forward and figures.rest_sqnr_db < self.rest_sqnr_db:
            yield f"{name}: {BESIDE_OUTLIERS} {figures.rest_sqnr_db:.1f} dB, below {self.rest_sqnr_db:g}"
        if figures.underflow > self.underflow:
            yield f"{name}: underflow {figures.underflow:.1%}, above {self.underflow:.1%}"
        if figures.saturation > self.saturation:
            yield f"{name}: saturation {figures.saturation:.1%}, above {self.saturation:.1%}"
        if forward and figures.kurtosis > self.kurtosis:
            yield f"{name}: kurtosis {figures.kurtosis:.0f}, above {self.kurtosis:g}"


@dataclass(frozen=True)
class LayerPrecision:
    """What was chosen for one layer.

    Attributes:
        layer: qualified name in the model; empty for the model itself.
        recipe: name of the recipe it runs with; empty for high precision.
        loss_change: predicted change of the loss with this layer alone in FP8, relative to the loss; 0 if not measured.
        operands: figures of input, weight and gradient, those that an FP8 product takes; empty if not measured.
        reason: why it stays in high precision, or what else there is to say; may be empty.
    """

    layer: str
    recipe: str
    loss_change: float
    operands: tuple[OperandFigures, ...]
    reason: str

    @property
    def fp8(self) -> bool:
        """True if it runs in FP8."""
        return bool(self.recipe)


@dataclass(frozen=True)
class PrecisionTable:
    """What `octavo.choose_precision` measured and chose.

    Attributes:
        rows: the layers in the order of the model.
        loss: mean magnitude of the batches' losses, in high precision.
        budget: relative loss change that was allowed.
        loss_change: predicted for all layers in FP8 as chosen, relative to the loss.
        loss_change_everywhere: the same if every measured layer ran in FP8.
        batches: how many were run.
    """

    rows: tuple[LayerPrecision, ...]
    loss: float
    budget: float
    loss_change: float
    loss_change_everywhere: float
    batches: int

    @property
    def high_precision(self) -> list[LayerPrecision]:
        """Layers that stay in high precision."""
        return [row for row in self.rows if not row.fp8]

    def __str__(self) -> str:
        width = max([5, *(len(_shown(row)) for row in self.rows)])
        head = (
            f"{'layer':<{width}}  {'operand':<11} {'SQNR':>6} {'rest':>6} {'underflow':>9} {'saturated':>9}"
            f" {'kurtosis':>8} {'loss':>8}  choice"
        )
        chosen = sum(row.fp8 for row in self.rows)
        return "\n".join(
            [
                head,
                *(line for row in self.rows for line in _lines(row, width)),
                f"{chosen} of {len(self.rows)} layers in FP8, from {self.batches} batch"
                f"{'' if self.batches == 1 else 'es'}. Predicted change of the loss of {self.loss:.4g}:"
                f" {self.loss_change:.2%}, with FP8 everywhere {self.loss_change_everywhere:.2%}; budget"
                f" {self.budget:.2%}.",
                f"SQNR and {BESIDE_OUTLIERS} in dB; rest is judged of input and weight, not of grad_output. loss: what"
                " this layer alone changes it by.",
            ]
        )


def _shown(row: LayerPrecision) -> str:
    return row.layer or "(root)"


def _lines(row: LayerPrecision, width: int) -> Iterator[str]:
    choice = (row.recipe or "high precision") + (f": {row.reason}" if row.reason else "")
    if not row.operands:
        yield f"{_shown(row):<{width}}  {'not measured':<63}  {choice}"
    for index, one in enumerate(row.operands):
        name, change, said = (_shown(row), f"{row.loss_change:.2%}", choice) if index == 0 else ("", "", "")
        yield (
            f"{name:<{width}}  {one.operand:<11} {one.sqnr_db:>6.1f} {one.rest_sqnr_db:>6.1f} {one.underflow:>9.2%}"
            f" {one.saturation:>9.2%} {one.kurtosis:>8.1f} {change:>8}  {said}"
        ).rstrip()
