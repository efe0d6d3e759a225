"""LateAnswer: is a number on the device finite? Asked now, known when the device has come to it: nothing waits."""

from __future__ import annotations

import torch
from torch import Tensor


class LateAnswer:
    """The answer for one number.

    Args:
        value: [], on any device. Only on a CUDA device the answer is late.
    """

    def __init__(self, value: Tensor) -> None:
        # Into pinned memory, which torch gives a copy that does not wait.
        self._finite = value.isfinite().to("cpu", non_blocking=value.is_cuda)
        self._copied: torch.cuda.Event | None = None
        if value.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(value.device))

    def has_come(self) -> bool:
        """True once `is_finite` may be read."""
        return self._copied is None or self._copied.query()

    @property
    def is_finite(self) -> bool:
        """The answer, once it has come."""
        return bool(self._finite)
