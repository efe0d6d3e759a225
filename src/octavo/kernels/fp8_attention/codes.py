"""AttentionCodes: queries, keys and values as the FP8 attention reads them, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.triton_support import uses_triton

# Tokens that share a scale, and keys that a step of the loop takes.
BLOCK = 128


class AttentionCodes(NamedTuple):
    """E4M3 codes and float32 scales, powers of two, one for BLOCK tokens of a head; M and N are filled up with zeros.

    Attributes:
        q: [B, H, M to 128, D].
        q_scale: [B, H, M / 128].
        k: [B, G, N to 128, D].
        k_scale: [B, G, N / 128].
        vt: [B, G, D, N to 128], values by feature: FP8 tensor cores read both operands along what is summed over.
        v_scale: [B, G, N / 128].
    """

    q: Tensor
    q_scale: Tensor
    k: Tensor
    k_scale: Tensor
    vt: Tensor
    v_scale: Tensor


def blocks_of(tokens: int) -> int:
    """Scales of so many tokens."""
    return (tokens + BLOCK - 1) // BLOCK


def decoded(codes: AttentionCodes, num_queries: int, num_keys: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q [B, H, M, D], k, v [B, G, N, D]: what the codes stand for; each lies token by token, heads side by side.

    In bfloat16 that is exact, whatever the scale: a code has 4 significant bits, and a scale none beside its exponent.
    In float16 it is, save for what lies below its normal numbers or rounds to 65536, which is inf.
    """
    q, k = (codes.q, codes.q_scale, num_queries), (codes.k, codes.k_scale, num_keys)
    if uses_triton(codes.q):
        from octavo.kernels.fp8_attention.cast_kernel import decode_tokens_triton

        v = decode_tokens_triton(codes.vt, codes.v_scale, num_keys, dtype, by_feature=True)
        return decode_tokens_triton(*q, dtype), decode_tokens_triton(*k, dtype), v
    return tuple(_values(*each, dtype) for each in (q, k, (codes.vt.mT, codes.v_scale, num_keys)))


def _values(codes: Tensor, scale: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    # In float32: float16 could not hold a scale below 2^-24.
    blocks: Tensor = codes.float().unflatten(2, (-1, BLOCK)) * scale[..., None, None]
    return blocks.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(dtype).contiguous().transpose(1, 2)
