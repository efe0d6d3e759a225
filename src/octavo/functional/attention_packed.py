"""Attention of sequences of any lengths that lie one after the other, without padding between them ("thd").

    o[sequence b] = attention(q[sequence b], k[sequence b], v[sequence b])

q [Tq, H, D], k [Tk, G, D], v [Tk, G, Dv], o [Tq, H, Dv]; sequence b holds tokens cu[b] to cu[b + 1] - 1. There are
three ways, and `packed_way` says which and why:

    "varlen"    torch's flash attention for such sequences, where it can: CUDA, float16 or bfloat16, no bias, no dropout
    "loop"      one sequence after the other, each the very call that it would be alone; waits for the device once, to
                know the lengths
    "blocks"    in compiled code and CUDA graphs, which may not ask for lengths: one mask of [Tq, Tk] over all of them

Tokens before the first and behind the last sequence are padding: they give zeros.

A padded batch is packed first and unpacked then, so that it gives the very bits of its sequences without padding;
`keeps_padding` says when that cannot be: "loop" asks the device for the lengths, which compiled code and CUDA graphs
may not, and a bias of each position would have to be packed as well. One mask does it there, to rounding.

A batch without padding goes the usual way, see `octavo.functional.attention`; where that would make a mask tensor for
a window, "varlen" does without.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.functional.attention import NOTHING, Attention, Extras, attention, needs_mask, zeros_elsewhere
from octavo.functional.attention_lengths import check_ends
from octavo.functional.attention_mask import MaskRules, Valid, alibi_bias
from octavo.functional.rotary import sequence_of


class Packing(NamedTuple):
    """Where sequences lie.

    Attributes:
        cu_q, cu_kv: [B + 1] int32, where each begins, and where the last one ends.
        max_q, max_kv: the longest ones, if known; "varlen" needs them, or waits for the device.
    """

    cu_q: Tensor
    cu_kv: Tensor
    max_q: int | None = None
    max_kv: int | None = None


class PackedWay(NamedTuple):
    """How it is computed, and why not by `varlen_attn` of torch (empty where it is)."""

    name: str
    reasons: tuple[str, ...]


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing, slopes: Tensor | None = None
) -> Tensor:
    """o [Tq, H, Dv] of q's dtype.

    Args:
        q, k, v: [Tq, H, D], [Tk, G, D], [Tk, G, Dv].
        setup: what to run with.
        packing: where sequences lie.
        slopes: of ALiBi, [H].
    """
    way = packed_way(q, v, setup, packing, slopes).name
    if way == "varlen":
        return _varlen(q, k, v, setup, packing)
    if way == "blocks":
        return _blocks(q, k, v, setup, packing, slopes)
    return _loop(q, k, v, setup, packing, slopes)


def unpadded_attention(q: Tensor, k: Tensor, v: Tensor, setup: Attention, extras: Extras = NOTHING) -> Tensor:
    """o [B, H, Sq, Dv] of a batch of sequences that are all of one length.

    Args:
        q, k, v: [B, H, Sq, D], [B, G, Skv, D], [B, G, Skv, Dv].
        setup: what to run with.
        extras: mask, bias, slopes.
    """
    if not needs_mask(setup.rules, q.shape[2], k.shape[2]) or unpadded_reasons(q, k, v, setup, extras):
        return attention(q, k, v, setup, None, extras)
    # A window, or causal at the bottom right, without a mask tensor: flash knows both, of packed sequences.
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    out = _varlen(packed[0], packed[1], packed[2], setup, _even_packing(q, k), full=True)
    unpacked: Tensor = out.unflatten(0, (q.shape[0], q.shape[2]))
    return unpacked.transpose(1, 2)


def unpadded_reasons(q: Tensor, k: Tensor, v: Tensor, setup: Attention, extras: Extras) -> list[str]:
    """Why `varlen_attn` does not do for a batch of one length; empty if it does."""
    reasons = _varlen_reasons(q, v, setup, q.shape[2] == k.shape[2], extras.slopes)
    if extras.mask is not None or extras.bias is not None:
        reasons.append("a mask or bias of each position")
    return reasons


def _even_packing(q: Tensor, k: Tensor) -> Packing:
    """Of sequences that are all of one length; made where they are, so that nobody waits."""
    (batch, _, num_q, _), num_kv = q.shape, k.shape[2]
    ends = torch.arange(batch + 1, device=q.device, dtype=torch.int32)
    return Packing(ends * num_q, ends * num_kv, num_q, num_kv)


def padded_attention(
    q: Tensor, k: Tensor, v: Tensor, setup: Attention, valid: Valid, extras: Extras = NOTHING
) -> Tensor:
    """o [B, H, Sq, Dv] of a padded batch, zeros where there is no token.

    Args:
        q, k, v: [B, H, Sq, D], [B, G, Skv, D], [B, G, Skv, Dv].
        setup: what to run with.
        valid: which positions hold tokens.
        extras: mask, bias, slopes.
    """
    same = valid.queries is valid.keys
    if keeps_padding(q, v, setup, same, extras):
        return attention(q, k, v, setup, valid, extras)
    # 1. Tokens one after the other.  [B, H, S, D] -> [T, H, D]
    by_flash = not _varlen_reasons(q, v, setup, same, extras.slopes)
    of_queries = _places_of_tokens(valid.queries, by_flash)
    of_keys = of_queries if same else _places_of_tokens(valid.keys, by_flash)
    places = (q, of_queries), (k, of_keys), (v, of_keys)
    packed = [x.transpose(1, 2).flatten(0, 1).index_select(0, where) for x, where in places]
    cu_q = _sums(valid.queries)
    packing = Packing(cu_q, cu_q if same else _sums(valid.keys), q.shape[2], k.shape[2])
    # 2. Attention.  [T, H, Dv]
    out = packed_attention(packed[0], packed[1], packed[2], setup, packing, extras.slopes)
    # 3. Back to their places.  [B, H, Sq, Dv]
    spread = out.new_zeros(q.shape[0] * q.shape[2], *out.shape[1:]).index_copy(0, of_queries, out)
    unpacked: Tensor = spread.unflatten(0, (q.shape[0], q.shape[2]))
    return unpacked.transpose(1, 2)


def _places_of_tokens(real: Tensor, padding_too: bool) -> Tensor:
    """[T] places in the batch of its tokens, in order; on request those of padding behind them.

    How many tokens there are only the device knows; with the padding nobody has to ask.
    """
    return (~real).flatten().int().argsort(stable=True) if padding_too else real.flatten().nonzero()[:, 0]


def _sums(real: Tensor) -> Tensor:
    return torch.nn.functional.pad(real.sum(-1).cumsum(0), (1, 0)).int()


def keeps_padding(q: Tensor, v: Tensor, setup: Attention, same_lengths: bool, extras: Extras) -> list[str]:
    """Why a padded batch is not packed; empty if it is."""
    reasons = []
    if extras.bias is not None:
        reasons.append("a bias of each position")
    if extras.slopes is not None and extras.slopes.dim() > 1:
        reasons.append("ALiBi slopes of each sequence")
    if _may_not_ask(q):
        slower = _varlen_reasons(q, v, setup, same_lengths, extras.slopes)
        if slower:
            reasons += ["compiled code and CUDA graphs may not ask for lengths", *slower]
    return reasons


def packed_way(q: Tensor, v: Tensor, setup: Attention, packing: Packing, slopes: Tensor | None = None) -> PackedWay:
    """Which of the three ways these operands take; of q and v their last dimension, device and dtype count."""
    reasons = _varlen_reasons(q, v, setup, packing.cu_q is packing.cu_kv, slopes)
    if not reasons:
        return PackedWay("varlen", ())
    return PackedWay("blocks" if _may_not_ask(q) else "loop", tuple(reasons))


def _may_not_ask(q: Tensor) -> bool:
    """Lengths are on the device, and the host may not wait for them."""
    return torch.compiler.is_compiling() or (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _varlen_reasons(q: Tensor, v: Tensor, setup: Attention, same_lengths: bool, slopes: Tensor | None) -> list[str]:
    if not q.is_cuda:
        return [f"{q.device.type}: varlen_attn is for CUDA"]
    accepted = _varlen_arguments()
    if not accepted:
        return ["this torch has no torch.nn.attention.varlen"]
    reasons = ["no queries"] if 0 in q.shape else []
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"{dtype}: varlen_attn takes float16 and bfloat16")
    if setup.dropout > 0:
        reasons.append("attention dropout")
    if slopes is not None:
        reasons.append("ALiBi")
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 256 or q.shape[-1] % 8:
        reasons.append(f"heads of {q.shape[-1]} and {v.shape[-1]}: flash takes equal ones, multiples of 8 up to 256")
    if setup.rules.window not in ((-1, -1), (-1, 0)) and "window_size" not in accepted:
        reasons.append("this torch's varlen_attn has no sliding window")
    if setup.rules.top_left and not same_lengths:
        reasons.append(f"{setup.rules.mask_type} of different lengths: flash aligns at the bottom right")
    if "scale" not in accepted and setup.scale != q.shape[-1] ** -0.5:
        reasons.append("this torch's varlen_attn has no scale")
    return reasons


_FOUND: list[tuple[str, ...]] = []


def _varlen_arguments() -> tuple[str, ...]:
    """Names of the arguments of torch's varlen_attn; none if there is no such function."""
    if not _FOUND:
        try:
            from torch.nn.attention.varlen import varlen_attn

            _FOUND.append(tuple(inspect.signature(varlen_attn).parameters))
        except ImportError:
            _FOUND.append(())
    return _FOUND[0]


