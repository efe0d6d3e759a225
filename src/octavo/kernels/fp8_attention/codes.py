"""AttentionCodes: queries, keys and values as the FP8 attention reads them, and what they stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

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
    """q [B, H, M, D], k, v [B, G, N, D]: what the codes stand for.

    In bfloat16 that is exact, whatever the scale: a code has 4 significant bits, and a scale none beside its exponent.
    In float16 it is, save for what lies below its normal numbers or rounds to 65536, which is inf.
    """
    v = codes.vt.transpose(-1, -2)
    pairs = (codes.q, codes.q_scale, num_queries), (codes.k, codes.k_scale, num_keys), (v, codes.v_scale, num_keys)
    return tuple(_values(x, scale, dtype)[:, :, :tokens] for x, scale, tokens in pairs)


def _values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    # float16 could not hold a scale below 2^-24.
    wide = torch.float32 if dtype == torch.float16 else dtype
    values: Tensor = codes.to(wide, memory_format=torch.contiguous_format).unflatten(2, (-1, BLOCK))
    return (values * scale.to(wide)[..., None, None]).flatten(2, 3).to(dtype)
