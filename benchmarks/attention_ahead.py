"""An experiment: FP8 attention whose products of the next keys run while the softmax of these does.

    o += p_{j-1} v_{j-1}, waited for        s_{j+1} = q k_{j+1}, not waited for        p_j = softmax of s_j

Triton 3.6 leaves a product of Hopper's unawaited across a loop's end if another one is awaited before it is used: so
the values of the keys before come first. The price: one more matrix of scores in registers (of 128 features 40 of them
do not fit), probabilities pass through shared memory, and the last block's products are computed twice.

Same codes, same numbers as `octavo.kernels.fp8_attention.triton_kernel`, and its arguments. `check_fp8_attention.py
--only sweep` times both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.fp8_attention.codes import BLOCK, AttentionCodes
from octavo.kernels.fp8_attention.reference import LOG2_E, PROBABILITY_EXPONENT
from octavo.kernels.fp8_attention.triton_kernel import probabilities
from octavo.kernels.launcher import Launcher

# Queries of a program, warps, stages.
CHOICE = (128, 8, 3)


@triton.jit
def _ahead(
    acc,
    total,
    largest,
    less,
    codes,
    products,
    q_tile,
    row_factor,
    k,
    k_scale,
    vt,
    v_scale,
    block,
    number,
    width,
    keys,
    last,
    MASKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPONENT: tl.constexpr,
    CODE: tl.constexpr,
):
    """All that is carried, with block - 1 of the values and the probabilities of block."""
    feature, place = tl.arange(0, D), tl.arange(0, BLOCK)
    before, key = (block - 1) * BLOCK + place, block * BLOCK + place
    after = tl.minimum(block + 1, number - 1) * BLOCK + place
    # 1. Values of the keys before.  [M, N] @ [N, D] -> [M, D]
    v_tile = tl.load(vt + feature[None, :] * width + before[:, None])
    acc = acc * less[:, None] + tl.dot(codes, v_tile) * tl.load(v_scale + block - 1)
    # 2. Products of the keys after, on their way from here on.  [M, D] @ [D, N] -> [M, N]
    following = tl.dot(q_tile, tl.load(k + after[None, :] * D + feature[:, None]))
    # 3. Probabilities of these.
    factor = row_factor * tl.load(k_scale + block)
    p, less, larger = probabilities(products, factor, largest, key, keys, last, MASKED, EXPONENT)
    return acc, total * less + tl.sum(p, axis=1), larger, less, p.to(CODE), following


@triton.jit(
    do_not_specialize=("queries", "keys", "heads", "shared"),
    do_not_specialize_on_alignment=("q_scale", "k_scale", "v_scale", "lse"),
)
def ahead_kernel(
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
    """As `fp8_attention_kernel`."""
    # 1. Which queries, and whose keys.
    parts = (queries + QUERIES - 1) // QUERIES
    program = tl.program_id(0)
    head, part = (program // parts).to(tl.int64), program % parts
    first = (parts - 1 - part if CAUSAL else part) * QUERIES
    row, feature, place = first + tl.arange(0, QUERIES), tl.arange(0, D), tl.arange(0, BLOCK)
    q_blocks, k_blocks = (queries + BLOCK - 1) // BLOCK, (keys + BLOCK - 1) // BLOCK
    q_tile = tl.load(q + head * (q_blocks * BLOCK * D) + row[:, None] * D + feature[None, :])
    row_factor = tl.load(q_scale + head * q_blocks + first // BLOCK) * SCALE
    group = head // shared
    k, vt = k + group * (k_blocks * BLOCK * D), vt + group * (k_blocks * BLOCK * D)
    k_scale, v_scale = k_scale + group * k_blocks, v_scale + group * k_blocks
    # 2. Blocks that all of these queries see whole, and those that some see: one at the least.
    if CAUSAL:
        last = row + (keys - queries)
        whole = tl.maximum(tl.minimum(first + (keys - queries) + 1, keys), 0) // BLOCK
        end = tl.minimum(first + QUERIES + (keys - queries), keys)
    else:
        last = tl.full([QUERIES], 0, tl.int32) + keys
        whole = keys // BLOCK
        end = keys
    number = tl.maximum((end + BLOCK - 1) // BLOCK, 1)
    # 3. Probabilities of the first, products of the second.
    products = tl.dot(q_tile, tl.load(k + place[None, :] * D + feature[:, None]))
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    factor = row_factor * tl.load(k_scale)
    p, less, largest = probabilities(products, factor, largest, place, keys, last, True, EXPONENT)
    total, codes, acc = tl.sum(p, axis=1), p.to(CODE), tl.zeros([QUERIES, D], tl.float32)
    second = tl.minimum(1, number - 1) * BLOCK + place
    products = tl.dot(q_tile, tl.load(k + second[None, :] * D + feature[:, None]))
    # 4. Values of each block, with the products of the next but one.
    for block in tl.range(1, whole, num_stages=STAGES):
        acc, total, largest, less, codes, products = _ahead(
            acc, total, largest, less, codes, products, q_tile, row_factor, k, k_scale, vt, v_scale, block, number,
            k_blocks * BLOCK, keys, last, False, D, BLOCK, EXPONENT, CODE,
        )  # fmt: skip
    for block in tl.range(tl.maximum(whole, 1), number, num_stages=STAGES):
        acc, total, largest, less, codes, products = _ahead(
            acc, total, largest, less, codes, products, q_tile, row_factor, k, k_scale, vt, v_scale, block, number,
            k_blocks * BLOCK, keys, last, True, D, BLOCK, EXPONENT, CODE,
        )  # fmt: skip
    v_tile = tl.load(vt + feature[None, :] * (k_blocks * BLOCK) + ((number - 1) * BLOCK + place)[:, None])
    acc = acc * less[:, None] + tl.dot(codes, v_tile) * tl.load(v_scale + number - 1)
    # 5. The result.
    nothing = total == 0.0
    acc = acc / tl.where(nothing, 1.0, total)[:, None]
    shift = tl.where(largest == -float("inf"), 0.0, largest)
    found = tl.where(nothing, float("inf"), (shift - EXPONENT + tl.log2(total)) * 0.6931471805599453)
    inside = row < queries
    batch, mine = head // heads, head % heads
    target = out + ((batch * queries + row)[:, None] * heads + mine) * D + feature[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + head * queries + row, found, mask=inside)


_launch_ahead = Launcher(ahead_kernel)


def attend_ahead(
    codes: AttentionCodes, extents: tuple[int, int], scale: float, causal: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.fp8_attention.triton_kernel.attend_triton`."""
    num_queries, num_keys = extents
    batch, heads, _, features = codes.q.shape
    queries, warps, stages = CHOICE
    out = torch.empty((batch, num_queries, heads, features), dtype=dtype, device=codes.q.device)
    lse = torch.empty((batch, heads, num_queries), dtype=torch.float32, device=codes.q.device)
    numbers = (num_queries, num_keys, heads, heads // codes.k.shape[1])
    constants = (
        causal, scale * LOG2_E, features, queries, BLOCK, PROBABILITY_EXPONENT, stages, CODE_DTYPES[E4M3.name],
    )  # fmt: skip
    key = (dtype, tuple(number >> 31 for number in numbers), constants)
    programs = batch * heads * -(-num_queries // queries)
    _launch_ahead(programs, key, (*codes, out, lse), numbers, constants, warps)
    return out.transpose(1, 2), lse