# Dynamo runs it while it traces, and keeps the answer.
_varlen_arguments._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _varlen(q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing, full: bool = False) -> Tensor:
    """`full`: there are no tokens behind the last sequence."""
    if full:
        return _by_flash(q, k, v, setup, packing)
    # Flash writes nothing at tokens that belong to no sequence, neither of results nor of gradients.
    inside_q = _inside(packing.cu_q, q.shape[0])
    inside_kv = inside_q if packing.cu_kv is packing.cu_q else _inside(packing.cu_kv, k.shape[0])
    q, k, v = zeros_elsewhere(q, inside_q), zeros_elsewhere(k, inside_kv), zeros_elsewhere(v, inside_kv)
    return zeros_elsewhere(_by_flash(q, k, v, setup, packing), inside_q)


def _inside(cu: Tensor, tokens: int) -> Tensor:
    """[T, 1, 1] bool: the token belongs to a sequence."""
    token = torch.arange(tokens, device=cu.device)
    return ((token >= cu[0]) & (token < cu[-1]))[:, None, None]


def _by_flash(q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    accepted, more = _varlen_arguments(), dict[str, Any]()
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (operand.to(torch.get_autocast_dtype("cuda")) for operand in (q, k, v))
    if "scale" in accepted:
        more["scale"] = setup.scale
    if "window_size" in accepted:
        more["window_size"] = setup.rules.window
    else:
        more["is_causal"] = setup.rules.window[1] == 0
    # 1. Heads of k and v, one for each of q, where torch does not share them.
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in accepted:
            more["enable_gqa"] = True
        else:
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    # 2. The longest sequences.
    max_q = packing.max_q or q.shape[0]
    max_kv = packing.max_kv or k.shape[0]
    cu_q, cu_kv = packing.cu_q.int(), packing.cu_kv.int()
    out: Any = varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu_q, cu_kv, max_q, max_kv, **more)
    result: Tensor = out
    return result


