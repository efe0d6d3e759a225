"""Causal language models at work: the whole prompt at once, and one token after another with a KV cache of fixed size.

    prefill     prompts [B, S] -> the next token of each [B]; keys and values of all S tokens are kept
    decoding    a token each [B, 1] -> the next [B, 1], over a cache of C tokens of which the first ones are filled

Both are for models of transformers with its StaticCache. Nothing in a call waits for the device and every tensor stays
where it is, so that a call can be replayed as a CUDA graph: positions, and which of the cache's tokens are seen, are
given rather than asked of the cache. Decoding greedily writes each token where the next step reads it.
"""

from __future__ import annotations

import importlib
import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from octavo.bench.peers import Context


def cache_argument(model: Any) -> str:
    """What a model calls the cache that it is given: transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class _Cached:
    """A model with a cache of `tokens` tokens a sequence, which is allocated by the first call."""

    def __init__(self, model: Any, tokens: int, context: Context) -> None:
        transformers: Any = importlib.import_module("transformers")
        self._model, self._context = model, context
        self._cache: Any = transformers.StaticCache(config=model.config, max_cache_len=tokens)
        self._name = cache_argument(model)

    def _lengths(self) -> list[Tensor]:
        """How many tokens each layer's cache holds, which it counts itself."""
        return [layer.cumulative_length for layer in self._cache.layers]

    def _next(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        """The most probable token [B] after the last of `tokens` [B, S]; only its logits are computed."""
        with torch.no_grad(), self._context():
            logits: Tensor = self._model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1,
                **{self._name: self._cache},
            ).logits
            return logits[:, -1].argmax(-1)


class Prefill(_Cached):
    """The prompts as a whole, causally, into an empty cache of their length.

    Args:
        model: of transformers, in evaluation mode.
        prompts: int64 [B, S], on the model's device; whatever is copied into it is what the next call reads.
        context: what surrounds a forward.

    Attributes:
        prompts: as given.
        token: [B], the result of the last call.
    """

    def __init__(self, model: Any, prompts: Tensor, context: Context = nullcontext) -> None:
        super().__init__(model, prompts.shape[1], context)
        self.prompts = prompts
        self._positions = torch.arange(prompts.shape[1], device=prompts.device)[None]
        self.token = torch.zeros(prompts.shape[0], dtype=torch.int64, device=prompts.device)
        self()

    def __call__(self) -> None:
        """Read the prompts, and write `token`."""
        for length in self._lengths():
            length.zero_()
        self.token.copy_(self._next(self.prompts, self._positions, None))


class Decoder(_Cached):
    """One token after another, behind prompts that are in the cache.

    Args:
        model: of transformers, in evaluation mode.
        prompts: int64 [B, P], on the model's device.
        tokens: that the cache has room for, more than P.
        context: what surrounds a forward.

    Attributes:
        room: steps until the cache is full.
        token: [B, 1], the last one that was decoded.

    Raises:
        ValueError: the prompts fill the cache.
    """

    def __init__(self, model: Any, prompts: Tensor, tokens: int, context: Context = nullcontext) -> None:
        batch, length = prompts.shape
        if length >= tokens:
            raise ValueError(f"prompts of {length} tokens fill a cache of {tokens}: give it room for one more at least")
        super().__init__(model, tokens, context)
        self.room = tokens - length
        self._prompt, self._columns = length, torch.arange(tokens, device=prompts.device)
        self._first = self._next(prompts, self._columns[None, :length], None)[:, None]
        self.token = self._first.clone()
        self._length = torch.full((1, 1), length, device=prompts.device)
        self._batch = batch

    def reset(self) -> None:
        """Back to the end of the prompts."""
        for length in (*self._lengths(), self._length):
            length.fill_(self._prompt)
        self.token.copy_(self._first)

    def step(self) -> None:
        """Read `token`, keep its keys and values, and write the token that follows. At most `room` steps in a row."""
        mask = (self._columns <= self._length).expand(self._batch, 1, 1, -1)
        self.token.copy_(self._next(self.token, self._length, mask)[:, None])
        self._length.add_(1)
