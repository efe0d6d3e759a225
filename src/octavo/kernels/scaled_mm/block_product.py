"""Products of two operands in blocks of 1x128 on Hopper, in Gluon, with the bits of cuBLASLt's.

    out [M, N] = sum over the blocks c of K of (a [M, c] @ b [N, c]^T) * scale_a[c, M] * scale_b[c, N]

Persistent: one warp loads by TMA, each warp group multiplies 64 rows of a tile. While one scales the sums of a block
and adds them to its total, in float32, the tensor core works for the others. They meet only at the barriers of the
places in shared memory. There are two forms.

- `WIDE`: three groups, a tile of 192 x 128. cuBLASLt gives each multiprocessor tiles of 128 x 128, so that 144 of them
  (the weight's gradient of 768 x 3072) take 132 multiprocessors as long as 264 would; of these there are 96. Of large
  products, at the card's limit of power, it takes less time, too.
- `AHEAD`: two groups, a tile of 128 x 128, as cuBLASLt's; a group begins the product of a block before it scales the
  sums of the one before. Its programs come singly, not in clusters of eight, and let other work run beside them.

The order of rounding is cuBLASLt's: a sum times scale_a, then a fused multiply-add by scale_b.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

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

ROWS = 64  # of a warp group
COLUMNS = 128
_TALL = 8  # rows of tiles that are walked together


class Form(NamedTuple):
    """How a tile is multiplied.

    Attributes:
        groups: warp groups, of 64 rows of it each.
        places: blocks of it under way in shared memory.
        ahead: the product of a block is begun before the sums of the one before are scaled; anew after so many blocks,
            since ptxas lets no product be under way around a loop.
        time: of a tile, in units of that of a tile of cuBLASLt's.
    """

    groups: int
    places: int
    ahead: int
    time: float

    def tiles(self, rows: int, columns: int) -> int:
        """Of a product."""
        return -(-rows // (self.groups * ROWS)) * -(-columns // COLUMNS)


# Times were measured on an H200, on six shapes: 1.19 to 1.47 (1.42 at 16384 x 8192 x 8192), and 0.77 to 1.01;
# `benchmarks/LOG.md`.
WIDE = Form(groups=3, places=5, ahead=1, time=1.42)
AHEAD = Form(groups=2, places=6, ahead=4, time=0.98)
_THEIR_TILE = 128
# What must be gained, by the count of tiles, before it is believed, where the card does nothing else.
_MARGIN = 0.97


@functools.lru_cache(maxsize=1024)
def preferred_form(rows: int, columns: int, multiprocessors: int, beside: bool = False) -> Form | None:
    """What takes least time for a product [rows, columns] over a long K, by how tiles fill the card; None: cuBLASLt.

    beside: the card does other work at the same time, which takes what is idle behind the last tiles.
    """

    def cost(tiles: int, time: float) -> float:
        waves = tiles / multiprocessors
        # Of one wave or two the last is waited for, whatever runs beside.
        return time * (waves if beside and waves > 2 else math.ceil(waves))

    costs = {form: cost(form.tiles(rows, columns), form.time) for form in (WIDE, AHEAD)}
    best = min(costs, key=costs.__getitem__)
    theirs = cost(-(-rows // _THEIR_TILE) * -(-columns // _THEIR_TILE), 1.0)
    return best if costs[best] < (1.0 if beside else _MARGIN) * theirs else None


# Device, dtype of the output and form of what has been launched.
_loaded: set[tuple[int, torch.dtype, Form]] = set()


def is_loaded(index: int, out_dtype: torch.dtype, form: Form) -> bool:
    """Whether this has been launched for such outputs on CUDA device `index`: there is one variant of each."""
    return (index, out_dtype, form) in _loaded


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
def _following(place, phase, PLACES: gl.constexpr):
    """The place behind this one, and the phase of its barrier."""
    place += 1
    if place == PLACES:
        place = 0
        phase ^= 1
    return place, phase


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
            place, phase = _following(place, phase, PLACES)


@gluon.jit
def _product(places, place, part, GROUPS: gl.constexpr, GROUP: gl.constexpr):
    """The sums of one block, begun: a group's rows times all columns; `part` is of their shape."""
    rows, columns = places[0].index(place * GROUPS + GROUP), places[1].index(place)
    return warpgroup_mma(rows, columns.permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def _waited(values, ANOTHER: gl.constexpr):
    """The values, once their product is done; ANOTHER begun after it may still be under way."""
    return warpgroup_mma_wait(1 if ANOTHER else 0, (values,))


@gluon.jit
def _scaled(part, row, places, place):
    """The sums of one block, times their scales; those of columns are read here, sooner there are no registers."""
    column = places[3].index(place).load(gl.SliceLayout(0, part.type.layout))
    return part * row[:, None] * column[None, :]


@gluon.jit
def _multiply(
    out, places, tiles, extent,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, TALL: gl.constexpr, AHEAD: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """A warp group: its rows of every tile."""
    a_scales, full, empty = places[2], places[4], places[5]
    tiles_m, tiles_n, blocks = tiles
    COLUMNS: gl.constexpr = places[1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    part = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    place = 0
    phase = 0
    left = 0  # the place before
    filled = 0  # whether there was one
    for program in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_at(program, tiles_m, tiles_n, TALL)
        total = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
        for _ in range(blocks // AHEAD):
            mbarrier.wait(full.index(place), phase)
            sums = _product(places, place, part, GROUPS, GROUP)
            for step in gl.static_range(AHEAD):
                here = place
                place, phase = _following(place, phase, PLACES)
                if step + 1 < AHEAD:
                    mbarrier.wait(full.index(place), phase)
                    next_sums = _product(places, place, part, GROUPS, GROUP)
                # Only now: what was read of that place, its scales too, has been used when the next product begins.
                mbarrier.arrive(empty.index(left), pred=filled > 0)
                row = a_scales.index(here).slice(GROUP * ROWS, ROWS).load(by_row)
                done = _waited(sums, step + 1 < AHEAD)
                total += _scaled(done, row, places, here)
                # The wait, for no product, is what additions are not moved across: beyond the beginning of the next
                # product they would need registers for one part more.
                total = _waited(total, step + 1 < AHEAD)
                left = here
                filled = 1
                if step + 1 < AHEAD:
                    sums = next_sums
                elif AHEAD == 1:
                    part = done
        _store(out, total, tile_m * GROUPS + GROUP, tile_n, extent)


@gluon.jit
def _store(out, total, tile_m, tile_n, extent):
    """A group's tile of the output."""
    M, N, stride = extent
    ROWS: gl.constexpr = total.shape[0]
    COLUMNS: gl.constexpr = total.shape[1]
    # Eight neighbours of a row a thread: with two of them, as sums lie, it takes four times as many instructions.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [ROWS, COLUMNS],
    )
    rows = tile_m * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    columns = tile_n * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    # 64 bits, since an offset can exceed 2^31.
    at = out + rows[:, None].to(gl.int64) * stride + columns[None, :]
    gl.store(at, gl.convert_layout(total.to(out.dtype.element_ty), layout), mask=inside)


@gluon.jit
def block_product_kernel(
    a, b, scale_a, scale_b, out, M, N, K, stride_out, stride_a, stride_b,
    GROUPS: gl.constexpr, ROWS: gl.constexpr, PLACES: gl.constexpr, TALL: gl.constexpr, AHEAD: gl.constexpr,
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
    # Blocks beyond K are zeros, as are their scales: TMA reads nothing else outside of a matrix.
    tiles = (gl.cdiv(M, GROUPS * ROWS), gl.cdiv(N, b.block_type.shape[0]), gl.cdiv(K, 128 * AHEAD) * AHEAD)
    extent = (gl.to_tensor(M), gl.to_tensor(N), gl.to_tensor(stride_out))
    strides = (gl.to_tensor(stride_a), gl.to_tensor(stride_b))
    # Constants stand in the call itself: in a tuple with a name they would become values of the device.
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    THIRD: gl.constexpr = 2
    # Of the workers: warps, and registers a thread. The first group multiplies in the program's own four warps.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, AHEAD, FIRST)),
                (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, AHEAD, SECOND)),
                (_load, ((a, b, scale_a, scale_b), places, tiles, strides, GROUPS, ROWS, PLACES, TALL)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, AHEAD, FIRST)),
                (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, AHEAD, SECOND)),
                (_multiply, (out, places, tiles, extent, GROUPS, ROWS, PLACES, TALL, AHEAD, THIRD)),
                (_load, ((a, b, scale_a, scale_b), places, tiles, strides, GROUPS, ROWS, PLACES, TALL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


def block_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, form: Form = WIDE
) -> Tensor:
    """The product -> [M, N] of float32, bfloat16 or float16.

    Args:
        a, b: E4M3 codes [M, K] and [N, K] on Hopper, contiguous; M and N multiples of 16, K of 128.
        scale_a, scale_b: their scales by 1x128, float32 [K / 128, M] and [K / 128, N], contiguous.
        out_dtype: of the result; each sum is rounded once.
        form: how, with the same bits.
    """
    out = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    tiles, arguments, constants = prepare(a, b, scale_a, scale_b, out, form)
    with torch.cuda.device(a.device):
        programs = min(tiles, multiprocessors(a))
        block_product_kernel[(programs,)](*arguments, *constants, num_warps=4)
    _loaded.add((a.get_device(), out_dtype, form))
    return out


def prepare(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor, form: Form
) -> tuple[int, tuple[Any, ...], tuple[Any, ...]]:
    """What is launched: (tiles, arguments of the kernel, and its constants)."""
    (m, k), n = a.shape, b.shape[0]
    # What TMA brings is a power of two: of a tile's 192 rows the scales of 256.
    rows = 1 << (form.groups * ROWS - 1).bit_length()
    descriptors = _codes(a, ROWS), _codes(b, COLUMNS), _scales(scale_a, rows), _scales(scale_b, COLUMNS)
    numbers = m, n, k, out.stride(0), scale_a.stride(0), scale_b.stride(0)
    constants = form.groups, ROWS, form.places, _TALL, form.ahead
    return form.tiles(m, n), (*descriptors, out, *numbers), constants


def _codes(matrix: Tensor, rows: int) -> TensorDescriptor:
    """Codes [rows, K] as TMA reads them, a tile at a time, into the order in which wgmma reads shared memory."""
    tile = [rows, BLOCK]
    return TensorDescriptor.from_tensor(matrix, tile, gl.NVMMASharedLayout.get_default_for(tile, gl.int8))


def _scales(scale: Tensor, count: int) -> TensorDescriptor:
    """Scales as one row of numbers; behind the last of a block are those of the next, which no row or column takes."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(scale.view(-1), [count], layout)
