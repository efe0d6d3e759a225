"""fp8_attention in plain PyTorch: the definition, forward and backward; scores of 128 keys at a time are in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.formats import E4M3, cast_float32
from octavo.kernels.fp8_attention.codes import BLOCK, AttentionCodes, blocks_of, decoded
from octavo.scaling import multiplier_from_amax, scale_from_multiplier

# Probabilities relative to the largest are at most 1, their codes at most 2^8: the largest power of two below 448, so
# that it moves into the exponent (2^(s - m + 8)) and out of the result with the sum, at no cost and no rounding.
PROBABILITY_EXPONENT = 8
LOG2_E = math.log2(math.e)


def fp8_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, AttentionCodes]:
    """As `octavo.kernels.fp8_attention.fp8_attention`; any device."""
    # 1. Codes.  [B, H, M, D] -> [B, H, M to 128, D]
    (q_codes, q_scale), (k_codes, k_scale), (v_codes, v_scale) = (cast_tokens_reference(x) for x in (q, k, v))
    vt = v_codes.transpose(-1, -2).contiguous()
    codes = AttentionCodes(q_codes, q_scale, k_codes, k_scale, vt, v_scale)
    # 2. Their attention, in float32 also where torch.autocast is on.
    with torch.autocast(q.device.type, enabled=False):
        out, lse = _attend(codes, (q.shape[2], k.shape[2]), scale, causal)
    # 3. As the kernel lays it out: heads side by side.  [B, M, H, D] seen as [B, H, M, D]
    return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), lse, codes


def cast_tokens_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [B, H, T to 128, D], scale [B, H, T / 128]) of x [B, H, T, D]."""
    # 1. Whole blocks, in float32.  [B, H, T / 128, 128, D]
    blocks = torch.nn.functional.pad(x.float(), (0, 0, 0, -x.shape[2] % BLOCK)).unflatten(2, (-1, BLOCK))
    # 2. amax of each, finite values only.  [B, H, T / 128]
    magnitude = blocks.abs()
    amax = torch.where(magnitude < math.inf, magnitude, 0.0).amax((-1, -2))
    # 3. Multiplier and scale, by the rule.
    multiplier = multiplier_from_amax(amax, E4M3, power_of_two=True)
    # 4. Codes.
    return cast_float32(blocks * multiplier[..., None, None], E4M3).flatten(2, 3), scale_from_multiplier(multiplier)


def _attend(codes: AttentionCodes, extents: tuple[int, int], scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """(out [B, H, M, D], lse [B, H, M]) in float32."""
    num_queries, num_keys = extents
    groups = codes.k.shape[1]
    # 1. Query heads under the head of keys that they read.  [B, G, H / G, M, D]
    q = codes.q[:, :, :num_queries].float().unflatten(1, (groups, -1))
    by_row = codes.q_scale.repeat_interleave(BLOCK, -1)[:, :, :num_queries].unflatten(1, (groups, -1))[..., None]
    by_row = by_row * torch.tensor(scale * LOG2_E, dtype=torch.float32, device=q.device)
    largest = torch.full_like(by_row, -math.inf)
    total, acc = torch.zeros_like(largest), torch.zeros_like(q)
    for block in range(blocks_of(num_keys)):
        k, vt, k_scale, v_scale = (x[:, :, None] for x in _block_of_keys(codes, block))
        # 2. Scores in units of log 2, -inf where a query does not look.  [B, G, H / G, M, 128]
        scores = (q @ k.mT) * (by_row * k_scale)
        scores = scores.masked_fill(~_looks(block, extents, causal, q.device), -math.inf)
        # 3. The largest so far, and probabilities relative to it, times 2^8.
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        shift = torch.where(larger == -math.inf, 0.0, larger)
        p = (scores - (shift - PROBABILITY_EXPONENT)).exp2()
        # 4. Their sum as it is; their codes times values; both with what there was.
        less = (largest - shift).exp2()
        total = total * less + p.sum(-1, keepdim=True)
        acc = acc * less + (cast_float32(p, E4M3).float() @ vt.mT) * v_scale
        largest = larger
    # 5. Nothing where a query looks at nothing; its lse is inf, so that exp(s - lse) is 0 in the backward.
    shift = torch.where(largest == -math.inf, 0.0, largest)
    lse = (shift - PROBABILITY_EXPONENT + total.log2()) / LOG2_E
    out, lse = torch.where(total == 0, 0.0, acc / total), torch.where(total == 0, math.inf, lse)
    return out.flatten(1, 2), lse.flatten(1, 2)[..., 0]


def _block_of_keys(codes: AttentionCodes, block: int) -> tuple[Tensor, ...]:
    """k [B, G, 128, D], vt [B, G, D, 128], and their scales, [B, G, 1, 1]."""
    tokens = slice(block * BLOCK, (block + 1) * BLOCK)
    scales = (scale[:, :, block, None, None] for scale in (codes.k_scale, codes.v_scale))
    return codes.k[:, :, tokens].float(), codes.vt[..., tokens].float(), *scales


def _looks(block: int, extents: tuple[int, int], causal: bool, device: torch.device) -> Tensor:
    """[M, 128] bool: which keys of the block a query attends to. Causal: the last query stands beside the last key."""
    num_queries, num_keys = extents
    key = torch.arange(block * BLOCK, (block + 1) * BLOCK, device=device)
    query = torch.arange(num_queries, device=device)[:, None]
    last = query + (num_keys - num_queries) if causal else query.new_full((num_queries, 1), num_keys)
    return (key < num_keys) & (key <= last)


def attention_gradient_reference(
    dy: Tensor, codes: AttentionCodes, out: Tensor, lse: Tensor, num_keys: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `octavo.kernels.fp8_attention.fp8_attention_gradient`; any device."""
    with torch.autocast(dy.device.type, enabled=False):
        return _gradients(dy, codes, out, lse, num_keys, scale, causal)


def _gradients(
    dy: Tensor, codes: AttentionCodes, out: Tensor, lse: Tensor, num_keys: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups, extents = codes.k.shape[1], (dy.shape[2], num_keys)
    # 1. What the codes stand for; query heads under the head of keys that they read.  [B, G, H / G, M, D]
    q, k, v = decoded(codes, *extents, torch.float32)
    q, dy32, out32 = (x.float().unflatten(1, (groups, -1)) for x in (q, dy, out))
    # 2. What a probability's gradient is compared with.  [B, G, H / G, M, 1]
    mean = (dy32 * out32).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for block in range(blocks_of(num_keys)):
        tokens = slice(block * BLOCK, min((block + 1) * BLOCK, num_keys))
        k_block, v_block = k[:, :, None, tokens], v[:, :, None, tokens]
        # 3. Probabilities again, of the decoded operands.  [B, G, H / G, M, 128]
        looks = _looks(block, extents, causal, dy.device)[:, : k_block.shape[-2]]
        p = ((q @ k_block.mT) * scale).masked_fill(~looks, -math.inf)
        p = (p - lse.unflatten(1, (groups, -1))[..., None]).exp()
        # 4. Gradients of values, scores, queries and keys.
        dv[:, :, tokens] = (p.mT @ dy32).sum(2)
        ds = p * (dy32 @ v_block.mT - mean) * scale
        dq += ds @ k_block
        dk[:, :, tokens] = (ds.mT @ q).sum(2)
    return dq.flatten(1, 2).to(dy.dtype), dk.to(dy.dtype), dv.to(dy.dtype)
