"""How a call of attention is computed, in words: for whoever wonders about its speed or its memory."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.functional.attention import Attention, Extras, needs_mask
from octavo.functional.attention_packed import (
    PackedWay,
    Packing,
    keeps_padding,
    packed_way,
    unpadded_reasons,
)

_NAMES = {"varlen": "varlen_attn", "loop": "a loop over sequences", "blocks": "one mask for all sequences"}


def attention_way(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    setup: Attention,
    extras: Extras,
    packing: Packing | None = None,
    same_lengths: bool = True,
) -> str:
    """Which function computes it, and why no faster one does.

    Args:
        q, k, v: [B, H, Sq, D] and so on; packed ones, with their packing, [T, H, D].
        setup, extras: of the call.
        packing: of packed sequences.
        same_lengths: of padded ones, queries and keys have the same.
    """
    if packing is not None:
        return _said(packed_way(q, v, setup, packing, extras.slopes))
    usual = f"scaled_dot_product_attention, by the kernel that torch has on {q.device.type}"
    if setup.rules.padded:
        kept = keeps_padding(q, v, setup, same_lengths, extras)
        if kept:
            return f"{usual}, with a mask tensor ({'; '.join(kept)})"
        ends = torch.empty(0)
        lengths = Packing(ends, ends if same_lengths else torch.empty(0))
        return f"packed first, {_said(packed_way(q, v, setup, lengths, extras.slopes))}"
    nothing = all(extra is None for extra in extras)
    if nothing and not needs_mask(setup.rules, q.shape[2], k.shape[2]):
        return usual
    reasons = unpadded_reasons(q, k, v, setup, extras)
    return f"{usual}, with a mask tensor ({'; '.join(reasons)})" if reasons else _NAMES["varlen"]


def _said(way: PackedWay) -> str:
    return _NAMES[way.name] + (f" ({'; '.join(way.reasons)})" if way.reasons else "")
