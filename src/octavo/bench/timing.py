"""How long something takes: rivals take turns, medians and spread are kept, warm-up rounds are dropped.

GPU time is the time of a CUDA graph's replay, so that the host does not count; where a call cannot be captured it is
the sum of its kernels' times, and its row says so (`method`). Host time is the time until the calls return, with the
queue kept short. Figures of two methods are never compared with one another.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

Call = Callable[[], object]
Measure = Callable[[], float]

GRAPH, KERNELS, WALL, HOST = "CUDA graph replay", "sum of kernels", "wall", "host"


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, measured several times."""

    samples: tuple[float, ...]

    def quantile(self, share: float) -> float:
        """The value that `share` of the samples do not exceed, interpolated."""
        ordered = sorted(self.samples)
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    @property
    def median(self) -> float:
        """The middle value."""
        return self.quantile(0.5)

    def row(self, unit: str = "ms") -> dict[str, Any]:
        """Median, p10 and p90 in `unit` ("ms" or "us"), and how many samples there were."""
        factor = {"ms": 1e3, "us": 1e6}[unit]
        values = {unit: self.median, f"{unit}_p10": self.quantile(0.1), f"{unit}_p90": self.quantile(0.9)}
        return {key: round(value * factor, 6) for key, value in values.items()} | {"samples": len(self.samples)}


class Timer(Protocol):
    """Makes of some calls a function that measures one of them, on average, each time it is asked."""

    method: str

    def prepare(self, calls: Sequence[Call]) -> Measure:
        """Seconds of one call, the calls (with different data) taking turns."""
        ...


class GraphBackend(Protocol):
    """What records calls, replays them and tells the time between: CUDA, or a fake in tests."""

    def capture(self, calls: Sequence[Call]) -> Call:
        """A function that replays the calls."""
        ...

    def seconds(self, replay: Call) -> float:
        """How long the device took for one replay."""
        ...


class GraphTimer:
    """Device time of calls captured together in one graph, at least `least` calls a replay."""

    method = GRAPH

    def __init__(self, backend: GraphBackend, least: int = 4) -> None:
        self._backend, self._least = backend, least

    def prepare(self, calls: Sequence[Call]) -> Measure:
        """Capture the calls, each equally often."""
        turns = max(1, math.ceil(self._least / len(calls)))
        captured = [call for _ in range(turns) for call in calls]
        replay = self._backend.capture(captured)

        def measure() -> float:
            return self._backend.seconds(replay) / len(captured)

        return measure


class WallTimer:
    """Wall time of calls one after another: for a CPU, where a call returns when it is done."""

    method = WALL

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def prepare(self, calls: Sequence[Call]) -> Measure:
        """Each call once a measurement."""

        def measure() -> float:
            start = self._clock()
            for call in calls:
                call()
            return (self._clock() - start) / len(calls)

        return measure


class HostTimer:
    """Host time: `repeats` calls without waiting for the device, which is idle before the first of them.

    So few calls that the device's queue never fills; the device's work must take less time than the host's.
    """

    method = HOST

    def __init__(self, synchronise: Call, repeats: int = 20, clock: Callable[[], float] = time.perf_counter) -> None:
        self._synchronise, self._repeats, self._clock = synchronise, repeats, clock

    def prepare(self, calls: Sequence[Call]) -> Measure:
        """The calls in turn, `repeats` in all."""
        turns = [calls[index % len(calls)] for index in range(self._repeats)]

        def measure() -> float:
            self._synchronise()
            start = self._clock()
            for call in turns:
                call()
            spent = self._clock() - start
            self._synchronise()
            return spent / len(turns)

        return measure


# A median and its spread need this many samples, whatever they cost.
LEAST_ROUNDS = 5


def interleaved(
    measures: Mapping[str, Measure],
    rounds: int,
    dropped: int = 2,
    budget_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Timing]:
    """`rounds` measurements of each, all taking turns, after `dropped` rounds that do not count.

    With a budget no round begins after so many seconds, once there are `LEAST_ROUNDS` that count: what is slow is
    measured less often.
    """
    samples: dict[str, list[float]] = {name: [] for name in measures}
    start = clock()
    with _new_garbage_alone():
        for turn in range(dropped + rounds):
            if budget_s is not None and turn >= dropped + LEAST_ROUNDS and clock() - start >= budget_s:
                break
            for name, measure in measures.items():
                seconds = measure()
                if turn >= dropped:
                    samples[name].append(seconds)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def timed_steps(step: Call, count: int, synchronise: Call, clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Wall time of `count` steps, each until the device is done."""
    samples = []
    synchronise()
    with _new_garbage_alone():
        for _ in range(count):
            start = clock()
            step()
            synchronise()
            samples.append(clock() - start)
    return Timing(tuple(samples))


@contextmanager
def _new_garbage_alone() -> Iterator[None]:
    """Python's collector does not go through what earlier measurements left: none of the time is for that."""
    if gc.get_freeze_count():  # somebody around keeps things from it already
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
