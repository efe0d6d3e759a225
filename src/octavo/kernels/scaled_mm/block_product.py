"""Products of two operands in blocks of 1x128 on Hopper, in Gluon, with the bits of cuBLASLt's.

    out [M, N] = sum over the blocks c of K of (a [M, c] @ b [N, c]^T) * scale_a[c, M] * scale_b[c, N]

cuBLASLt gives each multiprocessor tiles of 128 x 128, so that 144 of them (the weight's gradient of 768 x 3072) take
132 multiprocessors as long as 264 would. Here a tile is 192 x 128: `is_faster` says when that leaves less idle.

Persistent: one warp loads by TMA, three warp groups multiply 64 rows of a tile each. While one scales the sum of a
block and adds it to its total, in float32, the tensor core works for the others. They meet only at the barriers of the
places in shared memory.

The order of rounding is cuBLASLt's: a sum times scale_a, then a fused multiply-add by scale_b.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
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

from octavo.kernels.block_cast.layout import BLOCK
from octavo.kernels.triton_support import multiprocessors

GROUPS = 3  # warp groups
ROWS = 64  # of each
COLUMNS = 128
PLACES = 5  # blocks of a tile under way in shared memory
_TALL = 8  # rows of tiles that are walked together
# Rows and columns of cuBLASLt's tile, and the time of ours in units of its time. (Measured on an H200, on six shapes:
# 1.26 to 1.57, 1.47 at 16384 x 8192 x 8192; `benchmarks/LOG.md`.)
_THEIR_TILE = 128
_TIME = 1.47
# What must be gained, by the count of tiles, before it is believed.
_MARGIN = 0.97
# Beside other work, which takes what is idle behind our last tiles and not what is idle behind theirs: how much of
# their last wave may be filled.
_FILLED = 0.5
# And how much more time all our tiles may take than all of theirs: 1.03 at 8192 x 1280 x 5120, where it gains.
_WORK = 1.05


def is_faster(rows: int, columns: int, multiprocessors: int, beside: bool = False) -> bool:
    """Whether a product [rows, columns] over a long K takes less time than cuBLASLt's, by how tiles fill the card.

    beside: the card does other work at the same time.
    """
    ours = _tiles(rows, columns)
    theirs = -(-rows // _THEIR_TILE) * -(-columns // _THEIR_TILE)
    if beside and theirs > multiprocessors:
        fills = 0 < theirs % multiprocessors < _FILLED * multiprocessors
        return fills and _TIME * ours < _WORK * theirs
    return _TIME * -(-ours // multiprocessors) < _MARGIN * -(-theirs // multiprocessors)


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // (GROUPS * ROWS)) * -(-columns // COLUMNS)


# Device and dtype of the output of what has been launched.
_loaded: set[tuple[int, torch.dtype]] = set()


def is_loaded(index: int, out_dtype: torch.dtype) -> bool:
    """Whether the kernel has been launched for such outputs on CUDA device `index`: there is one variant of each."""
    return (index, out_dtype) in _loaded


def takes(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Whether TMA reads these codes and scales: contiguous, from a multiple of 16 bytes on, counted in 32 bits."""
    read = (a, b, scale_a, scale_b)
    # A scale is read as one row of numbers.
    counted = max(scale_a.numel(), scale_b.numel()) < 2**31
    return counted and all(one.is_contiguous() and one.data_ptr() % 16 == 0 for one in read)


@gluon.jit
def tile_at(program, tiles_m, tiles_n, TALL: gl.constexpr):
    """(row, column) of a tile; TALL rows of tiles are walked together, so that what they read stays in the L2 cache."""
    group = program // (TALL * tiles_n)
    height = gl.minimum(tiles_m - group * TALL, TALL)
    within = program % (TALL * tiles_n)
    return group * TALL + within % height, within // height


@gluon.jit
def _load(
    operands, places, tiles, strides, GROUPS: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, TALL: gl.constexpr
):  # fmt: skip
    """The loading warp: every block of every tile into the next place that all groups have left."""
    a, b, scale_a, scale_b = operands
    a_tiles, b_tiles, a_scales, b_scales, full, empty = places
    tiles_m, tiles_n, blocks = tiles
    stride_a, stride_b = strides
    COLUMNS: gl.constexpr = b.block_type.shape[0]
    SCALES: gl.constexpr = scale_a.block_type.nbytes + scale_b.block_type.nbytes
    place = 0
    phase = 1  # of `empty`: the first wait in each place passes, nobody has filled it
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(program, tiles_m, tiles_n, TALL)
        row, column = tile_m * (GROUPS * ROWS), tile_n * COLUMNS
        for block in range(blocks):
            mbarrier.wait(empty.index(place), phase)
            ready = full.index(place)
            mbarrier.expect(ready, GROUPS * a.block_type.nbytes + b.block_type.nbytes + SCALES)
            for group in gl.static_range(GROUPS):
                target = a_tiles.index(place * GROUPS + group)
                tma.async_copy_global_to_shared(a, [row + group * ROWS, block * 128], ready, target)
            tma.async_copy_global_to_shared(b, [column, block * 128], ready, b_tiles.index(place))
            tma.async_copy_global_to_shared(scale_a, [block * stride_a + row], ready, a_scales.index(place))
            tma.async_copy_global_to_shared(scale_b, [block * stride_b + column], ready, b_scales.index(place))
            place += 1
            if place == PLACES:
                place = 0
                phase ^= 1


