"""Watch a run: amax, saturation, underflow and error of every operand; choose precision per layer."""

from octavo.inspection.choose_precision import PrecisionChoice, choose_precision
from octavo.inspection.layer_probe import OperandFigures
from octavo.inspection.precision_guard import PrecisionGuard
from octavo.inspection.precision_table import LayerPrecision, PrecisionBounds, PrecisionTable
from octavo.inspection.statistics import Statistics, statistics
from octavo.inspection.watch import watch

__all__ = [
    "LayerPrecision",
    "OperandFigures",
    "PrecisionBounds",
    "PrecisionChoice",
    "PrecisionGuard",
    "PrecisionTable",
    "Statistics",
    "choose_precision",
    "statistics",
    "watch",
]