def _loop(q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing, slopes: Tensor | None) -> Tensor:
    ends_q, ends_kv = packing.cu_q.tolist(), packing.cu_kv.tolist()
    check_ends("cu_seqlens_q", ends_q, q.shape[0])
    check_ends("cu_seqlens_kv", ends_kv, k.shape[0])
    extras = Extras(slopes=slopes)
    # Sequences without tokens as well: where there are no others, they are what the gradient goes through.
    places = zip(pairwise(ends_q), pairwise(ends_kv), strict=True)
    parts = []
    for mine, theirs in [(slice(*own), slice(*other)) for own, other in places] or [(slice(0, 0), slice(0, 0))]:
        # [S, H, D] -> [1, H, S, D] -> [S, H, Dv]
        out = attention(_one(q[mine]), _one(k[theirs]), _one(v[theirs]), setup, None, extras)
        parts.append(out[0].transpose(0, 1))
    outside = ends_q[0], q.shape[0] - ends_q[-1]
    before, behind = (_zeros(q, v, tokens).to(parts[0].dtype) for tokens in outside)
    return torch.cat([before, *parts, behind])


def _one(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _zeros(q: Tensor, v: Tensor, tokens: int) -> Tensor:
    return q.new_zeros(tokens, q.shape[1], v.shape[-1])


def _blocks(q: Tensor, k: Tensor, v: Tensor, setup: Attention, packing: Packing, slopes: Tensor | None) -> Tensor:
    rules = setup.rules
    # 1. Sequence of each token, and its place there.  [T]
    seq_q, place_q = _places(packing.cu_q, q.shape[0])
    seq_kv, place_kv = _places(packing.cu_kv, k.shape[0])
    q = zeros_elsewhere(q, (place_q >= 0)[:, None, None])
    k, v = (zeros_elsewhere(x, (place_kv >= 0)[:, None, None]) for x in (k, v))
    # 2. How far apart.  [Tq, Tk]
    apart = place_kv - place_q[:, None]
    if not rules.top_left:
        longer = packing.cu_kv.diff() - packing.cu_q.diff()
        apart = apart - longer[seq_q][:, None]
    # 3. Who attends to whom.
    left, right = rules.window
    allowed = (seq_q[:, None] == seq_kv) & (place_q >= 0)[:, None] & (place_kv >= 0)
    if left >= 0:
        allowed = allowed & (apart >= -left)
    if right >= 0:
        allowed = allowed & (apart <= right)
    bias = None if slopes is None else alibi_bias(slopes, apart)
    whole = setup._replace(rules=MaskRules("arbitrary", (-1, -1)))
    return attention(_one(q), _one(k), _one(v), whole, None, Extras(~allowed, bias))[0].transpose(0, 1)


def _places(cu: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """([T] sequence, [T] place in it, negative where there is no token)."""
    token = torch.arange(tokens, device=cu.device)
    sequence = sequence_of(cu, token)
    place = token - cu.long()[sequence]
    return sequence, torch.where(token < cu[-1], place, -1)
