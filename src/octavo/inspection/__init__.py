"""Watch a run: amax, saturation, underflow and error of every operand."""

from octavo.inspection.statistics import Statistics, statistics
from octavo.inspection.watch import watch

__all__ = ["Statistics", "statistics", "watch"]
