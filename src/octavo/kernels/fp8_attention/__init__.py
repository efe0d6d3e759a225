"""fp8_attention: attention whose two products run on FP8 units; and its gradients, of what the codes stand for.

    s [B, H, M, N] = scale q k^T                            of E4M3 codes; a scale for 128 tokens of a head
    p              = exp(s - m)                             m [B, H, M] the largest score so far, 128 keys at a time
    o [B, H, M, D] = sum_j E4M3(2^8 p_ij) v_j / sum_j 2^8 p_ij           of E4M3 codes of v
    lse [B, H, M]  = log sum_j exp(s_ij)

q [B, H, M, D], k, v [B, G, N, D], bfloat16 or float16, D of 64 or 128; query head h reads head h // (H / G) of k and v.
`causal`: the last query stands beside the last key. A query that looks at no key gives zeros, and has an lse of inf.

Scales are powers of two, so that what codes stand for is exact in bfloat16. Sums are in float32, 128 keys at a time.
NaN in a query or key makes NaN of whoever has it or looks at it; a value that is NaN may do so to its feature of others
as well, as 0 times NaN is NaN. An inf counts as the largest number that there is beside it.

What E4M3 does to probabilities. Relative to the largest so far they are at most 1; times 2^8, the largest power of two
below 448, they have 4 significant bits down to 2^-14, and half a step of 2^-17 absolute below. The largest so far is no
larger than that of the whole row, so a block that was cast earlier is scaled down afterwards, and its error with it:
of N keys rounding to zero loses at most N 2^-18 of a row whose sum is 1 or more. The sum, and lse, are of probabilities
that are not rounded, so that the backward finds the very ones.

Kernel against reference: they have the same codes, blocks and running maxima. A score differs by the rounding of its
products' sum, d; a probability so by d relative, and 2^-21 for the exponential; its code is then the same, or a
neighbour where it is as near as that to a tie: an error of 2^-3 p at most, on d / 2^-4 of the codes. So the result
differs by (2^-3 + d) sum p |v| / sum p at the very most, and by about sqrt(2^-3 d) of its size as a Frobenius norm.
In float32 d is D 2^-24 of sum |q k|; Hopper's tensor core keeps 13 fraction bits beside the largest of 32 products:
2^-13 of that for each product that is cut off, about 3e-4 for N(0, 1) data of 128 features, which makes 0.6 %.

Backward: P again of the decoded operands, as flash attention has it, from out and lse; casts pass the gradient.
    ds = p (dy v^T - sum dy o)         dq = scale ds k         dk = scale ds^T q         dv = p^T dy
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.fp8_attention.codes import BLOCK, AttentionCodes, blocks_of, decoded
from octavo.kernels.fp8_attention.reference import (
    attention_gradient_reference,
    cast_tokens_reference,
    fp8_attention_reference,
)
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons, uses_triton

DTYPES = (torch.bfloat16, torch.float16)
FEATURES = (64, 128)


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, AttentionCodes]:
    """(out [B, H, M, D] of q's dtype, lse [B, H, M] float32, the codes); out lies as [B, M, H, D] in memory.

    Args:
        q: [B, H, M, D], bfloat16 or float16, any strides.
        k, v: [B, G, N, D] of the same dtype; H is a multiple of G.
        scale: of the products of queries and keys, above 0.
        causal: query i attends to keys up to i + N - M.

    Raises:
        ValueError: shapes, dtypes or a scale that do not fit.
    """
    _check(q, k, v, scale)
    if not torch.compiler.is_compiling():
        return _launch(q, k, v, scale, causal)
    out, lse, *codes = _operator(q, k, v, scale, causal)
    return out, lse, AttentionCodes(*codes)


def fp8_attention_gradient(
    dy: Tensor, codes: AttentionCodes, out: Tensor, lse: Tensor, num_keys: int, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq [B, H, M, D], dk, dv [B, G, N, D]) of dy's dtype: by torch's flash attention of the decoded operands on CUDA.

    Where torch has none, and on the CPU, by the steps of the reference.

    Args:
        dy: [B, H, M, D], the gradient of `out`.
        codes, out, lse: what `fp8_attention` gave.
        num_keys: N.
        scale, causal: as it had them.
    """
    if torch.compiler.is_compiling():
        dq, dk, dv = _gradient_operator(dy, *codes, out, lse, num_keys, scale, causal)
        return dq, dk, dv
    return _gradient(dy, *codes, out, lse, num_keys, scale, causal)


def unsupported_reasons(q: Tensor) -> list[str]:
    """Why the Triton twin does not run on q's device; then the PyTorch reference does."""
    return device_reasons(q.device)


def operand_reasons(q: Tensor, k: Tensor, v: Tensor, scale: float, dtype: torch.dtype | None = None) -> list[str]:
    """Why these are no operands of `fp8_attention`; empty if they are.

    Args:
        q, k, v: [B, H, M, D], [B, G, N, D], [B, G, N, Dv].
        scale: of softmax.
        dtype: what they will be converted to; q's own if None.
    """
    dtype, reasons = q.dtype if dtype is None else dtype, feature_reasons(q.shape[-1], v.shape[-1])
    if dtype not in DTYPES:
        reasons.append(f"{dtype}: FP8 products are of bfloat16 or float16")
    if 0 in q.shape or 0 in k.shape:
        reasons.append("no queries or no keys")
    if not 0 < scale < math.inf:
        reasons.append(f"a softmax scale of {scale}: FP8 products take one above 0")
    return reasons


def feature_reasons(of_keys: int, of_values: int) -> list[str]:
    """Why heads of so many features are none of `fp8_attention`; empty if they are."""
    if of_keys in FEATURES and of_keys == of_values:
        return []
    return [f"heads of {of_keys} and {of_values} features: FP8 products take equal ones, of 64 or 128"]


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    fits = q.dim() == k.dim() == 4 and k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not fits or q.shape[1] % max(k.shape[1], 1) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "fp8_attention takes q [B, H, M, D] and k, v [B, G, N, D] of one dtype, H a multiple of G; found"
            f" {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} of {q.dtype}, {k.dtype}, {v.dtype}"
        )
    reasons = operand_reasons(q, k, v, scale)
    if reasons:
        raise ValueError(f"fp8_attention does not take this: {'; '.join(reasons)}; use scaled_dot_product_attention")


