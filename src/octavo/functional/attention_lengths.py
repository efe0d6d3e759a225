"""Where tokens of a batch lie, checked: sums of lengths, and masks of padding.

    cu [B + 1]                                   sequence b holds tokens cu[b] to cu[b + 1] - 1 of packed ones
    mask [B, S] or [B, 1, 1, S]                  True where there is padding; [1, S] is that of every sequence

Shapes are always checked. Values of sums are looked at where the host has them, on the CPU and outside of compiled
code; on a device they would make the host wait, and are believed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from octavo.functional.attention_mask import Valid

Mask = Tensor | tuple[Tensor, Tensor]


def check_sums(name: str, cu: Any, batch: int | None = None) -> None:
    """Raise unless `cu` is [B + 1] of integers, of `batch` sequences if that is known.

    Raises:
        TypeError: no tensor.
        ValueError: another shape or dtype.
    """
    if not isinstance(cu, Tensor):
        raise TypeError(
            f"{name} is {cu!r}, a {type(cu).__name__}: expected a tensor [batch + 1],"
            " torch.tensor(..., dtype=torch.int32)"
        )
    if cu.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {cu.dtype}: numbers of tokens are int32; use .int()")
    if cu.dim() != 1 or cu.shape[0] == 0:
        raise ValueError(
            f"{name} has shape {tuple(cu.shape)}: expected [batch + 1], where each sequence begins, and the end"
        )
    if batch is not None and cu.shape[0] != batch + 1:
        raise ValueError(
            f"{name} has shape {tuple(cu.shape)}, for {cu.shape[0] - 1} sequences, and the batch has {batch}: expected"
            f" [{batch + 1}], sums of the lengths from 0 on"
        )


def known(cu: Tensor) -> list[int] | None:
    """The numbers, where the host need not wait for them."""
    if torch.compiler.is_compiling() or cu.device.type != "cpu":
        return None
    values: list[int] = cu.tolist()
    return values


def check_ends(name: str, ends: list[int] | None, num_tokens: int) -> None:
    """Raise ValueError unless sequences lie one after the other within the tokens; `ends` None is believed."""
    if ends is None:
        return
    for begin, end in pairwise(ends):
        if end < begin:
            raise ValueError(
                f"{name} is {ends}: {end} follows {begin}, and no sequence ends before it begins; give sums of lengths,"
                " torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
            )
    if ends[0] < 0 or ends[-1] > num_tokens:
        raise ValueError(
            f"{name} is {ends}: there are {num_tokens} tokens, and sequences must lie in 0 to {num_tokens}; give sums"
            " of the lengths of these tokens"
        )


def check_packed(names: tuple[str, str], cu: tuple[Any, Any], num_tokens: tuple[int, int]) -> None:
    """Raise unless the sums of queries and of keys tell of as many sequences, which lie within their tokens.

    Raises:
        TypeError, ValueError: as of `check_sums` and `check_ends`.
    """
    for name, own in zip(names, cu, strict=True):
        check_sums(name, own)
    if cu[0].shape != cu[1].shape:
        raise ValueError(
            f"{names[0]} has shape {tuple(cu[0].shape)} and {names[1]} {tuple(cu[1].shape)}: queries and keys must be"
            " of as many sequences; one that lacks either has length 0 there"
        )
    for name, own, tokens in zip(names, cu, num_tokens, strict=True):
        check_ends(name, known(own), tokens)


def valid_by_mask(mask: Any, batch: int, num_queries: int, num_keys: int) -> Valid:
    """Which positions hold tokens, of a mask that is True for padding.

    Args:
        mask: [B, S] or [B, 1, 1, S], or a pair of them, of queries and of keys; B is `batch` or 1.
        batch, num_queries, num_keys: of the operands.

    Raises:
        TypeError: no bool tensor, nor a pair.
        ValueError: another dtype or shape.
    """
    if isinstance(mask, Tensor):
        queries = keys = _tokens(mask, batch)
    elif isinstance(mask, (tuple, list)) and len(mask) == 2:
        queries, keys = (_tokens(part, batch) for part in mask)
    else:
        found = f"{len(mask)} of them" if isinstance(mask, (tuple, list)) else repr(mask)
        raise TypeError(f"attention_mask is {found}: expected a bool tensor, or a pair (of the queries, of the keys)")
    if queries.shape[1] != num_queries or keys.shape[1] != num_keys:
        raise ValueError(
            f"attention_mask is for {queries.shape[1]} queries and {keys.shape[1]} keys, and there are {num_queries}"
            f" and {num_keys}: give a pair (of the queries, of the keys) where they differ"
        )
    return Valid(queries, keys)


def _tokens(mask: Tensor, batch: int) -> Tensor:
    """[B, S], True for tokens."""
    check_bool(mask)
    between = mask.shape[1:-1]
    if mask.dim() < 2 or any(extent != 1 for extent in between) or mask.shape[0] not in (1, batch):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}: with a padding type it is [{batch}, tokens] or"
            f" [{batch}, 1, 1, tokens], or [1, tokens] for all {batch} sequences alike; a mask of each query goes with"
            " 'arbitrary'"
        )
    return (~mask).reshape(mask.shape[0], mask.shape[-1]).expand(batch, -1)


def check_bool(mask: Any) -> None:
    """Raise unless it is a tensor of bool (ValueError where only the dtype is another)."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask has a {type(mask).__name__}: expected a bool tensor, True for what is left out"
        )
    if mask.dtype is not torch.bool:
        raise ValueError(f"attention_mask has dtype {mask.dtype}: expected bool, True for what is left out")


def check_broadcasts(name: str, x: Tensor, scores: tuple[int, ...]) -> None:
    """Raise ValueError unless x broadcasts to the scores, [B, H, Sq, Skv]."""
    tail = scores[len(scores) - x.dim() :]
    if x.dim() > len(scores) or any(own not in (1, full) for own, full in zip(x.shape, tail, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: it must broadcast to [batch, heads, queries, keys], {list(scores)};"
            " each dimension is that, or 1"
        )


def valid_by_sums(cu_q: Tensor, cu_kv: Tensor | None, batch: int, num_queries: int, num_keys: int) -> Valid:
    """Which positions hold tokens, of sums of lengths; without `cu_kv` keys have the lengths of queries.

    Raises:
        TypeError, ValueError: no [batch + 1] of integers; a length below 0 or beyond the tokens.
    """
    queries = _first("cu_seqlens_q", cu_q, batch, num_queries)
    if cu_kv is not None and cu_kv is not cu_q:
        return Valid(queries, _first("cu_seqlens_kv", cu_kv, batch, num_keys))
    if num_keys != num_queries:
        raise ValueError(
            f"cu_seqlens_kv is {'None' if cu_kv is None else 'cu_seqlens_q'}, and there are {num_queries} queries and"
            f" {num_keys} keys of each sequence: give cu_seqlens_kv, [{batch + 1}], where they differ"
        )
    return Valid(queries, queries)


def _first(name: str, cu: Tensor, batch: int, num_tokens: int) -> Tensor:
    """[B, S], True for the first tokens of each sequence, as many as the sums say."""
    check_sums(name, cu, batch)
    ends = known(cu)
    for begin, end in pairwise(ends or ()):
        if not 0 <= end - begin <= num_tokens:
            raise ValueError(
                f"{name} is {ends}: a sequence of {end - begin} tokens, and there is room for 0 to {num_tokens}; give"
                " sums of the lengths, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
            )
    return torch.arange(num_tokens, device=cu.device) < cu.diff()[:, None]
