"""amax on a GPU: one read of a matrix.

Of the whole, each program strides through the matrix and writes one partial maximum: nothing to set to zero first, no
atomics, and whoever casts the matrix next takes the largest of the few (`cast_transpose`). By row and by column in one
read, blocks meet in atomic maxima on memory that starts at zero.

|x| is compared as float32; inf and NaN count as 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launcher import Launcher, specialization
from octavo.kernels.layout import padded

# Elements of a block of a whole matrix: 32 a thread, four 16-byte loads of bf16 in flight.
_BLOCK = 16384
WARPS = 16
_NARROW = 64
# At most so many programs, two for each multiprocessor of an H200; a power of two, as cast_transpose reads them.
_MOST_PARTIALS = 256
# By row and column: extents of a block, 256 bytes of a row of bf16, and how many a program takes one below the other,
# so that it meets others in few atomics; of a small matrix fewer, to fill the card.
_BLOCK_ROWS = 32
_BLOCK_COLUMNS = 128
_BLOCKS = 4
_BLOCKS_LARGE = 16
_LARGE = 1 << 25
_WARPS_BY_ROW_AND_COLUMN = 4


@triton.jit
def finite_magnitude(x):
    """|x| as float32; 0 where x is inf or NaN."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit(do_not_specialize=("rows",))
def partial_amax_kernel(
    x, out, rows, columns, stride_row, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PARTIALS: tl.constexpr
):
    """Largest finite magnitude of every PARTIALS-th block of x [rows, columns] (rows contiguous) -> out [PARTIALS].

    A block is BLOCK // WIDTH rows of WIDTH columns.
    """
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    tiles_wide = tl.cdiv(columns, WIDTH)
    tiles = tl.cdiv(rows, HEIGHT) * tiles_wide
    largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tiles, PARTIALS):
        # 64 bits, since an offset can exceed 2^31.
        row = (tile // tiles_wide).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_wide).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        block = tl.load(x + row[:, None] * stride_row + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, finite_magnitude(block))
    tl.store(out + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("by_row", "by_column"))
def amax_by_row_and_column_kernel(
    x,
    by_row,
    by_column,
    rows,
    columns,
    stride_row,
    HAS_ROW: tl.constexpr,
    HAS_COLUMN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of x [rows, columns] (rows contiguous), one below the other.

    -> their part of by_row [rows] and by_column [columns], by max.
    """
    tiles_wide = tl.cdiv(columns, BLOCK_COLUMNS)
    first = (tl.program_id(0) // tiles_wide).to(tl.int64) * (BLOCK_ROWS * BLOCKS) + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    largest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in range(BLOCKS):
        row = first + block * BLOCK_ROWS
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        source = x + row[:, None] * stride_row + column[None, :]
        magnitude = finite_magnitude(tl.load(source, mask=inside, other=0.0))
        if HAS_ROW:
            tl.atomic_max(by_row + row, tl.max(magnitude, axis=1), mask=row < rows, sem="relaxed")
        largest = tl.maximum(largest, magnitude)
    if HAS_COLUMN:
        tl.atomic_max(by_column + column, tl.max(largest, axis=0), mask=column < columns, sem="relaxed")


_launch_partial = Launcher(partial_amax_kernel)
_launch_by_row_and_column = Launcher(amax_by_row_and_column_kernel)


def partial_amax_triton(x: Tensor) -> Tensor:
    """As `octavo.kernels.amax.partial_amax`, for an x of at least one element on a device that Triton compiles for."""
    x = _with_contiguous_rows(x)
    out, numbers, constants = prepare_partial(x)
    key = (x.dtype, x.data_ptr() % 16 == 0, numbers[0] >> 31, specialization(*numbers[1:]), constants)
    _launch_partial(constants[-1], key, (x, out), numbers, constants, WARPS)
    return out


def amax_by_row_and_column_triton(
    x: Tensor, row: bool, column: bool, apart: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """As `octavo.kernels.amax.amax_by_row_and_column`, for an x of at least one element on such a device.

    apart: the two share no memory.
    """
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) != 1:
        if x.stride(0) == 1:
            by_column, by_row = amax_by_row_and_column_triton(x.t(), column, row, apart)
            return (
                None if by_row is None else by_row.reshape(-1, 1),
                None if by_column is None else by_column.reshape(1, -1),
            )
        x = x.contiguous()
    rows, columns = x.shape
    by_row, by_column = _zeros(x, row, column, apart)
    blocks = _BLOCKS_LARGE if rows * columns >= _LARGE else _BLOCKS
    programs = -(-rows // (_BLOCK_ROWS * blocks)) * -(-columns // _BLOCK_COLUMNS)
    tensors = (x, x if by_row is None else by_row, x if by_column is None else by_column)
    numbers, constants = (rows, columns, x.stride(0)), (row, column, _BLOCK_ROWS, _BLOCK_COLUMNS, blocks)
    key = (x.dtype, x.data_ptr() % 16 == 0, rows >> 31, specialization(*numbers[1:]), constants)
    _launch_by_row_and_column(programs, key, tensors, numbers, constants, _WARPS_BY_ROW_AND_COLUMN)
    return by_row, by_column


def _zeros(x: Tensor, row: bool, column: bool, apart: bool) -> tuple[Tensor | None, Tensor | None]:
    """What a launch starts from: zeros [M, 1] and [1, K], made by one fill unless they are `apart`."""
    rows, columns = x.shape
    if apart or not (row and column):
        by_row = x.new_zeros((rows, 1), dtype=torch.float32) if row else None
        return by_row, x.new_zeros((1, columns), dtype=torch.float32) if column else None
    # The second begins where its alignment is that of a tensor of its own.
    begin = padded(rows)
    both = x.new_zeros(begin + columns, dtype=torch.float32)
    return both[:rows].view(rows, 1), both[begin:].view(1, columns)


def prepare_partial(x: Tensor) -> tuple[Tensor, tuple[int, int, int], tuple[int, int, int]]:
    """(out [P], numbers, constants) of a launch for an x whose rows are contiguous."""
    rows, columns = x.shape
    # The widest block that fits into the columns without a rest; if that is narrow, with one.
    width = columns & -columns
    width = min(_BLOCK, width if width >= _NARROW else triton.next_power_of_2(columns))
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    partials = _MOST_PARTIALS
    if isinstance(rows, int):
        tiles = -(-rows // (_BLOCK // width)) * -(-columns // width)
        partials = min(_MOST_PARTIALS, triton.next_power_of_2(tiles))
    out = x.new_empty(partials, dtype=torch.float32)
    return out, (rows, columns, x.stride(0)), (_BLOCK, width, partials)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """x, or what has the same entries: for the largest of a whole matrix, transposed if that is contiguous."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) == 1:
        return x
    return x.t() if x.stride(0) == 1 else x.contiguous()