@gluon.jit
def _multiply(
    out, places, tiles, extent,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, TALL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: its rows of every tile."""
    a_tiles, b_tiles, a_scales, b_scales, full, empty = places
    tiles_m, tiles_n, blocks = tiles
    M, N, stride = extent
    COLUMNS: gl.constexpr = b_tiles.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    by_column: gl.constexpr = gl.SliceLayout(0, layout)
    stored: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, COLUMNS],
    )
    part = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    place = 0
    phase = 0
    left = 0  # the place before
    filled = 0  # whether there was one
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(program, tiles_m, tiles_n, TALL)
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for _ in range(blocks):
            mbarrier.wait(full.index(place), phase)
            rows = a_tiles.index(place * GROUPS + GROUP)
            sums = warpgroup_mma(rows, b_tiles.index(place).permute((1, 0)), part, use_acc=False, is_async=True)
            # Only now: what was read of that place, its scales too, has been used when the next product begins.
            mbarrier.arrive(empty.index(left), pred=filled > 0)
            row = a_scales.index(place).slice(GROUP * ROWS, ROWS).load(by_row)
            part = warpgroup_mma_wait(0, (sums,))
            # Not earlier: there are no registers for them.
            column = b_scales.index(place).load(by_column)
            total += part * row[:, None] * column[None, :]
            # The wait, for no product, is what additions are not moved across: beyond the beginning of the next product
            # they would need registers for a second part.
            total = warpgroup_mma_wait(0, (total,))
            left = place
            filled = 1
            place += 1
            if place == PLACES:
                place = 0
                phase ^= 1
        # Eight neighbours of a row a thread: with two of them, as sums lie, storing a tile takes four times as many
        # instructions.
        rows = (tile_m * GROUPS + GROUP) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
        columns = tile_n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, stored))
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        # 64 bits, since an offset can exceed 2^31.
        at = out + rows[:, None].to(gl.int64) * stride + columns[None, :]
        gl.store(at, gl.convert_layout(total.to(out.dtype.element_ty), stored), mask=inside)


@gluon.jit
def block_product_kernel(
    a, b, scale_a, scale_b, out, M, N, K, stride_out, stride_a, stride_b,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, TALL: gl.constexpr,
):  # fmt: skip
    """Barriers and places, then each warp to its part. a, b, scale_a and scale_b are descriptors."""
    a_tiles = gl.allocate_shared_memory(a.dtype, [PLACES * GROUPS] + a.block_type.shape, a.layout)  # noqa: RUF005
    b_tiles = gl.allocate_shared_memory(b.dtype, [PLACES] + b.block_type.shape, b.layout)  # noqa: RUF005
    a_scales = gl.allocate_shared_memory(gl.float32, [PLACES] + scale_a.block_type.shape, scale_a.layout)  # noqa: RUF005
    b_scales = gl.allocate_shared_memory(gl.float32, [PLACES] + scale_b.block_type.shape, scale_b.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=GROUPS)
    fence_async_shared()
    places = (a_tiles, b_tiles, a_scales, b_scales, full, empty)
    tiles = (gl.cdiv(M, GROUPS * ROWS), gl.cdiv(N, b.block_type.shape[0]), gl.cdiv(K, 128))
    extent = (gl.to_tensor(M), gl.to_tensor(N), gl.to_tensor(stride_out))
    strides = (gl.to_tensor(stride_a), gl.to_tensor(stride_b))
    # Constants stand in the call itself: in a tuple with a name they would become values of the device.
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    gl.warp_specialize(
        [
            (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, FIRST)),
            (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, SECOND)),
            (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, THIRD)),
            (_load, ((a, b, scale_a, scale_b), places, tiles, strides, GROUPS, ROWS, PLACES, TALL)),
        ],
        # Of the workers: warps, and registers a thread. The first group multiplies in the program's own four warps.
        [4, 4, 1],
        [160, 160, 24],
    )


def block_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The product -> [M, N] of float32, bfloat16 or float16.

    Args:
        a, b: E4M3 codes [M, K] and [N, K] on Hopper, contiguous; M and N multiples of 16, K of 128.
        scale_a, scale_b: their scales by 1x128, float32 [K / 128, M] and [K / 128, N], contiguous.
        out_dtype: of the result; each sum is rounded once.
    """
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    tiles, arguments, constants = prepare(a, b, scale_a, scale_b, out)
    with torch.cuda.device(a.device):
        programs = min(tiles, multiprocessors(a))
        block_product_kernel[(programs,)](*arguments, *constants, num_warps=4)
    _loaded.add((a.get_device(), out_dtype))
    return out


def prepare(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor
) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """What is launched: (tiles, arguments of the kernel, and its constants)."""
    (m, k), n = a.shape, b.shape[0]
    # A tile has 192 rows and the scales of 256: what TMA brings is a power of two.
    descriptors = _codes(a, ROWS), _codes(b, COLUMNS), _scales(scale_a, 256), _scales(scale_b, COLUMNS)
    numbers = m, n, k, out.stride(0), scale_a.stride(0), scale_b.stride(0)
    return _tiles(m, n), (*descriptors, out, *numbers), (GROUPS, ROWS, PLACES, _TALL)


def _codes(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Codes [rows, K] as TMA reads them, a tile at a time, into the order in which wgmma reads shared memory."""
    tile = [rows, BLOCK]
    return TensorDescriptor.from_tensor(matrix, tile, gl.NVMMASharedLayout.get_default_for(tile, gl.int8))


def _scales(scale: Tensor, count: int) -> TensorDescriptor:
    """Scales as one row of numbers; behind the last of a block are those of the next, which no row or column takes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(scale.view(-1), [count], layout)
