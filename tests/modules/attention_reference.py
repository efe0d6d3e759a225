"""Attention and a transformer layer in plain PyTorch, float64, step by step: the definition of correct.

Nothing here comes from Octavo but the weights. Masks are made position by position, in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# The roundoffs of float32 and of bfloat16.
FLOAT32, BFLOAT16 = 2.0**-24, 2.0**-9


def allowed_pairs(
    mask_type: str,
    window: tuple[int, int] | None,
    extents: tuple[int, int, int],
    lengths: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Tensor:
    """[B, 1, Sq, Skv] bool: who attends to whom, asked of each pair.

    Args:
        mask_type, window: as the layers take them.
        extents: B, Sq, Skv.
        lengths: of the queries' and the keys' sequences, where the type is a padding one.
    """
    batch, num_queries, num_keys = extents
    left, right = (-1, -1) if window is None else window
    if "causal" in mask_type:
        right = 0
    allowed = torch.zeros(batch, 1, num_queries, num_keys, dtype=torch.bool)
    for b in range(batch):
        real_q, real_k = (num_queries, num_keys) if lengths is None else (lengths[0][b], lengths[1][b])
        beside = 0 if mask_type in ("causal", "padding_causal") else real_k - real_q
        for i in range(real_q):
            for j in range(real_k):
                near = (left < 0 or j >= i + beside - left) and (right < 0 or j <= i + beside + right)
                allowed[b, 0, i, j] = near
    return allowed


def attention_steps(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o [B, H, Sq, Dv], the magnitudes that went into it) in float64.

    Args:
        q, k, v: [B, H, Sq, D], [B, G, Skv, D], [B, G, Skv, Dv].
        allowed: bool, broadcasts to [B, H, Sq, Skv].
        bias: broadcasts to [B, H, Sq, Skv].
        scale: 1 / sqrt(D) if None.
    """
    q, k, v = q.double(), k.double(), v.double()
    heads, groups = q.shape[1], k.shape[1]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # 1. The head of k and v that each head of q reads.  [B, G, S, D] -> [B, H, S, D]
    k = torch.stack([k[:, head // (heads // groups)] for head in range(heads)], 1)
    v = torch.stack([v[:, head // (heads // groups)] for head in range(heads)], 1)
    # 2. Scores.  [B, H, Sq, Skv]
    scores = scale * torch.einsum("bhid,bhjd->bhij", q, k)
    if bias is not None:
        scores = scores + bias.double()
    # 3. Probabilities; zeros where a query attends to nothing.  [B, H, Sq, Skv]
    allowed = allowed.expand_as(scores)
    highest = scores.masked_fill(~allowed, -math.inf).amax(-1, keepdim=True)
    highest = torch.where(highest.isinf(), 0.0, highest).detach()
    weights = torch.where(allowed, (torch.where(allowed, scores, highest) - highest).exp(), 0.0)
    total = weights.sum(-1, keepdim=True)
    probabilities = weights / torch.where(total == 0, 1.0, total)
    # 4. What they weigh.  [B, H, Sq, Dv]
    out = torch.einsum("bhij,bhjd->bhid", probabilities, v)
    magnitudes = torch.einsum("bhij,bhjd->bhid", probabilities, v.abs()).detach()
    return out, magnitudes


def attention_bound(q: Tensor, k: Tensor, magnitudes: Tensor, roundoff: float) -> Tensor:
    """How far an attention in `roundoff` may be from `attention_steps`, element by element.

    A score is a sum of D products, and wrong by at most (D + 2) u sum |q k| / sqrt(D); a probability by twice that, as
    both it and the sum under it move, and by (Skv + 8) u for the sum and the exponential; the result by Skv u more, and
    by one rounding. First order in u, with a factor of 2 for what is left out.
    """
    groups = q.shape[1] // k.shape[1]
    features, keys = q.shape[-1], k.shape[-2]
    products = q.double().abs() @ k.double().abs().repeat_interleave(groups, 1).mT / math.sqrt(features)
    # Sums run in float32 in any case; what is stored in between is rounded to the dtype.
    sums = (2 * (features + 2) * products.amax((-1, -2), keepdim=True) + 2 * keys + 8) * FLOAT32
    stored = (2 * products.amax((-1, -2), keepdim=True) + 3) * roundoff
    return 2 * (sums + stored) * magnitudes.detach()


def chained(length: int, products: int = 3) -> float:
    """Relative error of gradients in float32, as a Frobenius norm.

    `products` products one after the other, each of sums of `length` terms of random sign: every sum is wrong by
    `length` u of the sum of magnitudes, which is sqrt(length) times the sum.
    """
    return products * length**1.5 * FLOAT32


def turned_steps(x: Tensor, positions: Sequence[int], base: float, interleaved: bool, features: int) -> Tensor:
    """Rotary embedding of x [S, ..., D] pair by pair, by complex numbers, float64."""
    x = x.double()
    out = x.clone()
    half = features // 2
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        for place, position in enumerate(positions):
            turn = complex(math.cos(position * base ** (-2 * pair / features)), 0) + 1j * math.sin(
                position * base ** (-2 * pair / features)
            )
            turned = torch.complex(x[place, ..., a], x[place, ..., b]) * turn
            out[place, ..., a], out[place, ..., b] = turned.real, turned.imag
    return out


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str = "LayerNorm", eps: float = 1e-5) -> Tensor:
    """LayerNorm or RMSNorm over the last dimension."""
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def self_attention_steps(x: Tensor, state: Mapping[str, Tensor], heads: tuple[int, int], **options: Any) -> Tensor:
    """Multi-head self attention of x [S, B, hidden] with parts query, key, value of `state`; float64.

    Args:
        state: query_weight [H D, hidden], ..., proj.weight [hidden, H D], biases where there are.
        heads: H, G.
        options: `allowed` of `attention_steps`, [B, 1, S, S].
    """
    num_heads, groups = heads
    # 1. Projections.  [S, B, hidden] -> [B, heads, S, D]
    parts = []
    for name, count in (("query", num_heads), ("key", groups), ("value", groups)):
        made = x @ state[f"{name}_weight"].t() + state.get(f"{name}_bias", 0)
        parts.append(made.reshape(*x.shape[:2], count, -1).permute(1, 2, 0, 3))
    # 2. Attention.  [B, H, S, D]
    out, _ = attention_steps(*parts, options["allowed"])
    # 3. Back.  [B, H, S, D] -> [S, B, hidden]
    context = out.permute(2, 0, 1, 3).flatten(-2)
    return context @ state["proj.weight"].t() + state.get("proj.bias", 0)


def layer_steps(x: Tensor, state: Mapping[str, Tensor], heads: tuple[int, int], allowed: Tensor) -> Tensor:
    """A pre-norm encoder layer with gelu (tanh), x [S, B, hidden]; float64.

    Args:
        state: of `octavo.TransformerLayer`, in float64.
        heads: H, G.
        allowed: [B, 1, S, S].
    """
    attention = _below(state, "self_attention.")
    qkv, mlp = _below(attention, "layernorm_qkv."), _below(state, "layernorm_mlp.")
    own = {**qkv, **{name: value for name, value in attention.items() if name.startswith("proj.")}}
    # 1. Attention of what is normalised.
    n = normed(x, qkv["layer_norm_weight"], qkv.get("layer_norm_bias"))
    h = x + self_attention_steps(n, own, heads, allowed=allowed)
    # 2. The MLP of what is normalised.
    return h + mlp_steps(normed(h, mlp["layer_norm_weight"], mlp.get("layer_norm_bias")), mlp)


def mlp_steps(n: Tensor, mlp: Mapping[str, Tensor]) -> Tensor:
    """fc2 gelu(fc1 n), gelu in its tanh form."""
    z = n @ mlp["fc1_weight"].t() + mlp["fc1_bias"]
    a = 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    return a @ mlp["fc2_weight"].t() + mlp["fc2_bias"]


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def leaves(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters of a layer as leaves in float64, under their names."""
    return {name: p.detach().double().requires_grad_() for name, p in layer.named_parameters()}
