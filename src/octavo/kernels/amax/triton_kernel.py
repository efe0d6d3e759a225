"""amax on a GPU: one read of a matrix.

Of the whole, each program strides through the matrix and writes one partial maximum: nothing to set to zero first, no
atomics, and whoever casts the matrix next takes the largest of the few (`cast_transpose`). By row and by column in one
read, blocks meet in atomic maxima on memory that starts at zero. (Partial maxima by row and by column were faster to
write, and slower once another launch had joined them: `benchmarks/LOG.md`.)

|x| is compared as float32, or two of 16 bits at once (`packed_kernel`); inf and NaN count as 0.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.allocation import new_on
from octavo.kernels.amax.packed_kernel import atomic_max, is_packed, packed_amax_kernel, packed_arguments
from octavo.kernels.launcher import Key, Launch, Launcher, common_alignment
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


@triton.jit(do_not_specialize=("rows", "columns", "stride_row"))
def partial_amax_kernel(
    x,
    out,
    rows,
    columns,
    stride_row,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Largest finite magnitude of every PARTIALS-th block of x [rows, columns] (rows contiguous) -> out [PARTIALS].

    A block is BLOCK // WIDTH rows of WIDTH columns. columns and stride_row come in units of ALIGN.
    """
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    columns = columns * ALIGN
    stride_row = stride_row * ALIGN
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


