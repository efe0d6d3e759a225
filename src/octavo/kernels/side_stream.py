"""Two pieces of work of one device at the same time: one on a stream beside the current one, until both are joined.

A product rarely fills its last wave of a card's multiprocessors, and a small cast fills none: what runs beside takes
what is idle. The host pays for it with events and switches between streams, so it is done only where the host does not
count: in a CUDA graph that is being captured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

# Operations of a product from which on it is worth it: 9 us at 1 PFLOP/s.
_SMALLEST = 2**33
# As many as torch has of a device.
_STREAMS = 32

_A = TypeVar("_A")
_B = TypeVar("_B")


class Side:
    """A stream beside another one of the same device."""

    __slots__ = ("_main", "_stream")

    def __init__(self, main: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        self._main, self._stream = main, stream

    @property
    def address(self) -> int:
        """Of the stream."""
        return int(self._stream.cuda_stream)

    def both(self, beside: Callable[[], _A], here: Callable[[], _B]) -> tuple[_A, _B]:
        """(what `beside` gives, what `here` gives); the former's work goes to this stream, the latter's to the other.

        Both begin behind what the other stream had to do, and what follows on it begins behind both, also if one fails:
        so memory that either has read or let go of is taken again only then.
        """
        self._stream.wait_stream(self._main)
        try:
            with torch.cuda.stream(self._stream), _beside():
                first = beside()
            return first, here()
        finally:
            self._main.wait_stream(self._stream)


class _Here(threading.local):
    beside = False


_here = _Here()
# By device and address of the stream that each is beside.
_sides: dict[tuple[int, int], Side | None] = {}


@contextmanager
def _beside() -> Iterator[None]:
    _here.beside = True
    try:
        yield
    finally:
        _here.beside = False


def is_beside() -> bool:
    """Whether this thread is within the first call of `Side.both`: other work runs at the same time."""
    return _here.beside


def side_of(x: Tensor, operations: int) -> Side | None:
    """A stream beside the current one for work of about so many operations with x; None if it is not worth it.

    Code that is being traced does not ask.
    """
    if operations < _SMALLEST or type(x) is not Tensor or not x.is_cuda or is_beside():
        return None
    if not torch.cuda.is_current_stream_capturing() or x.get_device() != torch.cuda.current_device():
        return None
    main = torch.cuda.current_stream()
    key = main.device_index, main.cuda_stream
    if key not in _sides:
        stream = _free_stream(main)
        _sides[key] = None if stream is None else Side(main, stream)
    return _sides[key]


def _free_stream(main: torch.cuda.Stream) -> torch.cuda.Stream | None:
    """A stream that neither is `main` nor beside another one; None if there is none.

    torch hands out the few that it has in turn, and whoever shared one would wait for one of two only.
    """
    taken = {main.cuda_stream, *(address for _, address in _sides)}
    taken |= {side.address for side in _sides.values() if side is not None}
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream(main.device)
        if stream.cuda_stream not in taken:
            return stream
    return None
