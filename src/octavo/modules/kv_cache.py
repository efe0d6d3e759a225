"""Keys and values of tokens that generation has been through: octavo.KVCache and octavo.PagedKVCache.

    append(layer, k, v [B, S, G, D])  ->  k, v [B, L, G, D] of all tokens so far, the new ones last

One cache serves all attention layers of a model; each keeps its own tokens in it. Sequences may have different lengths:
`expect` says how many of the next tokens of each are real, the rest is padding behind them. L is the longest length.

A contiguous cache holds [B, longest, G, D] a layer from its first token on. A paged one holds pages of some tokens
each, shared by all sequences, and takes one when a sequence needs it: sequences that stay short cost little (Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023). Both give the same
numbers, bit for bit: pages are gathered before attention, which reads and writes what is kept once more.

Bytes a token and layer in bf16: 4 G D. No gradient flows through a cache. Lengths live on the host, so that a step
waits for nothing; compiled code would be compiled again as they grow.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Held(NamedTuple):
    """What a layer gets back.

    Attributes:
        k, v: [B, L, G, D].
        lengths: tokens of each sequence, the new ones included.
        num_new: new tokens of each sequence.
    """

    k: Tensor
    v: Tensor
    lengths: tuple[int, ...]
    num_new: tuple[int, ...]


class Cache(abc.ABC):
    """What contiguous and paged caches share: who holds how many tokens.

    Args:
        max_batch_size: sequences at most.
        max_sequence_length: tokens of a sequence at most.
    """

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_sequence_length", max_sequence_length)):
            check_positive(name, value)
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self._lengths: dict[object, list[int]] = {}
        self._expected: tuple[int, ...] | None = None

    def expect(self, num_new: Sequence[int] | None) -> None:
        """From now on, `num_new[b]` of the tokens of sequence b are real in each call; None: all of them are.

        Raises:
            ValueError: more sequences or tokens than the cache was made for.
        """
        expected = None if num_new is None else tuple(int(n) for n in num_new)
        if expected is not None and not (
            len(expected) <= self.max_batch_size and all(0 <= n <= self.max_sequence_length for n in expected)
        ):
            raise ValueError(
                f"expect({list(expected)}) does not go with a cache of max_batch_size = {self.max_batch_size} and"
                f" max_sequence_length = {self.max_sequence_length}: give each sequence a number from 0 to"
                f" {self.max_sequence_length}, or make a larger cache"
            )
        self._expected = expected

    def lengths(self, layer: object, batch: int) -> tuple[int, ...]:
        """How many tokens of each of the first `batch` sequences a layer has kept."""
        return tuple(self._lengths.get(layer, [0] * batch)[:batch])

    def append(self, layer: object, k: Tensor, v: Tensor) -> Held:
        """Keep new tokens of a layer, and give all that it has.

        Args:
            layer: whose tokens; any object, mostly the attention layer itself.
            k, v: [B, S, G, D], [B, S, G, Dv].

        Raises:
            ValueError: more sequences or tokens than the cache was made for, or gradients that would be lost.
        """
        batch, num_tokens = k.shape[:2]
        num_new = self._checked_new(batch, num_tokens)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError("no gradient flows through a KV cache: generate under torch.no_grad()")
        held = self._lengths.setdefault(layer, [0] * self.max_batch_size)
        before = tuple(held[:batch])
        after = tuple(old + new for old, new in zip(before, num_new, strict=True))
        if max(after) > self.max_sequence_length:
            raise ValueError(
                f"a sequence would have {max(after)} tokens, and the cache was made for max_sequence_length ="
                f" {self.max_sequence_length}: make a longer one"
            )
        self._write(layer, k, v, before, num_new)
        held[:batch] = after
        k, v = self._read(layer, after)
        return Held(k, v, after, num_new)

    def _checked_new(self, batch: int, num_tokens: int) -> tuple[int, ...]:
        if batch > self.max_batch_size:
            raise ValueError(
                f"there are {batch} sequences, and the cache was made for max_batch_size = {self.max_batch_size}: make"
                " a larger one"
            )
        expected = self._expected
        if expected is None:
            return (num_tokens,) * batch
        if len(expected) != batch or not all(0 <= n <= num_tokens for n in expected):
            raise ValueError(
                f"expect({list(expected)}) does not go with {batch} sequences of {num_tokens} tokens: give a number for"
                f" each, from 0 to {num_tokens}, or expect(None)"
            )
        return expected

    def reset(self, sequences: Sequence[int] | None = None) -> None:
        """Forget some sequences, or all of them.

        Raises:
            ValueError: a sequence that the cache was not made for; nothing is forgotten then.
        """
        gone = range(self.max_batch_size) if sequences is None else [int(sequence) for sequence in sequences]
        unknown = [sequence for sequence in gone if not 0 <= sequence < self.max_batch_size]
        if unknown:
            raise ValueError(
                f"reset({list(gone)}) names {unknown[0]}, and the cache was made for max_batch_size ="
                f" {self.max_batch_size}: sequences are numbered from 0 to {self.max_batch_size - 1}"
            )
        for held in self._lengths.values():
            for sequence in gone:
                held[sequence] = 0
        self._forget(gone)

    @abc.abstractmethod
    def _write(
        self, layer: object, k: Tensor, v: Tensor, before: tuple[int, ...], num_new: tuple[int, ...]
    ) -> None: ...

    @abc.abstractmethod
    def _read(self, layer: object, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]: ...

    @abc.abstractmethod
    def _forget(self, sequences: Sequence[int]) -> None: ...


class KVCache(Cache):
    """A contiguous cache: the longest possible sequences, for every layer, from its first token on."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        self._stored: dict[object, tuple[Tensor, Tensor]] = {}

    def _write(self, layer: object, k: Tensor, v: Tensor, before: tuple[int, ...], num_new: tuple[int, ...]) -> None:
        if layer not in self._stored:
            extents = (self.max_batch_size, self.max_sequence_length)
            self._stored[layer] = zeros_like_tokens(k, extents), zeros_like_tokens(v, extents)
        for new, stored in zip((k, v), self._stored[layer], strict=True):
            if len({*zip(before, num_new, strict=True)}) == 1:
                stored[: len(before), before[0] : before[0] + num_new[0]] = new[:, : num_new[0]]
                continue
            for b, (start, count) in enumerate(zip(before, num_new, strict=True)):
                stored[b, start : start + count] = new[b, :count]

    def _read(self, layer: object, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        k, v = self._stored[layer]
        return k[: len(lengths), : max(lengths)], v[: len(lengths), : max(lengths)]

    def _forget(self, sequences: Sequence[int]) -> None:
        # A NaN that is left behind a sequence's end would come back: probability 0 times NaN.
        for stored in self._stored.values():
            for part in stored:
                part[list(sequences)] = 0


class PagedKVCache(Cache):
    """A cache in pages that sequences take as they grow.

    Args:
        max_batch_size: sequences at most.
        max_sequence_length: tokens of a sequence at most.
        page_size: tokens of a page.
        num_pages: pages of all sequences together; as many as the longest sequences would take if None.
    """

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, page_size: int = 64, num_pages: int | None = None
    ) -> None:
        super().__init__(max_batch_size, max_sequence_length)
        check_positive("page_size", page_size)
        self.page_size = page_size
        self.num_pages = max_batch_size * -(-max_sequence_length // page_size) if num_pages is None else num_pages
        check_positive("num_pages", self.num_pages)
        self.tables: list[list[int]] = [[] for _ in range(max_batch_size)]
        # The last one is taken first.
        self._free = list(range(self.num_pages))[::-1]
        self._pools: dict[object, tuple[Tensor, Tensor]] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    def _write(self, layer: object, k: Tensor, v: Tensor, before: tuple[int, ...], num_new: tuple[int, ...]) -> None:
        self._grow([old + new for old, new in zip(before, num_new, strict=True)])
        if layer not in self._pools:
            extents = (self.num_pages * self.page_size,)
            self._pools[layer] = zeros_like_tokens(k, extents), zeros_like_tokens(v, extents)
        # 1. Which of the new tokens are real, and the slot of each.  [B, S] -> [tokens]
        offsets = torch.arange(k.shape[1])
        real = offsets < torch.tensor(num_new)[:, None]
        slots = self._slots(torch.tensor(before)[:, None] + offsets, real)[real].to(k.device)
        sources = real.flatten().nonzero()[:, 0].to(k.device)
        # 2. There they go.
        for new, pool in zip((k, v), self._pools[layer], strict=True):
            pool[slots] = new.flatten(0, 1)[sources].to(pool.dtype)

    def _read(self, layer: object, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        k, v = self._pools[layer]
        # Behind a sequence's end stands its last token again, to which nobody attends.
        last = torch.tensor(lengths)[:, None] - 1
        at = torch.minimum(torch.arange(max(lengths)).expand(len(lengths), -1), last)
        slots = self._slots(at.clamp(min=0), at >= 0).to(k.device)
        return k[slots], v[slots]

    def _slots(self, at: Tensor, real: Tensor) -> Tensor:
        """[B, S] rows of the pool in which tokens number `at` of each sequence lie; 0 where there is none."""
        widest = max(1, *(len(table) for table in self.tables))
        table = torch.tensor([pages + [0] * (widest - len(pages)) for pages in self.tables[: at.shape[0]]])
        page = table.gather(1, (at // self.page_size).clamp(max=widest - 1))
        return torch.where(real, page * self.page_size + at % self.page_size, 0)

    def _grow(self, lengths: list[int]) -> None:
        """Give each sequence the pages for so many tokens; the first layer of a model does, the others find them."""
        missing = [-(-length // self.page_size) - len(self.tables[b]) for b, length in enumerate(lengths)]
        wanted = sum(max(0, n) for n in missing)
        if wanted > len(self._free):
            raise ValueError(
                f"{wanted} pages more are needed, and {len(self._free)} of {self.num_pages} are free: reset sequences"
                " that are done, or make a cache of more pages"
            )
        for b, count in enumerate(missing):
            self.tables[b].extend(self._free.pop() for _ in range(count))

    def _forget(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            self._free.extend(reversed(self.tables[sequence]))
            self.tables[sequence] = []


def zeros_like_tokens(tokens: Tensor, extents: tuple[int, ...]) -> Tensor:
    """[*extents, G, D] of zeros, for tokens [B, S, G, D]; an ordinary tensor also under inference_mode."""
    with torch.inference_mode(False):
        return torch.zeros(*extents, *tokens.shape[2:], dtype=tokens.dtype, device=tokens.device)


def check_positive(name: str, value: Any) -> None:
    """Raise ValueError unless it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: it must be a positive integer")
