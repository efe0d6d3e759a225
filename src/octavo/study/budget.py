"""A time limit shared out among phases, so that a study always reaches its report.

Each phase may use the share of the remaining time that its weight has among the phases still to come. What a phase
leaves unused goes to the later ones by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.study.record import Row

WEIGHTS = {"data": 10.0, "baseline": 40.0, "ptq": 25.0, "finetune": 30.0, "report": 4.0}


class TimeBudget:
    """The seconds a study may take, from its construction on; None means without limit."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self.limit_s, self._clock = limit_s, clock
        self._start = clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def seconds_for(self, phase: str) -> float | None:
        """What `phase` may take if it starts now, in seconds (at least 0), or None without a limit."""
        if self.limit_s is None:
            return None
        names = list(WEIGHTS)
        to_come = names[names.index(phase) :]
        left = max(0.0, self.limit_s - self.elapsed)
        return left * WEIGHTS[phase] / sum(WEIGHTS[name] for name in to_come)


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """What training costs, in seconds: a step, a validation, and what comes once at its end."""

    step_s: float
    validation_s: float
    closing_s: float = 0.0


def fit_training(
    steps: int, validations: int, cost: TrainingCost, available_s: float | None, phase: str
) -> tuple[list[int], list[Row]]:
    """[steps, validations] that fit into `available_s`, at least one of each, and the `adjustment` rows.

    Validations are thinned out first, until they take a quarter of the time at most; then steps shrink.
    """
    if available_s is None:
        return [steps, validations], []
    available = max(0.0, available_s - cost.closing_s)
    kept = validations
    rows: list[Row] = []
    if steps * cost.step_s + validations * cost.validation_s > available:
        kept, rows = fit(validations, cost.validation_s, 0.25 * available, phase=phase, what="validations")
    used, more = fit(steps, cost.step_s, available - kept * cost.validation_s, phase=phase, what="steps")
    return [used, min(kept, used)], rows + more


def fit(
    wanted: int, seconds_each: float, available_s: float | None, *, phase: str, what: str, least: int = 1
) -> tuple[int, list[Row]]:
    """How many of `wanted` units fit into `available_s`, at least `least`, and the `adjustment` row if fewer."""
    if available_s is None or wanted * seconds_each <= available_s:
        return wanted, []
    used = min(wanted, max(least, int(max(0.0, available_s) / seconds_each)))
    if used == wanted:
        return wanted, []
    why = f"{seconds_each:.3g} s each, {max(0.0, available_s):.0f} s left for them by the time limit"
    return used, [{"kind": "adjustment", "phase": phase, "what": what, "wanted": wanted, "used": used, "why": why}]
