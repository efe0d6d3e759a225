"""FP8 products in Triton, an experiment: can one that needs no transposed codes beat cast + transpose + cuBLASLt?

    out [M, N] = a [M, K] @ b [K, N] * scale_a * scale_b, in bf16

`gemm_kernel` takes either operand in either memory order; `descriptor_kernel` reads through TMA descriptors and is
persistent. What Triton 3.6 makes of them for sm_90, by offline compilation:

* both operands K-major: `wgmma.mma_async`, both from shared memory.
* an operand that is not K-major (dgrad's w, both of wgrad): still `wgmma`, which takes only K-major FP8 from shared
  memory, so Triton turns the tile around: shared memory to registers, and back byte by byte (`st.shared.b8`), and
  waits for each product before the next tile.
* max_num_imprecise_acc = 128 promotes; 0 leaves wgmma for `mma.sync` without a word.
* warp_specialize: without effect in programs of 8 warps; with 4 it makes a loading warp and two warp groups that
  multiply, but fails to compile if the result is stored by descriptor.

In `gemm_gluon.py` the transposed operand reaches wgmma through registers, two bytes at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# "Promoted": partial sums of 128 products go to float32; "fast": never.
PROMOTED, FAST = 128, None


class Blocks(NamedTuple):
    """A configuration: of the tile in M, N and K, warps of a program, tiles under way."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def gemm_kernel(
    a, b, out, scale_a, scale_b, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_om, stride_on,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IMPRECISE: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One tile a program, eight rows of tiles at a time; K a multiple of BLOCK_K."""
    tile_m, tile_n = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N)
    rows, columns = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows and columns beyond the matrix are read from within it and not stored.
    a_at = a + (rows % M)[:, None] * stride_am + inner[None, :] * stride_ak
    b_at = b + inner[:, None] * stride_bk + (columns % N)[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        x, y = tl.load(a_at), tl.load(b_at)
        if WIDE:  # the interpreter multiplies no FP8
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
        a_at += BLOCK_K * stride_ak
        b_at += BLOCK_K * stride_bk
    result = (total * (tl.load(scale_a) * tl.load(scale_b))).to(out.dtype.element_ty)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * stride_om + columns[None, :] * stride_on, result, mask=inside)


@triton.jit
def _tile(program, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(row, column) of a tile; eight rows of tiles are walked together, so that what they read stays in L2."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = program // (8 * tiles_n)
    height = min(tiles_m - group * 8, 8)
    within = program % (8 * tiles_n)
    return group * 8 + within % height, within // height


@triton.jit
def descriptor_kernel(
    a, b, out, scale_a, scale_b, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IMPRECISE: tl.constexpr,
    B_BY_ROW: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Persistent; a [M, K] and out [M, N] by descriptor, b as [N, K], or if B_BY_ROW as [K, N]."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    scale = tl.load(scale_a) * tl.load(scale_b)
    for program in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=False, warp_specialize=SPECIALIZE):
        tile_m, tile_n = _tile(program, M, N, BLOCK_M, BLOCK_N)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for inner in range(0, K, BLOCK_K):
            x = a.load([row, inner])
            y = b.load([inner, column]) if B_BY_ROW else b.load([column, inner]).T
            total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
        result = (total * scale).to(tl.bfloat16)
        if SPECIALIZE:  # which fails to compile with a store by descriptor
            rows, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
            inside = (rows < M)[:, None] & (columns < N)[None, :]
            tl.store(out + rows[:, None] * N + columns[None, :], result, mask=inside)
        else:
            out.store([row, column], result)


def gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, blocks: Blocks, imprecise: int | None
) -> Any:
    """Codes a [M, K] and b [K, N], each in either memory order, into out [M, N], bf16 -> the compiled kernel."""
    (m, k), n = a.shape, b.shape[1]
    if k % blocks.k:
        raise ValueError(f"K = {k} is no multiple of the block's {blocks.k}: choose a block whose K divides it")
    grid = (triton.cdiv(m, blocks.m) * triton.cdiv(n, blocks.n),)
    return gemm_kernel[grid](
        a, b, out, scale_a, scale_b, m, n, k, *a.stride(), *b.stride(), *out.stride(), *blocks[:3], imprecise,
        WIDE=False, num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def descriptor_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, blocks: Blocks, imprecise: int | None,
    specialize: bool = False,
) -> Any:  # fmt: skip
    """As `gemm`, persistent and by TMA; a contiguous, b [K, N] contiguous or the transpose of a contiguous one."""
    (m, k), n = a.shape, b.shape[1]
    by_row = b.is_contiguous()
    a_tiles = TensorDescriptor.from_tensor(a, [blocks.m, blocks.k])
    b_tiles = TensorDescriptor.from_tensor(
        b if by_row else b.t(), [blocks.k, blocks.n] if by_row else [blocks.n, blocks.k]
    )
    out_tiles = out if specialize else TensorDescriptor.from_tensor(out, [blocks.m, blocks.n])
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    return descriptor_kernel[(programs,)](
        a_tiles, b_tiles, out_tiles, scale_a, scale_b, m, n, k, *blocks[:3], imprecise, by_row, specialize,
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip


def gemm_reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """The product in plain PyTorch: codes decoded to float64, multiplied and scaled there -> [M, N], float64."""
    return a.double() @ b.double() * (scale_a.double() * scale_b.double())
