"""A run in progress: settings, record, time and timers, and how a case that fails becomes a row."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from octavo.bench.cuda_graphs import CudaGraphs, l2_bytes
from octavo.bench.deadline import Deadline
from octavo.bench.record import BenchRecord, Row
from octavo.bench.roofline import Ceilings, ceilings_of
from octavo.bench.settings import BenchSettings
from octavo.bench.shapes import Shapes, shapes_for
from octavo.bench.timing import GraphTimer, HostTimer, Timer, WallTimer

MEASURED, FAILED, SKIPPED = "measured", "failed", "skipped"


class Watcher(Protocol):
    """Hears of every row as it is recorded."""

    def __call__(self, row: Row) -> None:
        """A new row."""
        ...


class Session:
    """What every case needs.

    Attributes:
        timer: of device time; wall time on a CPU.
        host_timer: of host time.
        rounds, dropped: of interleaved measurements.
        not_capturable: rivals whose capture has failed; it is not tried again.
        costs: seconds that a kind of training, or of building a layer, took, to tell whether another one fits.
        spent: seconds of the present section, by what they went into.
    """

    def __init__(
        self,
        settings: BenchSettings,
        record: BenchRecord,
        *,
        deadline: Deadline | None = None,
        timer: Timer | None = None,
        watch: Watcher | None = None,
    ) -> None:
        self.settings, self.record = settings, record
        self.device = torch.device(settings.device)
        self.on_gpu = self.device.type == "cuda"
        self.shapes: Shapes = shapes_for(self.device.type, settings.quick)
        self.deadline = deadline or Deadline(settings.time_limit_s)
        self.timer: Timer = timer or (GraphTimer(CudaGraphs()) if self.on_gpu else WallTimer())
        self.host_timer: Timer = HostTimer(self.synchronise, 20 if self.on_gpu else 4)
        self.rounds, self.dropped = (5, 1) if settings.quick else (12, 2)
        if not self.on_gpu:
            self.rounds, self.dropped = 3, 1
        self.cache_bytes = l2_bytes(self.device)
        self.not_capturable: set[str] = set()
        self.costs: dict[tuple[str, str], float] = {}
        self.spent: dict[str, float] = {}
        self._watch = watch

    @property
    def ceilings(self) -> Ceilings:
        """The rates measured so far."""
        return ceilings_of(self.record.rows)

    def synchronise(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def spending(self, on: str) -> Iterator[None]:
        """Count the seconds inside as spent on something, failed or not."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent[on] = self.spent.get(on, 0.0) + time.monotonic() - start

    def add(self, row: Row) -> None:
        """Record a row and tell whoever watches."""
        self.record.append(row)
        if self._watch is not None:
            self._watch(self.record.rows[-1])

    def measured(self, about: Row, figures: Mapping[str, object]) -> None:
        """Record what was measured."""
        self.add({**about, "status": MEASURED, "reason": None, **figures})

    def skipped(self, about: Row, reason: str) -> None:
        """Record that something was not measured, and why."""
        self.add({**about, "status": SKIPPED, "reason": reason})

    def failed(self, about: Row, error: BaseException) -> None:
        """Record that something failed, and how."""
        self.add({**about, "status": FAILED, "reason": reason_of(error)})

    def fits(self, about: Row, seconds: float = 0.0) -> bool:
        """Whether a case of about `seconds` may begin; if not, its row says so."""
        if self.deadline.allows(seconds):
            return True
        left = max(0.0, self.deadline.left() or 0.0)
        self.skipped(about, f"time limit: {left:.0f} s left for this section, about {seconds:.0f} s needed")
        return False

    @contextmanager
    def recorded_if_failed(self, about: Row) -> Iterator[None]:
        """A failure inside becomes a row, and the run goes on; memory is given back either way."""
        try:
            yield
        except Exception as error:  # whatever a rival raises is a finding
            self.failed(about, error)
        finally:
            self.release()

    def forget_compiled(self) -> None:
        """Drop what the compiler has kept: it compiles anew only so often for one piece of code."""
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()

    def release(self) -> None:
        """Give memory back that nobody holds."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


def reason_of(error: BaseException) -> str:
    """An error in one line of at most 300 letters."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:300]


Case = Callable[[Session], None]
