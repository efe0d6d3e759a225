"""Two pieces of work of one device at the same time: one on a stream beside the current one, until both are joined.

A product rarely fills its last wave of a card's multiprocessors, and a small cast fills none: what runs beside takes
what is idle. The host pays for it with two events and the switches between streams, so it is worth that only where the
host does not count, in a CUDA graph that is being captured, or where the device is busy for long.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

# Operations of a product from which on work is done beside it, captured and not. (At 1 PFLOP/s 2^33 take 9 us of the
# device, 2^38 275.)
_CAPTURED = 2**33
_LONG = 2**38


class Side:
    """A stream beside another one of the same device.

    Within `with side:` work goes to it, behind what the other stream had to do before; after `join` the other stream
    goes on when that is done. Whoever enters joins before anything that the work reads or writes is let go of.
    """

    __slots__ = ("_main", "_stream")

    def __init__(self, main: torch.cuda.Stream) -> None:
        self._main = main
        self._stream = torch.cuda.Stream(main.device)
        while self._stream == main:  # torch hands out a few streams in turn
            self._stream = torch.cuda.Stream(main.device)

    def __enter__(self) -> None:
        self._stream.wait_stream(self._main)
        torch.cuda.set_stream(self._stream)
        _here.beside = True

    def __exit__(self, *_: object) -> None:
        _here.beside = False
        torch.cuda.set_stream(self._main)

    def join(self) -> None:
        """Let the other stream wait for what was done here."""
        self._main.wait_stream(self._stream)


class _Here(threading.local):
    beside = False


_here = _Here()
_sides: dict[tuple[int, int], Side] = {}


def is_beside() -> bool:
    """Whether this thread is within a `Side`: other work runs at the same time."""
    return _here.beside


def side_of(x: Tensor, operations: int) -> Side | None:
    """A stream beside the current one for work of about so many operations with x; None if it is not worth it.

    In code that is being traced it is None: ask there for nothing.
    """
    if operations < _CAPTURED or type(x) is not Tensor or not x.is_cuda or is_beside():
        return None
    if operations < _LONG and not torch.cuda.is_current_stream_capturing():
        return None
    # The device's own current stream: autograd sets both for each of its nodes.
    main = torch.cuda.current_stream(x.device)
    key = main.device_index, main.cuda_stream
    side = _sides.get(key)
    if side is None:
        side = _sides[key] = Side(main)
    return side
