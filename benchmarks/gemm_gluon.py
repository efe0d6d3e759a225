"""FP8 products in Gluon whose transposed operand needs no transposed copy; see `gemm_kernels.py`.

    out [M, N] = a [M, K] @ b [N, K]^T * scale_a * scale_b, in bf16

b is K-major. a is K-major too, or stands as a_t [K, M], row-major ("transposed"). Hopper's wgmma takes FP8 from shared
memory only K-major, but its first operand may come from registers. There a thread holds four neighbours along K of one
row, so a_t is read as words of two codes, [K, M / 2], by `ldmatrix.trans`: two registers hold four neighbours along K
of the rows 2 c and 2 c + 1, and two byte permutations part them. Each parity of rows is a product of its own:

    word [k, c] = (a_t[k, 2 c], a_t[k, 2 c + 1])     even [c, k], odd [c, k] -> accumulators of rows 2 c and 2 c + 1

So dgrad is dx^T [K, M] = w^T dy^T with a_t = w [N, K] and b = dy [M, N], both as the casts wrote them, and out stored
transposed; wgrad is dw [N, K] = dy^T x with a_t = dy and b = x^T, of which only x needs its transposed codes.

Persistent; one warp loads by TMA, two warp groups multiply, each 64 rows (of words, if transposed) of a tile; they meet
only at the barriers of the tiles in shared memory, so that one takes operands apart while the other multiplies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo.kernels.scaled_mm.block_product import tile_at

# $2 and $3 hold words k, k + 1 and k + 2, k + 3: their lower bytes are four codes of the even row, the others of the
# odd one.
PART = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


# Rows of a tile: two warp groups of 64, twice as many where each row of words is two. Products between promotions: 128.
BLOCK_M, BLOCK_M_TRANSPOSED, BLOCK_K = 128, 256, 128


@gluon.constexpr_function
def _type(is_e5m2):
    return gl.float8e5 if is_e5m2 else gl.float8e4nv


@gluon.jit
def _load(
    operands, places, tiles,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """The loading warp: every step of every tile into the next place that both warp groups have left."""
    a, b = operands
    a_tiles, b_tiles, full, empty = places
    tiles_m, tiles_n, steps = tiles
    place = 0
    phase = 1  # of `empty`: the first wait in each place passes, nobody has filled it
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(program, tiles_m, tiles_n, 8)
        for step in range(steps):
            mbarrier.wait(empty.index(place), phase)
            ready = full.index(place)
            mbarrier.expect(ready, a.block_type.nbytes + b.block_type.nbytes)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(
                    a, [step * BLOCK_K, tile_m * (BLOCK_M // 2)], ready, a_tiles.index(place)
                )
            else:
                tma.async_copy_global_to_shared(a, [tile_m * BLOCK_M, step * BLOCK_K], ready, a_tiles.index(place))
            tma.async_copy_global_to_shared(b, [tile_n * BLOCK_N, step * BLOCK_K], ready, b_tiles.index(place))
            place += 1
            if place == STAGES:
                place = 0
                phase ^= 1


@gluon.jit
def _multiply(
    operands, places, tiles, extent,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr,
    PROMOTE: gl.constexpr, A_IS_E5M2: gl.constexpr, PAIRS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: its half of the rows of every tile."""
    out, scale_a, scale_b = operands
    a_tiles, b_tiles, full, empty = places
    tiles_m, tiles_n, steps = tiles
    M, N, stride_m, stride_n = extent
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    HALF: gl.constexpr = BLOCK_M // 4 if TRANSPOSED else BLOCK_M // 2
    CODES: gl.constexpr = _type(A_IS_E5M2)
    part = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
    scale = gl.load(scale_a) * gl.load(scale_b)
    place = 0
    phase = 0
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(program, tiles_m, tiles_n, 8)
        first = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
        second = gl.zeros([HALF, BLOCK_N], gl.float32, layout)
        last = 0
        for step in range(steps):
            mbarrier.wait(full.index(place), phase)
            b = b_tiles.index(place).permute((1, 0))
            if TRANSPOSED:
                words = a_tiles.index(place).slice(GROUP * HALF, HALF, dim=1).permute((1, 0)).load(operand)
                even, odd = gl.inline_asm_elementwise(
                    PART, "=r,=r,r,r", [words], (gl.int8, gl.int8), is_pure=True, pack=4
                )
                even, odd = even.to(CODES, bitcast=True), odd.to(CODES, bitcast=True)
                if PROMOTE:
                    # One part at a time: there are no registers for a second one.
                    sums = warpgroup_mma(even, b, part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, (sums,))
                    first += part
                    sums = warpgroup_mma(odd, b, part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, (sums,))
                    mbarrier.arrive(empty.index(place))
                    second += part
                else:
                    first_sum = warpgroup_mma(even, b, first, is_async=True)
                    second_sum = warpgroup_mma(odd, b, second, is_async=True)
                    # The registers of the operands are read until the product is done.
                    first, second = warpgroup_mma_wait(0, (first_sum, second_sum))
                    mbarrier.arrive(empty.index(place))
            else:
                a = a_tiles.index(place).slice(GROUP * HALF, HALF, dim=0)
                if PROMOTE:
                    sums = warpgroup_mma(a, b, part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, (sums,))
                    mbarrier.arrive(empty.index(place))
                    first += part
                else:
                    # One product stays under way; the place of the one before it is free.
                    pending = warpgroup_mma(a, b, first, is_async=True)
                    first = warpgroup_mma_wait(1, (pending,))
                    mbarrier.arrive(empty.index(last), pred=step > 0)
                    last = place
            place += 1
            if place == STAGES:
                place = 0
                phase ^= 1
        if not TRANSPOSED and not PROMOTE:
            first = warpgroup_mma_wait(0, (first,))
            mbarrier.arrive(empty.index(last))
        columns = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        rows = gl.arange(0, HALF, gl.SliceLayout(1, layout)) + GROUP * HALF
        rows = tile_m * BLOCK_M + (rows * 2 if TRANSPOSED else rows)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        if PAIRS:
            # Rows 2 c and 2 c + 1 are neighbours in memory: a word of both.
            words = gl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;",
                "=r,r,r",
                [first * scale, second * scale],
                gl.int32,
                is_pure=True,
                pack=1,
            )
            at = out.to(gl.pointer_type(gl.int32), bitcast=True)
            gl.store(at + (rows[:, None] // 2 + columns[None, :] * (stride_n // 2)), words, mask=inside)
        else:
            at = out + rows[:, None] * stride_m + columns[None, :] * stride_n
            gl.store(at, (first * scale).to(gl.bfloat16), mask=inside)
            if TRANSPOSED:
                gl.store(at + stride_m, (second * scale).to(gl.bfloat16), mask=inside)


@gluon.jit
def gluon_kernel(
    a, b, out, scale_a, scale_b, M, N, K, stride_m, stride_n,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr, PROMOTE: gl.constexpr, A_IS_E5M2: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """Barriers and places, then each warp to its part."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_tiles = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=2)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    operands = (out, scale_a, scale_b)
    places = (a_tiles, b_tiles, full, empty)
    tiles = (tiles_m, tiles_n, steps)
    extent = (gl.to_tensor(M), gl.to_tensor(N), gl.to_tensor(stride_m), gl.to_tensor(stride_n))
    UPPER: gl.constexpr = 0
    LOWER: gl.constexpr = 1
    # Constants stand in the call itself: in a tuple with a name they would become values of the device.
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    operands,
                    places,
                    tiles,
                    extent,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    TRANSPOSED,
                    PROMOTE,
                    A_IS_E5M2,
                    PAIRS,
                    UPPER,
                ),
            ),
            (
                _multiply,
                (
                    operands,
                    places,
                    tiles,
                    extent,
                    BLOCK_M,
                    BLOCK_N,
                    STAGES,
                    TRANSPOSED,
                    PROMOTE,
                    A_IS_E5M2,
                    PAIRS,
                    LOWER,
                ),
            ),
            (_load, ((a, b), places, tiles, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, TRANSPOSED)),
        ],
        # Of the workers: warps, and registers a thread. The first multiplies in the program's own four warps.
        [4, 1],
        [240, 24],
    )


def gluon_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, block_n: int, stages: int, promote: bool
) -> Any:
    """Into out [M, N], bf16, in either memory order -> the compiled kernel.

    Args:
        a: codes [M, K], contiguous, or the transpose of contiguous ones [K, M] with M a multiple of 16.
        b: codes [N, K], contiguous.
        scale_a, scale_b: float32, [].
        block_n: columns of a tile; its rows are 256 if a is transposed, else 128.
        stages: tiles under way.
        promote: partial sums of 128 products go to float32.
    """
    tiles, arguments, constants = prepare(a, b, scale_a, scale_b, out, block_n, stages, promote)
    programs = min(tiles, torch.cuda.get_device_properties(a.device).multi_processor_count)
    return gluon_kernel[(programs,)](*arguments, *constants, num_warps=4)


def prepare(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, block_n: int, stages: int, promote: bool
) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """What `gluon_gemm` launches: (tiles, arguments of the kernel, and its constants)."""
    (m, k), n = a.shape, b.shape[0]
    if out.numel() >= 2**31:
        raise ValueError(f"out has {out.numel()} elements: this experiment counts them in 32 bits, so take fewer rows")
    transposed = not a.is_contiguous()
    block_m = BLOCK_M_TRANSPOSED if transposed else BLOCK_M
    a_matrix, a_tile = (a.t().view(torch.int16), [BLOCK_K, block_m // 2]) if transposed else (a, [block_m, BLOCK_K])
    descriptors = (_descriptor(a_matrix, a_tile), _descriptor(b, [block_n, BLOCK_K]))
    pairs = transposed and out.stride(0) == 1
    constants = (block_m, block_n, BLOCK_K, stages, transposed, promote, a.dtype == torch.float8_e5m2, pairs)
    tiles = -(-m // block_m) * -(-n // block_n)
    return tiles, (*descriptors, out, scale_a, scale_b, m, n, k, *out.stride()), constants


def _descriptor(matrix: Tensor, tile: list[int]) -> TensorDescriptor:
    """A matrix as TMA reads it, a tile at a time, into the order in which wgmma reads shared memory."""
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.int16 if matrix.itemsize == 2 else gl.int8)
    return TensorDescriptor.from_tensor(matrix, tile, layout)