def _launch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, AttentionCodes]:
    if uses_triton(q):
        from octavo.kernels.fp8_attention.triton_kernel import fp8_attention_triton

        return fp8_attention_triton(q, k, v, scale, causal)
    return fp8_attention_reference(q, k, v, scale, causal)


def _implementation(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, ...]:
    out, lse, codes = _launch(q, k, v, scale, causal)
    return out, lse, *codes


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, ...]:
    (batch, heads, num_queries, features), (groups, num_keys) = q.shape, k.shape[1:3]
    q_blocks, k_blocks = blocks_of(num_queries), blocks_of(num_keys)
    code = torch.float8_e4m3fn

    def scales(heads: int, blocks: int) -> Tensor:
        return q.new_empty((batch, heads, blocks), dtype=torch.float32)

    return (
        q.new_empty((batch, num_queries, heads, features)).transpose(1, 2),
        q.new_empty((batch, heads, num_queries), dtype=torch.float32),
        q.new_empty((batch, heads, q_blocks * BLOCK, features), dtype=code),
        scales(heads, q_blocks),
        q.new_empty((batch, groups, k_blocks * BLOCK, features), dtype=code),
        scales(groups, k_blocks),
        q.new_empty((batch, groups, features, k_blocks * BLOCK), dtype=code),
        scales(groups, k_blocks),
    )


def _gradient(
    dy: Tensor,
    q: Tensor,
    q_scale: Tensor,
    k: Tensor,
    k_scale: Tensor,
    vt: Tensor,
    v_scale: Tensor,
    out: Tensor,
    lse: Tensor,
    num_keys: int,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    codes = AttentionCodes(q, q_scale, k, k_scale, vt, v_scale)
    if _flash_is_there(dy):
        dq, dk, dv = _by_flash(dy, codes, out, lse, num_keys, scale, causal)
    else:
        dq, dk, dv = attention_gradient_reference(dy, codes, out, lse, num_keys, scale, causal)
    return _token_by_token(dq), _token_by_token(dk), _token_by_token(dv)


def _token_by_token(x: Tensor) -> Tensor:
    """[B, H, M, D] that lies as [B, M, H, D], which compiled code is promised, and flash gives."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _flash_is_there(x: Tensor) -> bool:
    return x.is_cuda and torch.backends.cuda.is_flash_attention_available() and x.dtype in DTYPES


def _by_flash(
    dy: Tensor, codes: AttentionCodes, out: Tensor, lse: Tensor, num_keys: int, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num_queries = dy.shape[2]
    # 1. What the codes stand for.  [B, H, M, D], [B, G, N, D]
    q, k, v = decoded(codes, num_queries, num_keys, dy.dtype)
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    # 2. Flash; it aligns a causal mask at the bottom right. Nothing is dropped, so nobody reads the generator's state.
    state = torch.empty(2, dtype=torch.uint64, device=dy.device)
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, out, lse, None, None, num_queries, num_keys, 0.0, causal, state, state, scale=scale
    )
    dq, dk, dv = gradients
    return dq, dk, dv


def _fake_gradient(dy: Tensor, q: Tensor, q_scale: Tensor, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, num_queries, features), groups, num_keys = dy.shape, k.shape[1], rest[5]
    dq = dy.new_empty((batch, num_queries, heads, features)).transpose(1, 2)
    dk, dv = (dy.new_empty((batch, num_keys, groups, features)).transpose(1, 2) for _ in range(2))
    return dq, dk, dv


_CODES = "Tensor q, Tensor q_scale, Tensor k, Tensor k_scale, Tensor vt, Tensor v_scale"
_operator = register(
    "fp8_attention(Tensor q, Tensor k, Tensor v, float scale, bool causal)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_gradient_operator = register(
    f"fp8_attention_gradient(Tensor dy, {_CODES}, Tensor out, Tensor lse, SymInt num_keys, float scale, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
    _gradient,
    _fake_gradient,
)

__all__ = [
    "BLOCK",
    "AttentionCodes",
    "attention_gradient_reference",
    "cast_tokens_reference",
    "decoded",
    "feature_reasons",
    "fp8_attention",
    "fp8_attention_gradient",
    "fp8_attention_reference",
    "operand_reasons",
    "unsupported_reasons",
]
