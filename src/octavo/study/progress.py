"""How a study says where it is, and how it is told to stop: the seam between the study and whoever watches it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Progress(Protocol):
    """Receives what happens; the command line draws bars or writes lines from it, tests count."""

    def started(self, name: str) -> None:
        """A phase begins; how much it has to do is not known yet."""

    def phase(self, name: str, total: int, unit: str) -> None:
        """The phase that has begun will take `total` units."""

    def advance(self, amount: int, text: str) -> None:
        """`amount` units are done; `text` is the newest figure."""

    def finished(self, name: str, seconds: float) -> None:
        """A phase has ended, `seconds` after it began."""


class SilentProgress:
    """Says nothing."""

    def started(self, name: str) -> None:
        """Ignore."""

    def phase(self, name: str, total: int, unit: str) -> None:
        """Ignore."""

    def advance(self, amount: int, text: str) -> None:
        """Ignore."""

    def finished(self, name: str, seconds: float) -> None:
        """Ignore."""


class StudyInterrupted(Exception):
    """The study was asked to stop; everything done so far is saved and `--resume` goes on from there."""


class Stop:
    """Set when the study should stop at the next safe point."""

    def __init__(self) -> None:
        """Not requested yet."""
        self.requested = False

    def check(self) -> None:
        """Raise StudyInterrupted if a stop was requested."""
        if self.requested:
            raise StudyInterrupted


@contextmanager
def stop_on_interrupt() -> Iterator[Stop]:
    """Turn the first Ctrl-C into a request to stop at the next safe point; a second one interrupts at once.

    Signals can be caught in the main thread only; elsewhere the object is never set.
    """
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: FrameType | None) -> None:
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    previous = signal.signal(signal.SIGINT, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, previous)
