"""A time limit shared out among sections, so that a short run still measures something of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence


class Deadline:
    """Seconds that are left, of which each section may use its share.

    What a section leaves unused goes to the later ones. Without a limit everything is allowed.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock."""
        self.limit_s, self._clock = limit_s, clock
        self._start = clock()
        self._until = [] if limit_s is None else [self._start + limit_s]

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def left(self) -> float | None:
        """Seconds that are left of the innermost share; None without a limit."""
        return self._until[-1] - self._clock() if self._until else None

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes about `seconds` may begin."""
        left = self.left()
        return left is None or left > seconds

    def begin(self, weight: float, to_come: Sequence[float]) -> None:
        """Begin a part that may use its `weight` among itself and those `to_come`, of what is left; `end` ends it."""
        left = self.left()
        if left is not None:
            self._until.append(self._clock() + max(0.0, left) * weight / (weight + sum(to_come)))

    def end(self) -> None:
        """End the part that was begun last."""
        if len(self._until) > 1:
            self._until.pop()
