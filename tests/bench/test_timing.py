from __future__ import annotations

import gc
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from octavo.bench.cuda_graphs import kernel_microseconds, num_sets
from octavo.bench.timing import LEAST_ROUNDS, Call, GraphTimer, HostTimer, Timing, WallTimer, interleaved, timed_steps


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def takes(self, seconds: float) -> Call:
        def call() -> None:
            self.now += seconds

        return call


class FakeGraphs:
    """Captures by counting, replays by the clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.captured = clock, []

    def capture(self, calls: Sequence[Call]) -> Call:
        self.captured = list(calls)

        def replay() -> None:
            for call in calls:
                call()

        return replay

    def seconds(self, replay: Call) -> float:
        start = self.clock()
        replay()
        return self.clock() - start


def test_quantiles_are_those_of_the_sorted_samples() -> None:
    timing = Timing((5.0, 1.0, 3.0, 2.0, 4.0))
    assert timing.median == 3.0
    # A tenth of the way along four gaps of 1: 0.4 of the first.
    assert timing.quantile(0.1) == pytest.approx(1.4)
    assert timing.row("ms") == {"ms": 3000.0, "ms_p10": 1400.0, "ms_p90": 4600.0, "samples": 5}
    assert Timing((2e-6,)).row("us")["us_p90"] == 2.0


def test_a_graph_holds_each_call_equally_often_and_the_time_is_that_of_one() -> None:
    clock = Clock()
    backend = FakeGraphs(clock)
    first, second, third = clock.takes(1.0), clock.takes(2.0), clock.takes(6.0)
    measure = GraphTimer(backend, least=4).prepare([first, second, third])
    assert backend.captured == [first, second, third] * 2
    assert measure() == pytest.approx(3.0)


def test_rivals_take_turns_and_the_first_rounds_do_not_count() -> None:
    clock, order = Clock(), []

    def measure(name: str, values: list[float]) -> float:
        order.append(name)
        return values.pop(0)

    slow, fast = [99.0, 4.0, 6.0], [99.0, 1.0, 3.0]
    measures = {"slow": lambda: measure("slow", slow), "fast": lambda: measure("fast", fast)}
    timings = interleaved(measures, rounds=2, dropped=1)
    assert order == ["slow", "fast"] * 3
    assert (timings["slow"].samples, timings["fast"].samples) == ((4.0, 6.0), (1.0, 3.0))
    assert clock() == 0.0


@pytest.mark.parametrize(("seconds", "count"), [(0.1, 12), (1.0, 8), (10.0, LEAST_ROUNDS)])
def test_a_budget_bounds_the_rounds_of_what_is_slow_but_never_below_the_least(seconds: float, count: int) -> None:
    # A round of two takes twice `seconds`. Of 1 s each: 2 dropped rounds and 8 more fill 20 s.
    clock = Clock()

    def measure() -> float:
        clock.now += seconds
        return seconds

    timings = interleaved({"a": measure, "b": measure}, 12, 2, budget_s=20.0, clock=clock)
    assert {name: len(timing.samples) for name, timing in timings.items()} == {"a": count, "b": count}


def test_host_time_begins_with_an_idle_device_and_leaves_out_its_work() -> None:
    clock = Clock()
    pending: list[float] = []

    def launch() -> None:
        clock.now += 1.0
        pending.append(10.0)

    def synchronise() -> None:
        clock.now += sum(pending)
        pending.clear()

    measure = HostTimer(synchronise, repeats=5, clock=clock).prepare([launch])
    launch()
    assert measure() == 1.0
    assert pending == []


def test_a_step_is_timed_until_the_device_is_done() -> None:
    clock = Clock()
    timing = timed_steps(clock.takes(1.0), 3, clock.takes(0.5), clock)
    assert timing.samples == (1.5, 1.5, 1.5)


def test_wall_time_is_the_mean_of_the_calls() -> None:
    clock = Clock()
    assert WallTimer(clock).prepare([clock.takes(1.0), clock.takes(3.0)])() == 2.0


@pytest.mark.parametrize(
    ("bytes_of_one", "cache", "expected"),
    [(100, 0, 1), (100, 49, 1), (100, 51, 2), (1, 10**9, 8), (0, 0, 1)],
)
def test_sets_of_inputs_are_together_twice_the_cache(bytes_of_one: int, cache: int, expected: int) -> None:
    assert num_sets(bytes_of_one, cache) == expected


def test_kernel_time_is_that_of_the_device_without_operators_and_annotations() -> None:
    def event(device: str, microseconds: float, annotation: bool = False) -> SimpleNamespace:
        kind = SimpleNamespace(name=device)
        return SimpleNamespace(device_type=kind, self_device_time_total=microseconds, is_user_annotation=annotation)

    events = [event("CUDA", 3.0), event("CPU", 3.0), event("CUDA", 2.0), event("CUDA", 50.0, annotation=True)]
    assert kernel_microseconds(events) == 5.0


def test_what_is_kept_from_the_collector_stays_so() -> None:
    gc.freeze()
    try:
        timed_steps(lambda: None, 2, lambda: None)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    timed_steps(lambda: None, 2, lambda: None)
    assert gc.get_freeze_count() == 0
