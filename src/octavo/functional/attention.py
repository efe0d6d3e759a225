"""Scaled dot-product attention by `torch.nn.functional.scaled_dot_product_attention`.

    s  [B, H, Sq, Skv] = scale q k^T + bias          p = softmax of s over the keys that a query attends to
    o  [B, H, Sq, Dv]  = dropout(p) v

q [B, H, Sq, D], k [B, G, Skv, D], v [B, G, Skv, Dv]; query head h reads head h // (H / G) of k and v. A query that
attends to no key at all gives zeros, and zero gradients.

torch picks the kernel: flash, cuDNN, memory-efficient or plain. Without a mask, or with a causal one that is aligned at
the top left, no mask is made; everything else is one mask tensor, of [Sq, Skv] or [B, H, Sq, Skv], which flash does not
take. Then k and v are repeated for each query head, since only flash, cuDNN and the plain kernel share them.

Kept for the backward, a token in bf16: q, k, v and o, 2 (2 H + 2 G) D bytes, and 4 H of statistics; with a mask tensor
its row too, and k and v repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo.functional.attention_mask import MaskRules, Valid, alibi_bias, attends, distance


class Attention(NamedTuple):
    """What a call runs with, apart from tensors.

    Attributes:
        rules: who attends to whom.
        scale: of the products of queries and keys.
        dropout: probability of dropping a probability.
    """

    rules: MaskRules
    scale: float
    dropout: float = 0.0


class Extras(NamedTuple):
    """What is added to the scores or forbidden, beyond the rules.

    Attributes:
        mask: bool, broadcasts to [B, H, Sq, Skv]; True is left out.
        bias: broadcasts to [B, H, Sq, Skv], added after scaling.
        slopes: of ALiBi, [H] or [B, H].
    """

    mask: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None


NOTHING = Extras()


def attention(
    q: Tensor, k: Tensor, v: Tensor, setup: Attention, valid: Valid | None = None, extras: Extras = NOTHING
) -> Tensor:
    """o [B, H, Sq, Dv] of q's dtype.

    Args:
        q: [B, H, Sq, D].
        k, v: [B, G, Skv, D], [B, G, Skv, Dv]; H is a multiple of G.
        setup: what to run with.
        valid: which positions hold tokens; None: all.
        extras: mask, bias, slopes.
    """
    causal = _plainly_causal(setup.rules, q.shape[-2], k.shape[-2])
    if causal is not None and valid is None and all(extra is None for extra in extras):
        return _without_mask(q, k, v, setup, causal)
    allowed, bias = _scores(q, k, setup.rules, valid, extras)
    if valid is not None:
        # What lies in the padding may be anything: 0 times NaN is NaN, and so would be what tokens give and get.
        q = zeros_elsewhere(q, valid.queries[:, None, :, None])
        k, v = (zeros_elsewhere(x, valid.keys[:, None, :, None]) for x in (k, v))
    return _with_mask(q, k, v, setup, allowed, bias)


def needs_mask(rules: MaskRules, num_queries: int, num_keys: int) -> bool:
    """The rules alone make a mask tensor."""
    return _plainly_causal(rules, num_queries, num_keys) is None


def zeros_elsewhere(x: Tensor, where: Tensor) -> Tensor:
    """x where it is True, and zeros; elsewhere x gets a zero gradient."""
    return torch.where(where, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _plainly_causal(rules: MaskRules, num_queries: int, num_keys: int) -> bool | None:
    """False: everybody attends to everything. True: causal at the top left. None: neither."""
    left, right = rules.window
    if rules.mask_type == "arbitrary" or 0 <= left < max(num_queries, num_keys) - 1:
        return None
    if right < 0 or (not rules.top_left and right >= num_queries - 1):
        return False
    aligned = rules.top_left or num_queries == num_keys
    return True if right == 0 and aligned else None


def _without_mask(q: Tensor, k: Tensor, v: Tensor, setup: Attention, causal: bool) -> Tensor:
    shared = q.shape[1] != k.shape[1]
    if shared and q.is_cuda and q.dtype is torch.float32:
        # The plain kernel alone would share heads of float32, with all scores in memory.
        k, v, shared = _repeated(k, q), _repeated(v, q), False
    return scaled_dot_product_attention(
        q, k, v, dropout_p=setup.dropout, is_causal=causal, scale=setup.scale, enable_gqa=shared
    )


def _scores(
    q: Tensor, k: Tensor, rules: MaskRules, valid: Valid | None, extras: Extras
) -> tuple[Tensor | None, Tensor | None]:
    """(who attends to whom, what is added to the scores), both of shapes that broadcast to [B, H, Sq, Skv]."""
    # 1. How far apart.  [Sq, Skv] or [B, 1, Sq, Skv]
    apart = distance(rules, q.shape[-2], k.shape[-2], valid, q.device)
    # 2. Window, padding and mask.
    allowed = attends(rules, apart, valid)
    if extras.mask is not None:
        allowed = ~extras.mask if allowed is None else allowed & ~extras.mask
    # 3. Biases.
    bias = extras.bias
    if extras.slopes is not None:
        slanted = alibi_bias(extras.slopes, apart)
        bias = slanted if bias is None else bias + slanted
    return allowed, bias


def _with_mask(
    q: Tensor, k: Tensor, v: Tensor, setup: Attention, allowed: Tensor | None, bias: Tensor | None
) -> Tensor:
    # 1. Queries that attend to nothing attend to everything, so that no kernel divides by zero.
    some = None if allowed is None else allowed.any(-1, keepdim=True)
    # 2. One mask tensor: bool, or what is added to the scores.
    mask = None if allowed is None or some is None else allowed | ~some
    if bias is not None:
        mask = bias.to(_product_dtype(q))
        if allowed is not None and some is not None:
            mask = mask.masked_fill(~allowed, float("-inf")).masked_fill(~some, 0.0)
    if mask is not None:
        mask = mask.expand(q.shape[0], mask.shape[-3] if mask.dim() > 2 else 1, q.shape[-2], k.shape[-2])
    # 3. Heads of k and v, one for each of q.
    k, v = _repeated(k, q), _repeated(v, q)
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=setup.dropout, scale=setup.scale)
    # 4. And give zeros.
    return out if some is None else zeros_elsewhere(out, some)


def _repeated(heads: Tensor, q: Tensor) -> Tensor:
    """[B, G, S, D] -> [B, H, S, D]"""
    times = q.shape[1] // heads.shape[1]
    return heads if times == 1 else heads.repeat_interleave(times, 1)


def _product_dtype(q: Tensor) -> torch.dtype:
    """The dtype that torch.autocast would give q."""
    device = q.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
