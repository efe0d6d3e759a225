"""Tokens by expert and back: the rows of an expert lie together, in the order of the tokens, expert 0 first.

    permute      rows [M, H]: rows[m] = x[token[m]]                           one row a token and expert chosen by it
    unpermute    y [T, H]: y[t] = sum over s of p[t, s] * rows[inverse[t, s]]  s: the experts of token t, in order

Who chose whom comes in one of two forms: the index form [T, k], k experts a token, or the mask form [T, E], True where
expert e is chosen, any number a token. Sums are taken in float32, in the order of s, and rounded once: forward and
backward are gathers, so both are deterministic on every device. (What torch makes of `x[token]` in a backward adds in
whatever order the device comes to it.) Nothing is asked of the device, if the mask form is told how many rows there
will be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.grouped_sizes import is_integer


class TokenMap(NamedTuple):
    """Which row belongs to which token.

    Attributes:
        token: [M], the token of each row.
        slot: [M], where each row stands in `inverse` laid flat.
        inverse: [T, S], the row of each token for the s-th of its experts; -1 if it has fewer.
        column: [T, S], the expert of each of these, of the mask form; None of the index form, where it is s itself.
        num_experts: E.
    """

    token: Tensor
    slot: Tensor
    inverse: Tensor
    column: Tensor | None
    num_experts: int


class Permuted(NamedTuple):
    """Tokens by expert.

    Attributes:
        rows: [M, H].
        probs: [M], or None if none were given.
        m_splits: [E] int32, rows of each expert, on the device: what `octavo.GroupedLinear` takes.
        map: for `unpermute_tokens`.
    """

    rows: Tensor
    probs: Tensor | None
    m_splits: Tensor
    map: TokenMap


def permute_tokens(
    x: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    num_experts: int | None = None,
    num_out_tokens: int | None = None,
    top_k: int | None = None,
) -> Permuted:
    """The tokens x [T, H] by expert.

    Args:
        x: any floating dtype.
        routing: the index form, integers [T, k] from 0 to num_experts - 1, each expert at most once a token (which is
            checked on a CPU); or the mask form, booleans [T, E].
        probs: of the shape of `routing`, permuted along with the rows.
        num_experts: E, for the index form.
        num_out_tokens: M, of the mask form, how many it chooses; without it the device is asked, which waits for it. A
            device is told to check it and is not waited for; a mask on a CPU is checked at once.
        top_k: of the mask form, at most how many experts a token has; E if left out. What is beyond is left out.

    Raises:
        ValueError: shapes, dtypes, experts or `num_out_tokens` do not fit.
    """
    _check(x, routing, probs)
    _check_options(num_experts, num_out_tokens, top_k)
    if routing.dtype == torch.bool:
        if num_experts is not None and num_experts != routing.shape[1]:
            raise ValueError(f"num_experts is {num_experts}, and the mask has {routing.shape[1]} columns: leave it out")
        made, splits = _map_of_mask(routing, num_out_tokens, top_k)
    else:
        if num_experts is None:
            raise ValueError("the index form does not tell how many experts there are: give num_experts")
        for name, value in (("num_out_tokens", num_out_tokens), ("top_k", top_k)):
            if value is not None:
                raise ValueError(
                    f"{name} is {value}, and routing {tuple(routing.shape)} is of the index form, which says it itself:"
                    " leave it out, or give a mask [T, E] of booleans"
                )
        made, splits = _map_of_indices(routing, num_experts)
    rows: Tensor = _Permute.apply(x, made.token, made.inverse)
    taken = None
    if probs is not None:
        by_slot = probs if made.column is None else probs.gather(1, made.column)
        taken = by_slot.reshape(-1).gather(0, made.slot)
    return Permuted(rows, taken, splits, made)


def unpermute_tokens(rows: Tensor, map: TokenMap, probs: Tensor | None = None) -> Tensor:
    """Each token's rows summed, weighted if `probs` are given -> [T, H].

    Args:
        rows: [M, H].
        map: that `permute_tokens` gave.
        probs: of the shape of the routing that the map was made of: [T, k] of the index form, [T, E] of the mask form.

    Raises:
        ValueError: shapes do not fit.
    """
    if rows.dim() != 2 or rows.shape[0] != map.token.shape[0]:
        raise ValueError(f"rows have shape {tuple(rows.shape)}: the map is one of {map.token.shape[0]} rows")
    weights = None
    if probs is not None:
        _check_probs(probs, map)
        weights = probs if map.column is None else probs.gather(1, map.column)
    result: Tensor = _Combine.apply(rows, weights, map.token, map.slot, map.inverse)
    return result


def permute_reference(x: Tensor, mask: Tensor) -> Tensor:
    """What `permute_tokens` gives, expert by expert -> [M, H]. x [T, H]; mask [T, E] bool."""
    parts = []
    for expert in range(mask.shape[1]):
        # 1. The tokens that chose this expert, in their order.  [T, H] -> [m, H]
        parts.append(x[mask[:, expert]])
    # 2. One expert after the other.  [M, H]
    return torch.cat(parts)


def unpermute_reference(rows: Tensor, mask: Tensor, probs: Tensor | None = None) -> Tensor:
    """What `unpermute_tokens` gives, expert by expert -> [T, H]. rows [M, H]; mask, probs [T, E]."""
    # 1. Nothing yet, in float32.  [T, H]
    y = rows.new_zeros((mask.shape[0], rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    start = 0
    for expert in range(mask.shape[1]):
        # 2. The rows of this expert, weighted.  [m, H]
        chosen = mask[:, expert]
        part = rows[start : start + int(chosen.sum())].to(y.dtype)
        start += part.shape[0]
        if probs is not None:
            part = part * probs[chosen, expert, None]
        # 3. Each added to its token.  [T, H]
        y = y.index_put((chosen.nonzero()[:, 0],), part, accumulate=True)
    return y.to(rows.dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _combined(drows, None, inverse), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, token: Tensor, slot: Tensor, inverse: Tensor) -> Tensor:
        needs_dw = weights is not None and ctx.needs_input_grad[1]
        ctx.save_for_backward(rows if needs_dw else None, weights, token, slot, inverse)
        ctx.dtype = rows.dtype
        return _combined(rows, weights, inverse)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, token, slot, inverse = ctx.saved_tensors
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            # [T, H] -> [M, H]
            drows = dy.index_select(0, token)
            if weights is not None:
                by_row = weights.reshape(-1).gather(0, slot)[:, None]
                drows = (drows.to(_wide(drows.dtype)) * by_row).to(ctx.dtype)
        if rows is not None:
            # [T, H] . [T, H] -> [T], for each of a token's experts
            wide = dy.to(_wide(dy.dtype))
            parts = []
            for column in inverse.unbind(1):
                dots = (_rows_of(rows, column) * wide).sum(1)
                parts.append(torch.where(column >= 0, dots, 0.0))
            dweights = torch.stack(parts, dim=1).to(weights.dtype)
        return drows, dweights, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows_of(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] in float32; anything where the index is -1."""
    if rows.shape[0] == 0:
        return rows.new_zeros((index.shape[0], rows.shape[1]), dtype=_wide(rows.dtype))
    return rows.index_select(0, index.clamp(min=0)).to(_wide(rows.dtype))


