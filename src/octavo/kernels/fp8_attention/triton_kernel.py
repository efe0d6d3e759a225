"""fp8_attention on a GPU: each program holds 128 queries of a head and goes through its keys and values 128 at a time.

    s [M, N] = q k^T            FP8 tensor core, summed over D
    p        = 2^(s c - m + 8)  c = scales of both blocks, softmax scale and log2 e; m the largest so far; float32
    o [M, D] = o 2^(m_old - m) + E4M3(p) v, times the scale of v's block        FP8 tensor core, summed over 128 keys

Each product of 128 keys is added in float32: Hopper's own sum keeps 13 fraction bits and would lose percents of a long
row of probabilities, all of one sign. Blocks that every query sees whole take no mask. Programs with the most keys of a
causal head start first.

Exponentials and logarithms are the hardware's, within 2^-21 relative, or absolute of a logarithm near 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.fp8_attention.cast_kernel import cast_tokens_triton
from octavo.kernels.fp8_attention.codes import BLOCK, AttentionCodes
from octavo.kernels.fp8_attention.reference import LOG2_E, PROBABILITY_EXPONENT
from octavo.kernels.launcher import Launcher

# Queries of a program (a divisor of BLOCK), its warps, and blocks of keys that are on their way at once.
_QUERIES, _WARPS, _STAGES = 128, 8, 3


@triton.jit
def probabilities(products, factor, largest, key, keys, last, MASKED: tl.constexpr, EXPONENT: tl.constexpr):
    """(p, less, larger) of products of codes, which `factor` makes scores in units of log 2.

    p are relative to the largest so far, times 2^EXPONENT; `less` is by what that scales down what there was.
    """
    if MASKED:
        looks = (key < keys)[None, :] & (key[None, :] <= last[:, None])
        scores = tl.where(looks, products * factor, -float("inf"))
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        p = tl.exp2(scores - (shift - EXPONENT)[:, None])
    else:
        larger = tl.maximum(largest, tl.max(products, axis=1) * factor)
        shift = larger
        p = tl.exp2(products * factor - (shift - EXPONENT)[:, None])
    return p, tl.exp2(largest - shift), larger


@triton.jit
def _with_keys(
    acc,
    total,
    largest,
    q_tile,
    row_factor,
    k,
    k_scale,
    vt,
    v_scale,
    block,
    width,
    keys,
    last,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPONENT: tl.constexpr,
    CODE: tl.constexpr,
):
    """(acc, total, largest) with a block of keys more; `last` is the last key that each query sees."""
    feature, key = tl.arange(0, D), block * BLOCK + tl.arange(0, BLOCK)
    # 1. Products of codes.  [M, D] @ [D, N] -> [M, N]
    k_tile = tl.load(k + key[None, :] * D + feature[:, None])
    products = tl.dot(q_tile, k_tile)
    # 2. The largest so far, and probabilities relative to it.
    factor = row_factor * tl.load(k_scale + block)
    p, less, larger = probabilities(products, factor, largest, key, keys, last, MASKED, EXPONENT)
    # 3. Their sum as it is; their codes times values.  [M, N] @ [N, D] -> [M, D]
    total = total * less + tl.sum(p, axis=1)
    v_tile = tl.load(vt + feature[None, :] * width + key[:, None])
    acc = acc * less[:, None] + tl.dot(p.to(CODE), v_tile) * tl.load(v_scale + block)
    return acc, total, larger


# What is not in the launcher's key must not make a variant.
@triton.jit(
    do_not_specialize=("queries", "keys", "heads", "shared"),
    do_not_specialize_on_alignment=("q_scale", "k_scale", "v_scale", "lse"),
)
def fp8_attention_kernel(
    q,
    q_scale,
    k,
    k_scale,
    vt,
    v_scale,
    out,
    lse,
    queries,
    keys,
    heads,
    shared,
    CAUSAL: tl.constexpr,
    SCALE: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPONENT: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
):
    """QUERIES queries of one of [batch, heads], of which `shared` read one head of keys; SCALE: softmax's times log2 e.

    Codes and scales as in `AttentionCodes` -> out [batch, queries, heads, D], lse [batch, heads, queries].
    """
    # 1. Which queries; 64 bits, since an offset can exceed 2^31.
    parts = (queries + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    head, part = (program // parts).to(tl.int64), program % parts
    first = (parts - 1 - part if CAUSAL else part) * QUERIES
    row, feature = first + tl.arange(0, QUERIES), tl.arange(0, D)
    q_blocks, k_blocks = (queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK
    q_tile = tl.load(q + head * (q_blocks * BLOCK * D) + row[:, None] * D + feature[None, :])
    row_factor = tl.load(q_scale + head * q_blocks + first // BLOCK) * SCALE
    # 2. Whose keys: query heads of a batch are `shared` times as many.
    group = head // shared
    k, vt = k + group * (k_blocks * BLOCK * D), vt + group * (k_blocks * BLOCK * D)
    k_scale, v_scale = k_scale + group * k_blocks, v_scale + group * k_blocks
    # 3. Blocks that all of these queries see whole, and those that some see.
    if CAUSAL:
        last = row + (keys - queries)
        whole = tl.maximum(tl.minimum(first + (keys - queries) + 1, keys), 0) // BLOCK
        end = tl.maximum(tl.minimum(first + QUERIES + (keys - queries), keys), 0)
    else:
        last = tl.full([QUERIES], 0, tl.int32) + keys
        whole = keys // BLOCK
        end = keys
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, D], tl.float32)
    for block in tl.range(0, whole, num_stages=STAGES):
        acc, total, largest = _with_keys(
            acc, total, largest, q_tile, row_factor, k, k_scale, vt, v_scale, block, k_blocks * BLOCK, keys, last,
            False, D, BLOCK, EXPONENT, CODE,
        )  # fmt: skip
    for block in tl.range(whole, (end + BLOCK - 1) // BLOCK, num_stages=STAGES):
        acc, total, largest = _with_keys(
            acc, total, largest, q_tile, row_factor, k, k_scale, vt, v_scale, block, k_blocks * BLOCK, keys, last,
            True, D, BLOCK, EXPONENT, CODE,
        )  # fmt: skip
    # 4. The result; zeros and an lse of inf where a query looks at nothing.
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    found = tl.where(nothing, float("inf"), (shift - EXPONENT + tl.log2(total)) * 0.6931471805599453)
    inside = row < queries
    batch, mine = head // heads, head % heads
    target = out + ((batch * queries + row)[:, None] * heads + mine) * D + feature[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head * queries + row, found, mask=inside)


_launch_attention = Launcher(fp8_attention_kernel)


def fp8_attention_triton(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, AttentionCodes]:
    """As `octavo.kernels.fp8_attention.fp8_attention`; some queries and keys, a device of Triton's."""
    codes = AttentionCodes(*cast_tokens_triton(q, False), *cast_tokens_triton(k, False), *cast_tokens_triton(v, True))
    out, lse = attend_triton(codes, (q.shape[2], k.shape[2]), scale, causal, q.dtype)
    return out, lse, codes


def attend_triton(
    codes: AttentionCodes, extents: tuple[int, int], scale: float, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(out [B, H, M, D] of the dtype, lse [B, H, M] float32) of what is cast already; `extents` are M and N."""
    num_queries, num_keys = extents
    batch, heads, _, features = codes.q.shape
    out = torch.empty((batch, num_queries, heads, features), dtype=dtype, device=codes.q.device)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=codes.q.device)
    numbers = (num_queries, num_keys, heads, heads // codes.k.shape[1])
    constants = (
        causal, scale * LOG2_E, features, _QUERIES, BLOCK, PROBABILITY_EXPONENT, _STAGES, CODE_DTYPES[E4M3.name],
    )  # fmt: skip
    # Codes, and what is written to, are whole tensors, which begin at multiples of 16 bytes.
    key = (dtype, tuple(number >> 31 for number in numbers), constants)
    programs = batch * heads * -(-num_queries // _QUERIES)
    _launch_attention(programs, key, (*codes, out, lse), numbers, constants, _WARPS)
    return out.transpose(1, 2), lse