@triton.jit(do_not_specialize=("rows", "columns", "stride_row"), do_not_specialize_on_alignment=("by_row", "by_column"))
def amax_by_row_and_column_kernel(
    x,
    by_row,
    by_column,
    rows,
    columns,
    stride_row,
    ALIGN: tl.constexpr,
    HAS_ROW: tl.constexpr,
    HAS_COLUMN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of x [rows, columns] (rows contiguous), one below the other.

    -> their part of by_row [rows] and by_column [columns], by max. columns and stride_row come in units of ALIGN.
    """
    columns = columns * ALIGN
    stride_row = stride_row * ALIGN
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
            atomic_max(by_row + row, tl.max(magnitude, axis=1), row < rows)
        largest = tl.maximum(largest, magnitude)
    if HAS_COLUMN:
        atomic_max(by_column + column, tl.max(largest, axis=0), column < columns)


_launch_partial = Launcher(partial_amax_kernel)
_launch_by_row_and_column = Launcher(amax_by_row_and_column_kernel)
_launch_packed = Launcher(packed_amax_kernel)


class PreparedPartial:
    """The launch for all x that are equal in what `prepared_partial` asks of its own."""

    __slots__ = ("index", "launch", "made", "new")

    def __init__(self, x: Tensor) -> None:
        self.index = x.get_device()
        self.new = new_on(self.index)
        numbers, constants = _partial_arguments(x)
        wide = tuple(number >> 31 for number in numbers)
        key = Key.of(x.dtype, x.data_ptr() % 16 == 0, wide, constants)
        self.launch = Launch(_launch_partial, self.index, constants[-1], key, numbers, constants, WARPS)
        self.made = (constants[-1],), (1,), torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """As `partial_amax_triton`."""
        if self.index >= 0 and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self(x)
        out = self.new(*self.made)
        self.launch((x, out))
        return out


def prepared_partial(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What gives the partial amaxes of x, and of all others of equal dtype, shape, strides, alignment and device."""
    if x.dtype != torch.float64 and x.stride(1) == 1:
        return PreparedPartial(x)

    def rearranged(x: Tensor) -> Tensor:
        x = _with_contiguous_rows(x)
        return PreparedPartial(x)(x)

    return rearranged


def partial_amax_triton(x: Tensor) -> Tensor:
    """As `octavo.kernels.amax.partial_amax`, for an x of at least one element on a device that Triton compiles for."""
    return prepared_partial(x)(x)


class PreparedByRowAndColumn:
    """The launch for all x that are equal in what `prepared_by_row_and_column` asks of its own.

    By row and by column begin as zeros of one fill; the second where its alignment is that of a tensor of its own.
    """

    __slots__ = ("apart", "columns", "index", "launch", "rows")

    def __init__(self, x: Tensor, row: bool, column: bool, apart: bool) -> None:
        packed = is_packed(x)
        self.index = x.get_device()
        self.apart = apart
        self.rows, self.columns = (
            extent if wanted else 0 for extent, wanted in zip(x.shape, (row, column), strict=True)
        )
        launcher = _launch_packed if packed else _launch_by_row_and_column
        arguments = packed_arguments if packed else _loop_arguments
        programs, numbers, constants = arguments(x, row, column)
        wide = tuple(number >> 31 for number in numbers)
        key = Key.of(x.dtype, x.data_ptr() % 16 == 0, wide, constants)
        self.launch = Launch(launcher, self.index, programs, key, numbers, constants, _WARPS_BY_ROW_AND_COLUMN)

    def __call__(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """As `amax_by_row_and_column_triton`."""
        if self.index >= 0 and self.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.index):
                return self(x)
        by_row, by_column = self._zeros()
        self.launch((x, x if by_row is None else by_row, x if by_column is None else by_column))
        return by_row, by_column

    def _zeros(self) -> tuple[Tensor | None, Tensor | None]:
        rows, columns, begin = self.rows, self.columns, padded(self.rows)
        zeros = new_on(self.index)((begin + columns,), (1,), torch.float32).zero_()
        by_row = zeros.as_strided((rows, 1), (1, 1)) if rows else None
        by_column = zeros.as_strided((1, columns), (columns, 1), begin) if columns else None
        return by_row, by_column.clone() if self.apart and by_column is not None else by_column


def prepared_by_row_and_column(
    x: Tensor, row: bool, column: bool, apart: bool
) -> Callable[[Tensor], tuple[Tensor | None, Tensor | None]]:
    """What gives the amaxes of x, and of all others of equal dtype, shape, strides, alignment and device."""
    if x.dtype != torch.float64 and x.stride(1) == 1:
        return PreparedByRowAndColumn(x, row, column, apart)

    def rearranged(x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x = x.float() if x.dtype == torch.float64 else x
        if x.stride(1) == 1 or x.stride(0) != 1:
            x = x if x.stride(1) == 1 else x.contiguous()
            return PreparedByRowAndColumn(x, row, column, apart)(x)
        by_column, by_row = PreparedByRowAndColumn(x.t(), column, row, apart)(x.t())
        return (
            None if by_row is None else by_row.reshape(-1, 1),
            None if by_column is None else by_column.reshape(1, -1),
        )

    return rearranged


def amax_by_row_and_column_triton(
    x: Tensor, row: bool, column: bool, apart: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """As `octavo.kernels.amax.amax_by_row_and_column`, for an x of at least one element on such a device.

    apart: the two share no memory.
    """
    return prepared_by_row_and_column(x, row, column, apart)(x)


def prepare_partial(x: Tensor) -> tuple[Tensor, tuple[int, int, int], tuple[int, int, int, int]]:
    """(out [P], numbers, constants) of a launch in traced code, for an x whose rows are contiguous."""
    numbers, constants = _partial_arguments(x)
    return x.new_empty(constants[-1], dtype=torch.float32), numbers, constants


def _partial_arguments(x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int, int, int]]:
    """(numbers, constants) of a launch for an x whose rows are contiguous."""
    rows, columns = x.shape
    # The widest block that fits into the columns without a rest; if that is narrow, with one.
    width = columns & -columns
    width = min(_BLOCK, width if width >= _NARROW else triton.next_power_of_2(columns))
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    partials = _MOST_PARTIALS
    if isinstance(rows, int):
        tiles = -(-rows // (_BLOCK // width)) * -(-columns // width)
        partials = min(_MOST_PARTIALS, triton.next_power_of_2(tiles))
    align = common_alignment(columns, x.stride(0))
    return (rows, columns // align, x.stride(0) // align), (align, _BLOCK, width, partials)


def _loop_arguments(x: Tensor, row: bool, column: bool) -> tuple[int, tuple[int, ...], tuple[Any, ...]]:
    """(programs, numbers, constants) of a launch of `amax_by_row_and_column_kernel`."""
    rows, columns = x.shape
    align = common_alignment(columns, x.stride(0))
    blocks = _BLOCKS_LARGE if rows * columns >= _LARGE else _BLOCKS
    programs = -(-rows // (_BLOCK_ROWS * blocks)) * -(-columns // _BLOCK_COLUMNS)
    numbers = rows, columns // align, x.stride(0) // align
    return programs, numbers, (align, row, column, _BLOCK_ROWS, _BLOCK_COLUMNS, blocks)


def _with_contiguous_rows(x: Tensor) -> Tensor:
    """x, or what has the same entries: for the largest of a whole matrix, transposed if that is contiguous."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) == 1:
        return x
    return x.t() if x.stride(0) == 1 else x.contiguous()