def _combined(rows: Tensor, weights: Tensor | None, inverse: Tensor) -> Tensor:
    """[M, H] -> [T, H], see the module."""
    total = rows.new_zeros((inverse.shape[0], rows.shape[1]), dtype=_wide(rows.dtype))
    for s, column in enumerate(inverse.unbind(1)):
        part = _rows_of(rows, column)
        if weights is not None:
            part = part * weights[:, s, None]
        # Not a product with 0: what is not there may be anything.
        total = total + torch.where((column >= 0)[:, None], part, 0.0)
    return total.to(rows.dtype)


def _map_of_indices(routing: Tensor, num_experts: int) -> tuple[TokenMap, Tensor]:
    tokens, k = routing.shape
    flat = routing.reshape(-1)
    _check_range(flat, num_experts)
    _check_once(routing)
    # 1. Stable: the tokens of an expert stay in their order.  [T k] -> [M]
    slot = torch.sort(flat, stable=True).indices
    # 2. Where each has gone.  [M] -> [T, k]
    inverse = torch.empty_like(slot).scatter_(0, slot, torch.arange(tokens * k, device=slot.device))
    # 3. How many an expert has; integers, summed in any order.
    experts = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    splits = (flat[:, None] == experts).sum(0, dtype=torch.int32)
    return TokenMap(slot // k, slot, inverse.reshape(tokens, k), None, num_experts), splits


def _map_of_mask(mask: Tensor, num_rows: int | None, top_k: int | None) -> tuple[TokenMap, Tensor]:
    tokens, num_experts = mask.shape
    width = num_experts if top_k is None else top_k
    if not 1 <= width <= num_experts:
        raise ValueError(f"top_k is {top_k}: a token has from 1 to {num_experts} experts")
    # 1. Which of a token's experts each is; and its row, counted by expert, then by token.  [T, E]
    order = mask.cumsum(1) - 1
    mask = mask & (order < width)
    row = (mask.t().reshape(-1).cumsum(0) - 1).reshape(num_experts, tokens).t()
    num_rows = int(mask.sum()) if num_rows is None else num_rows
    _check_count(mask, num_rows)
    # 2. What is not chosen goes beyond the end.  [T, S]
    place = torch.where(mask, order, width)
    inverse = row.new_full((tokens, width + 1), -1).scatter_(1, place, row)[:, :width]
    experts = torch.arange(num_experts, device=mask.device).expand(tokens, num_experts)
    column = experts.new_zeros((tokens, width + 1)).scatter_(1, place, experts)[:, :width]
    # 3. The other way.  [M]
    flat = torch.arange(tokens * width, device=mask.device).reshape(tokens, width)
    target = torch.where(inverse >= 0, inverse, num_rows)
    slot = flat.new_zeros(num_rows + 1).scatter_(0, target.reshape(-1), flat.reshape(-1))[:num_rows]
    splits = mask.sum(0, dtype=torch.int32)
    return TokenMap(slot // width, slot, inverse, column, num_experts), splits


def _check_range(flat: Tensor, num_experts: int) -> None:
    inside = ((flat >= 0) & (flat < num_experts)).all()
    if flat.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(inside, "routing names an expert that there is not")
    elif not inside:
        outside = flat[(flat < 0) | (flat >= num_experts)][0]
        raise ValueError(f"routing names expert {int(outside)}: experts are 0 to {num_experts - 1}")


def _check_once(routing: Tensor) -> None:
    if routing.is_cuda or torch.compiler.is_compiling():
        # Twice the row of a token, twice in its sum: no error on the device, where looking for it costs a sort.
        return
    ordered = routing.sort(1).values
    twice = ordered[:, 1:] == ordered[:, :-1]
    if twice.any():
        token, place = twice.nonzero()[0].tolist()
        raise ValueError(
            f"routing names expert {int(ordered[token, place])} twice for token {token}, {routing[token].tolist()}:"
            " each expert at most once a token"
        )


def _check_probs(probs: Tensor, map: TokenMap) -> None:
    index_form = map.column is None
    tokens, width = map.inverse.shape
    expected = (tokens, width if index_form else map.num_experts)
    if tuple(probs.shape) != expected:
        form = "index form, [T, k]" if index_form else "mask form, [T, E]"
        raise ValueError(
            f"probs have shape {tuple(probs.shape)}: expected {expected}, that of the routing which the map was made"
            f" of, in the {form}"
        )


def _check_options(num_experts: int | None, num_out_tokens: int | None, top_k: int | None) -> None:
    named = (("num_experts", num_experts, 1), ("num_out_tokens", num_out_tokens, 0), ("top_k", top_k, 1))
    for name, value, least in named:
        if value is not None and (not is_integer(value) or value < least):
            raise ValueError(f"{name} is {value!r}: expected an integer of {least} or more")


def _check_count(mask: Tensor, num_rows: int) -> None:
    if mask.is_cuda or torch.compiler.is_compiling():
        torch._assert_async(mask.sum() == num_rows, "num_out_tokens is not how many the mask chooses")
    elif int(mask.sum()) != num_rows:
        raise ValueError(f"num_out_tokens is {num_rows}, and the mask chooses {int(mask.sum())}: give that, or nothing")


def _check(x: Tensor, routing: Tensor, probs: Tensor | None) -> None:
    if x.dim() != 2 or routing.dim() != 2 or routing.shape[0] != x.shape[0]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and routing {tuple(routing.shape)}: expected [T, H], and [T, k] or [T, E]"
        )
    if routing.is_floating_point() or routing.is_complex():
        raise ValueError(f"routing has dtype {routing.dtype}: expected integers (experts) or bool (a mask)")
    if probs is not None and probs.shape != routing.shape:
        raise ValueError(f"probs have shape {tuple(probs.shape)}: expected that of routing, {tuple(routing.shape)}")
