"""Token streams cut into windows, and the order in which training sees them.

The order is a pure function of seed and step: epoch e visits every window once in the permutation drawn from
(seed, e), and starts at an offset drawn from it too. So a resumed run, and runs of different precision, see the same
batches without any state to save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from octavo.study.atomic import replacing
from octavo.study.documents import SPLITS


@dataclass(frozen=True)
class TokenData:
    """The three splits as int32 streams [tokens] on the CPU."""

    train: torch.Tensor
    validation: torch.Tensor
    test: torch.Tensor

    def sizes(self) -> dict[str, int]:
        """Tokens by split."""
        return {name: int(getattr(self, name).numel()) for name in SPLITS}

    def shortest(self, context: int) -> tuple[str, int, int]:
        """The split that is shortest against its need, its tokens, and that need.

        Validation and test need one window of `context` tokens and its targets, training two windows and a token:
        an epoch starts at an offset of up to one window.
        """
        needs = {"train": 2 * context + 1, "validation": context + 1, "test": context + 1}
        sizes = self.sizes()
        name = min(SPLITS, key=lambda split: sizes[split] / needs[split])
        return name, sizes[name], needs[name]

    def save(self, path: Path) -> None:
        """Write the streams as safetensors."""
        with replacing(path) as temporary:
            save_file({name: getattr(self, name).clone() for name in SPLITS}, temporary)

    @classmethod
    def load(cls, path: Path) -> TokenData:
        """Read what `save` wrote."""
        return cls(**load_file(path))


class Batches:
    """Training batches by step: `batches(step)` gives inputs and targets, int64 [batch, context] each, on `device`."""

    def __init__(self, stream: torch.Tensor, batch_size: int, context: int, seed: int, device: torch.device) -> None:
        """Place the stream on the device once, so that a step copies nothing from the host but its indices."""
        self.batch_size, self.context, self.seed, self.device = batch_size, context, seed, device
        self._stream = stream.to(device)
        self._windows = (stream.numel() - context - 1) // context
        if self._windows < 1:
            raise ValueError(f"the stream has {stream.numel()} tokens; a batch needs more than 2 * {context}")
        self._offsets = torch.arange(context + 1, device=device)
        self._orders: dict[int, torch.Tensor] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps that see each window once, at least 1."""
        return max(1, self._windows // self.batch_size)

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step, int64 [batch, context]."""
        position = step * self.batch_size
        starts = torch.cat([self._take(position + index) for index in range(self.batch_size)])
        windows = self._stream[starts[:, None] + self._offsets[None, :]].long()  # [batch, context + 1]
        return windows[:, :-1], windows[:, 1:]

    def _take(self, position: int) -> torch.Tensor:
        epoch, index = divmod(position, self._windows)
        return self._order(epoch)[index : index + 1]

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            shift = int(torch.randint(self.context, (1,), generator=generator))
            order = torch.randperm(self._windows, generator=generator) * self.context + shift
            self._orders = {key: value for key, value in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = order.to(self.device)
        return self._orders[epoch]


def evaluation_windows(
    stream: torch.Tensor, context: int, batch_size: int, max_tokens: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Non-overlapping windows in order, for every method the same: (inputs, targets), int64 [≤ batch, context].

    Every target is predicted exactly once; the tail that fills no window is left out. `max_tokens` bounds the number
    of targets (at least one window).
    """
    windows = (stream.numel() - 1) // context
    if max_tokens is not None:
        windows = max(1, min(windows, max_tokens // context))
    inputs = stream[: windows * context].view(windows, context).long()
    targets = stream[1 : windows * context + 1].view(windows, context).long()
    for start in range(0, windows, batch_size):
        yield inputs[start : start + batch_size], targets[start : start + batch_size]
