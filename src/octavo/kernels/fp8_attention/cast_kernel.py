"""Casts of queries, keys and values on a GPU, and back: each program reads 128 tokens of a head.

    m = 2^floor(log2(448 / amax)), 1 if amax is 0          code = E4M3(fp32(x) m)          scale = 1 / m

Bytes moved an element of bf16: 2 read and 1 written, by token or by feature; back 1 and 2. Tokens are taken in pairs,
even ones and odd ones, so that what passes through shared memory to the other layout are words of two codes.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3
from octavo.kernels.codes import CODE_DTYPES, INTERPRETED, pairs_of_codes, scaled
from octavo.kernels.fp8_attention.codes import BLOCK, blocks_of
from octavo.kernels.launcher import Launcher
from octavo.kernels.tile import key_of, key_of_numbers, largest_of, load_rows
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

WARPS = 4


@triton.jit(do_not_specialize=("tokens", "heads"), do_not_specialize_on_alignment=("scale",))
def cast_tokens_kernel(
    x,
    codes,
    scale,
    tokens,
    heads,
    stride_batch,
    stride_head,
    stride_token,
    BY_FEATURE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """x [batch, heads, tokens, D] of any strides, features side by side.

    -> codes [batch, heads, tokens to BLOCK, D], BY_FEATURE [batch, heads, D, tokens to BLOCK]; scale [.., blocks].
    """
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    blocks = (tokens + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block, head = program % blocks, (program // blocks).to(tl.int64)
    source = x + (head // heads) * stride_batch + (head % heads) * stride_head
    # 2. Its values, even tokens and odd ones, each [64, D].
    pair, feature = tl.arange(0, BLOCK // 2), tl.arange(0, D)
    token = block * BLOCK + 2 * pair.to(tl.int64)
    inside_0, inside_1 = (token < tokens)[:, None], (token + 1 < tokens)[:, None]
    place = source + token[:, None] * stride_token + feature[None, :]
    values_0, values_1 = load_rows(place, inside_0), load_rows(place + stride_token, inside_1)
    # 3. Multiplier and scale.
    largest = largest_of(values_0, values_1)
    m = tl.div_rn(tl.full(largest.shape, FORMAT_MAX, tl.float32), largest)
    m = tl.where(largest == 0.0, 1.0, m)
    m = tl.where(m < SMALLEST, SMALLEST, m)
    m = tl.where(m > LARGEST, LARGEST, m)
    # Without its fraction, a normal float32 is the power of two below.
    m = (m.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    tl.store(scale + program, tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m))
    # 4. Codes; zeros behind the last token.
    scaled_0, scaled_1 = scaled(values_0, m, inside_0, False), scaled(values_1, m, inside_1, False)
    base = codes + head * (blocks * BLOCK * D)
    if BY_FEATURE:
        words = pairs_of_codes(scaled_1, scaled_0, CODE, INTERPRETED)
        width = blocks * (BLOCK // 2)
        target = base.to(tl.pointer_type(tl.uint16)) + block * (BLOCK // 2)
        tl.store(target + feature[:, None] * width + pair[None, :], tl.trans(words))
    else:
        target = base + (block * BLOCK + 2 * pair[:, None]) * D + feature[None, :]
        tl.store(target, scaled_0.to(CODE))
        tl.store(target + D, scaled_1.to(CODE))


_launch_cast = Launcher(cast_tokens_kernel)
_LIMITS = (E4M3.max, SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER)


def cast_tokens_triton(x: Tensor, by_feature: bool) -> tuple[Tensor, Tensor]:
    """(codes [B, H, T to 128, D], or [B, H, D, T to 128] by feature; scale [B, H, T / 128]) of x [B, H, T, D]."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, tokens, features = x.shape
    blocks = blocks_of(tokens)
    shape = (features, blocks * BLOCK) if by_feature else (blocks * BLOCK, features)
    codes = torch.empty((batch, heads, *shape), dtype=E4M3.dtype, device=x.device)
    scale = torch.empty((batch, heads, blocks), dtype=torch.float32, device=x.device)
    numbers = (tokens, heads, x.stride(0), x.stride(1), x.stride(2))
    constants = (by_feature, features, BLOCK, CODE_DTYPES[E4M3.name], INTERPRETED, *_LIMITS)
    key = (key_of(x), tokens >> 31, key_of_numbers(*numbers[1:]), by_feature, features)
    _launch_cast(batch * heads * blocks, key, (x, codes, scale), numbers, constants, WARPS)
    return codes, scale


@triton.jit(do_not_specialize=("tokens", "heads"), do_not_specialize_on_alignment=("scale",))
def decode_tokens_kernel(
    codes,
    scale,
    values,
    tokens,
    heads,
    BY_FEATURE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes and scale as `cast_tokens_kernel` writes them -> values [batch, tokens, heads, D]."""
    blocks = (tokens + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block, head = program % blocks, (program // blocks).to(tl.int64)
    place, feature = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    source, factor = codes + head * (blocks * BLOCK * D), tl.load(scale + program)
    if BY_FEATURE:
        tile = tl.load(source + feature[:, None] * (blocks * BLOCK) + place[None, :]).to(tl.float32) * factor
        tile = tl.trans(tile.to(values.dtype.element_ty))
    else:
        tile = tl.load(source + place[:, None] * D + feature[None, :]).to(tl.float32) * factor
        tile = tile.to(values.dtype.element_ty)
    row = ((head // heads) * tokens + place) * heads + head % heads
    tl.store(values + row[:, None] * D + feature[None, :], tile, mask=(place < tokens)[:, None])


_launch_decode = Launcher(decode_tokens_kernel)


def decode_tokens_triton(
    codes: Tensor, scale: Tensor, tokens: int, dtype: torch.dtype, by_feature: bool = False
) -> Tensor:
    """[B, H, T, D] that lies as [B, T, H, D]: what the codes of `cast_tokens_triton` stand for."""
    batch, heads = codes.shape[:2]
    features = codes.shape[2 if by_feature else 3]
    values = torch.empty((batch, tokens, heads, features), dtype=dtype, device=codes.device)
    key = (dtype, tokens >> 31, heads >> 31, by_feature, features)
    programs = batch * heads * blocks_of(tokens)
    _launch_decode(programs, key, (codes, scale, values), (tokens, heads), (by_feature, features, BLOCK), WARPS)
    return values.transpose(1, 2)
