"""Attention layers beside a KV cache: where tokens stand, and whom they attend to.

New tokens follow those that the cache holds, of each sequence its own number: they are turned by the angles of their
places, and causal attention aligns them with the last keys.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from octavo.functional.rotary import apply_rotary, packed_positions
from octavo.modules.dot_product_attention import AttentionCall, DotProductAttention
from octavo.modules.kv_cache import Cache, Held


def turned(
    x: Tensor, angles: Tensor, layout: str, starts: tuple[int, ...], cu_seqlens: Tensor | None, interleaved: bool
) -> Tensor:
    """Heads turned by the angles of their places.

    Args:
        x: [S, B, H, D], [B, S, H, D] or [T, H, D], by layout.
        angles: [longest, 1, 1, R] or [longest, R], of places 0, 1, ...
        layout: "sbhd", "bshd" or "thd".
        starts: the place of the first token of each sequence; one number, if all are the same.
        cu_seqlens: of "thd", where each sequence begins.
        interleaved: rotary pairs are neighbours.
    """
    by_place = angles.reshape(angles.shape[0], angles.shape[-1])
    if layout == "thd":
        if cu_seqlens is None:
            raise ValueError("qkv_format='thd' needs cu_seqlens_q [batch + 1]: where each sequence begins, and the end")
        places = packed_positions(cu_seqlens, x.shape[0])
        return apply_rotary(x, by_place[places][:, None], interleaved)
    num_tokens = x.shape[0] if layout == "sbhd" else x.shape[1]
    if max(starts) + num_tokens > by_place.shape[0]:
        raise ValueError(
            f"rotary_pos_emb has {by_place.shape[0]} places, and tokens go up to place {max(starts) + num_tokens}: make"
            " more angles"
        )
    if len(set(starts)) == 1:
        taken = by_place[starts[0] : starts[0] + num_tokens]
        return apply_rotary(x, taken[:, None, None] if layout == "sbhd" else taken[:, None], interleaved)
    # [B, S, R]
    places = torch.tensor(starts, device=x.device)[:, None] + torch.arange(num_tokens, device=x.device)
    taken = by_place[places]
    return apply_rotary(x, (taken.transpose(0, 1) if layout == "sbhd" else taken)[:, :, None], interleaved)


def attended_from_cache(
    attention: DotProductAttention, q: Tensor, k: Tensor, v: Tensor, cache: Cache, call: AttentionCall
) -> Tensor:
    """Attention of new tokens to all so far: [..., H D].

    Args:
        attention: the layer, under which the cache keeps the tokens.
        q: [..., H, D] of the new tokens.
        k, v: [..., G, D] of the new tokens.
        cache: holds those before, and takes the new ones.
        call: of attention.
    """
    layout = attention.qkv_format
    if layout == "thd":
        raise ValueError("qkv_format='thd' has no KV cache: use 'bshd' or 'sbhd', and cache.expect(lengths)")
    if layout == "sbhd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    held = cache.append(attention, k, v)
    said = _with_lengths(attention, call, held, q.shape[1])
    out: Tensor = attention(q, held.k.to(q.dtype), held.v.to(q.dtype), qkv_format="bshd", after_cache=True, **said)
    return out.transpose(0, 1) if layout == "sbhd" else out


def _with_lengths(attention: DotProductAttention, call: AttentionCall, held: Held, num_tokens: int) -> AttentionCall:
    """The call, told of lengths where they differ."""
    if len(set(held.lengths)) == 1 and set(held.num_new) == {num_tokens}:
        return call
    mask_type = call.get("attn_mask_type") or attention.rules.mask_type
    padded = {"no_mask": "padding", "causal": "padding_causal", "causal_bottom_right": "padding_causal"}
    said = AttentionCall(**call)
    said["attn_mask_type"] = padded.get(mask_type, mask_type)
    said["attention_mask"] = None
    said["cu_seqlens_q"] = _sums(held.num_new, held.k.device)
    said["cu_seqlens_kv"] = _sums(held.lengths, held.k.device)
    return said


def _sums(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
