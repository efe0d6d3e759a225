"""cast_transpose on a GPU: launches of its kernel.

What follows from dtypes, shapes, strides, alignment, device and options is prepared once and kept; a launch then makes
what is written and hands on addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.allocation import New, new_on
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.cast_transpose.triton_kernel import cast_transpose_kernel as cast_transpose_kernel
from octavo.kernels.codes import CODE_DTYPES, INTERPRETED
from octavo.kernels.launcher import Key, Launch, Launcher, common_alignment
from octavo.kernels.layout import padded
from octavo.kernels.sum_kernel import joined_sums
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

# Rows and columns of a block (64 columns are 128 bytes of bf16, 64 of codes): of a small matrix, which has too few
# large blocks to fill the card; of one with so many elements or more; and of such a one with a scale a row or a column,
# of which a wide block loads fewer. As measured on an H200.
_BLOCK = (64, 64)
_BLOCK_LARGE = (128, 64)
_BLOCK_OF_VECTORS = (64, 128)
_LARGE = 1 << 25
WARPS = 4

# A tensor as `allocation.New` makes it: shape, strides, dtype.
_Made = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _Flags(NamedTuple):
    """What a call asks for; of amaxes given for the whole matrix, how many."""

    format: str
    has_codes: bool
    has_codes_t: bool
    shared: bool
    by_row: bool
    by_column: bool
    reads_given: bool
    partials: int
    partials_t: int
    rule: ScaleRule | None
    stores_scale: bool
    gathers: bool
    inf_to_nan: bool
    column_sum: bool
    traced: bool


class _Layout(NamedTuple):
    """What of a launch follows from shapes and flags: what it writes, and arguments of the kernel.

    No codes are written that were not asked for; a scale that is None is the given one. What is given is read as it is
    if `reads_given`.
    """

    codes: _Made
    scale: _Made | None
    codes_t: _Made
    scale_t: _Made | None
    sums: _Made | None
    programs: int
    numbers: tuple[int, int, int]
    constants: tuple[Any, ...]
    reads_given: bool


class _Call(NamedTuple):
    """A launch for the compiler: what it writes, how many programs, and the arguments in three parts."""

    outputs: _Outputs
    programs: int
    tensors: tuple[Tensor, ...]
    numbers: tuple[int, int, int]
    constants: tuple[Any, ...]


def _layout(rows: Any, columns: int, stride_row: int, flags: _Flags) -> _Layout:
    padded_rows, padded_columns = padded(rows), padded(columns)
    align = common_alignment(columns, stride_row)
    block_rows, block_columns = _BLOCK
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    if not isinstance(rows, int) or rows * columns >= _LARGE:
        block_rows, block_columns = _BLOCK_OF_VECTORS if flags.by_row or flags.by_column else _BLOCK_LARGE
    tiles_tall, tiles_wide = -(-padded_rows // block_rows), -(-padded_columns // block_columns)
    rule = flags.rule
    # A new scalar Inductor would fill before it is written, a vector it leaves alone.
    one: _Made = ((1,), (1,), torch.float32) if flags.traced else ((), (), torch.float32)
    whole = one if flags.stores_scale else None
    dtype = format_named(flags.format).dtype
    constants = (
        align,
        flags.has_codes,
        flags.has_codes_t,
        flags.shared,
        flags.by_row,
        flags.by_column,
        rule is not None,
        flags.partials,
        flags.partials_t,
        0.0 if rule is None else rule.epsilon,
        rule is not None and rule.power_of_two,
        flags.stores_scale,
        flags.gathers,
        flags.inf_to_nan,
        flags.column_sum,
        CODE_DTYPES[flags.format],
        INTERPRETED,
        format_named(flags.format).max,
        SMALLEST_MULTIPLIER,
        LARGEST_MULTIPLIER,
        block_rows,
        block_columns,
    )
    return _Layout(
        ((padded_rows, padded_columns), (padded_columns, 1), dtype),
        ((padded_rows, 1), (1, 1), torch.float32) if flags.by_row else whole,
        ((padded_columns, padded_rows), (padded_rows, 1), dtype),
        ((padded_columns, 1), (1, 1), torch.float32) if flags.by_column else whole,
        ((tiles_tall * columns,), (1,), torch.float32) if flags.column_sum else None,
        tiles_tall * tiles_wide,
        (rows, columns // align, stride_row // align),
        constants,
        flags.reads_given,
    )


def _flags(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathers: bool,
    inf_to_nan: bool,
    column_sum: bool,
    traced: bool,
) -> _Flags:
    by_row = rowwise is not None and rowwise.dim() == 2
    by_column = columnwise is not None and columnwise.dim() == 2
    read, read_t = _readable(rowwise), _readable(columnwise)
    return _Flags(
        format.name,
        rowwise is not None,
        columnwise is not None,
        rowwise is columnwise,
        by_row,
        by_column,
        # Of a traced tensor nothing is asked.
        not traced and read is rowwise and read_t is columnwise,
        1 if by_row or read is None else read.numel(),
        1 if by_column or read_t is None else read_t.numel(),
        rule,
        # A given scale is taken as it is, unless it may be written to before its codes are multiplied.
        traced or rule is not None or (x.is_cuda and torch.cuda.is_current_stream_capturing()),
        gathers,
        inf_to_nan,
        column_sum,
        traced,
    )


def _arguments(
    layout: _Layout, new: New, x: Tensor, rowwise: Tensor | None, columnwise: Tensor | None, gathered: Tensor | None
) -> tuple[_Outputs, tuple[Tensor, ...]]:
    """(what a launch writes, the kernel's arguments that are tensors)."""
    codes = scale = codes_t = scale_t = None
    read, read_t = (rowwise, columnwise) if layout.reads_given else (_readable(rowwise), _readable(columnwise))
    if rowwise is not None:
        codes = new(*layout.codes)
        scale = rowwise if layout.scale is None else new(*layout.scale)
    if columnwise is not None:
        codes_t = new(*layout.codes_t)
        scale_t = scale if columnwise is rowwise else columnwise if layout.scale_t is None else new(*layout.scale_t)
    sums = None if layout.sums is None else new(*layout.sums)
    # A pointer that the flags leave unused may be any; x itself would be materialised once more by the compiler.
    unused = codes if codes is not None else codes_t if codes_t is not None else x if gathered is None else gathered
    return (codes, scale, codes_t, scale_t, sums), (
        x,
        unused if codes is None else codes,
        unused if codes_t is None else codes_t,
        unused if read is None else read,
        unused if read_t is None else read_t,
        unused if scale is None else scale,
        unused if scale_t is None else scale_t,
        unused if gathered is None else gathered,
        unused if sums is None else sums,
    )


def prepare(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
) -> _Call:
    """The launch in traced code, for an x whose rows are contiguous; its sums [blocks of rows * K] are partial.

    No output is an input: every scale is new, of a whole matrix [1].
    """
    flags = _flags(x, format, rowwise, columnwise, rule, gathered is not None, inf_to_nan, column_sum, True)
    rows, columns = x.shape
    layout = _layout(rows, columns, x.stride(0), flags)

    def new(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return x.new_empty(shape, dtype=dtype)

    outputs, tensors = _arguments(layout, new, x, rowwise, columnwise, gathered)
    return _Call(outputs, layout.programs, tensors, layout.numbers, layout.constants)


def _readable(given: Tensor | None) -> Tensor | None:
    """Scales or amaxes as the kernel reads them: without gaps, and partial amaxes a power of two in number."""
    if given is None:
        return None
    if given.dim() != 2 and given.numel() & (given.numel() - 1):
        return given.amax()
    return given.contiguous()


def _flipped(given: Tensor | None) -> Tensor | None:
    return given if given is None or given.dim() != 2 else given.reshape(given.shape[1], given.shape[0])


_launch_kernel = Launcher(cast_transpose_kernel)


class PreparedCast:
    """The launch for all calls that are equal in what `cast_transpose_triton` asks of its arguments.

    Called with tensors, it makes what is written and launches.
    """

    __slots__ = ("index", "launch", "layout", "new")

    def __init__(self, x: Tensor, flags: _Flags) -> None:
        self.index = x.get_device()
        self.new = new_on(self.index)
        rows, columns = x.shape
        self.layout = layout = _layout(rows, columns, x.stride(0), flags)
        wide = tuple(number >> 31 for number in layout.numbers)
        key = Key.of(x.dtype, x.data_ptr() % 16 == 0, wide, flags.format, layout.constants)
        self.launch = Launch(_launch_kernel, self.index, layout.programs, key, layout.numbers, layout.constants, WARPS)

    def __call__(
        self, x: Tensor, rowwise: Tensor | None, columnwise: Tensor | None, gathered: Tensor | None
    ) -> _Outputs:
        """As `cast_transpose_triton`."""
        index = self.index
        if index >= 0 and index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                return self(x, rowwise, columnwise, gathered)
        layout = self.layout
        outputs, tensors = _arguments(layout, self.new, x, rowwise, columnwise, gathered)
        self.launch(tensors)
        if layout.sums is None:
            return outputs
        codes, scale, codes_t, scale_t, sums = outputs
        assert sums is not None, "the layout has them"
        return codes, scale, codes_t, scale_t, joined_sums(sums, x.shape[1])


def prepared(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None,
    gathers: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], _Outputs]:
    """What runs this call, and every other one of equal dtypes, shapes, strides, alignment, device and options.

    It is called with x, rowwise, columnwise and gathered; while a CUDA graph is captured, with others than otherwise.
    """
    if x.dtype == torch.float64 or x.stride(1) != 1:
        return functools.partial(_rearranged, format, rule, inf_to_nan, column_sum)
    return PreparedCast(x, _flags(x, format, rowwise, columnwise, rule, gathers, inf_to_nan, column_sum, False))


def _rearranged(
    format: Format,
    rule: ScaleRule | None,
    inf_to_nan: bool,
    column_sum: bool,
    x: Tensor,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    gathered: Tensor | None,
) -> _Outputs:
    """Of an x that the kernel does not read as it is."""
    x = x.float() if x.dtype == torch.float64 else x
    options = format, rule, inf_to_nan
    if x.stride(1) != 1 and x.stride(0) == 1 and x.shape[0] != 1:
        # Contiguous the other way round: the transposed problem, with the roles of the layouts exchanged. (Of one
        # row it would be a problem of one column, see `one_column_reasons`.)
        given = _flipped(columnwise), _flipped(rowwise)
        codes_t, scale_t, codes, scale, _ = _launched(x.t(), options, *given, gathered, False)
        return codes, scale, codes_t, scale_t, x.sum(0, dtype=torch.float32) if column_sum else None
    # Of extents of 1 strides say nothing: what is contiguous counts as such.
    return _launched(x if x.stride(1) == 1 else x.contiguous(), options, rowwise, columnwise, gathered, column_sum)


def _launched(
    x: Tensor,
    options: tuple[Format, ScaleRule | None, bool],
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    gathered: Tensor | None,
    column_sum: bool,
) -> _Outputs:
    format, rule, inf_to_nan = options
    gathers = gathered is not None
    flags = _flags(x, format, rowwise, columnwise, rule, gathers, inf_to_nan, column_sum, False)
    return PreparedCast(x, flags)(x, rowwise, columnwise, gathered)


def cast_transpose_triton(
    x: Tensor,
    format: Format,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    rule: ScaleRule | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> _Outputs:
    """As `octavo.kernels.cast_transpose.cast_transpose`: E4M3 or E5M2, more than one column, a device of Triton's."""
    cast = prepared(x, format, rowwise, columnwise, rule, gathered is not None, inf_to_nan, column_sum)
    return cast(x, rowwise, columnwise, gathered)
