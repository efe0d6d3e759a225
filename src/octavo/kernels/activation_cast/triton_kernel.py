"""activation_cast on a GPU: each program reads one block of x and writes the codes of its function in both layouts.

Bytes moved an element of the result, bf16: 2 read (4 if gated: both halves lie in the same rows) and 2 written; an
activation and then a cast move 2 + 2 + 2 + 2. Blocks, pairs of rows and words of two codes are those of
`octavo.kernels.cast_transpose.triton_kernel`; the columns of codes_t are written 64 bytes at a time.

For current scaling the amax has to be known first: `activation_output_kernel` writes the result in high precision with
parts of its amax, so that only the cast is left to do; the end of what it wrote is then still in the L2 cache, which is
where the cast begins.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activation_cast.triton_functions import activated
from octavo.kernels.activations import GATED, base_of
from octavo.kernels.amax.triton_kernel import finite_magnitude
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.launcher import Launcher
from octavo.kernels.layout import padded
from octavo.kernels.tile import (
    INTERPRETED,
    THROUGH_DTYPES,
    key_of,
    key_of_numbers,
    largest_of,
    load_rows,
    rounded,
    scale_and_multiplier,
    store_codes,
    with_contiguous_rows,
)

_BLOCK_ROWS = 64
_BLOCK_COLUMNS = 64
WARPS = 4
# Of the pass that writes high precision: elements of a block, and at most so many programs, as `partial_amax` has.
_OUTPUT_BLOCK = 8192
_OUTPUT_WIDTH = 256
OUTPUT_WARPS = 8
_MOST_PARTIALS = 256


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("scale", "scale_used", "gathered"))
def activation_cast_kernel(
    x,
    scale,
    codes,
    codes_t,
    scale_used,
    gathered,
    channels,
    rows,
    columns,
    stride_row,
    BASE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    THROUGH: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of f(x), x [rows, columns] or [rows, 2 columns] -> codes [padded rows, padded columns], codes_t."""
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    padded_columns = (columns + 15) // 16 * 16
    tiles_wide = tl.cdiv(padded_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    pair = (program // tiles_wide).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = (program % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside_0 = (2 * pair < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (2 * pair + 1 < rows)[:, None] & (column < columns)[None, :]
    # 2. The function of its values, even rows and odd ones, each [PAIRS, BLOCK_COLUMNS].
    source = x + 2 * pair[:, None] * stride_row + column[None, :]
    x_0, x_1 = load_rows(source, inside_0), load_rows(source + stride_row, inside_1)
    if IS_GATED:
        gate_0 = load_rows(source + columns, inside_0)
        gate_1 = load_rows(source + columns + stride_row, inside_1)
        y_0, y_1 = activated(x_0, BASE, INTERPRETED) * gate_0, activated(x_1, BASE, INTERPRETED) * gate_1
    else:
        y_0, y_1 = activated(x_0, BASE, INTERPRETED), activated(x_1, BASE, INTERPRETED)
    y_0, y_1 = rounded(y_0, THROUGH, INTERPRETED), rounded(y_1, THROUGH, INTERPRETED)
    if BY_CHANNEL:
        factor = tl.load(channels + column, mask=column < columns, other=1.0)[None, :]
        y_0, y_1 = y_0 * factor, y_1 * factor
    if BASE == "sigmoid" and not IS_GATED:
        # Of all f(0) this alone is not 0.
        y_0, y_1 = tl.where(inside_0, y_0, 0.0), tl.where(inside_1, y_1, 0.0)
    # 3. Their amax.
    if GATHER:
        tl.atomic_max(gathered, largest_of(y_0, y_1), sem="relaxed")
    # 4. The codes in both layouts.
    multiplier = scale_and_multiplier(scale, scale_used, program, STORE_SCALE)
    store_codes(
        codes, codes_t, y_0, y_1, multiplier, inside_0, inside_1, pair, column, padded_columns, rows, padded_columns,
        HAS_CODES, HAS_CODES_T, False, CODE, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def activation_output_kernel(
    x,
    output,
    amaxes,
    channels,
    rows,
    columns,
    stride_row,
    BASE: tl.constexpr,
    IS_GATED: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Every PARTIALS-th block of f(x) -> output [rows, columns], and its largest finite magnitude -> amaxes [PARTIALS].

    A block is BLOCK // WIDTH rows of WIDTH columns.
    """
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    tiles_wide = tl.cdiv(columns, WIDTH)
    largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT) * tiles_wide, PARTIALS):
        row = (tile // tiles_wide).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_wide).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        source = x + row[:, None] * stride_row + column[None, :]
        y = activated(load_rows(source, inside), BASE, INTERPRETED)
        if IS_GATED:
            y = y * load_rows(source + columns, inside)
        result = y.to(output.dtype.element_ty)
        if BY_CHANNEL:
            factor = tl.load(channels + column, mask=column < columns, other=1.0)[None, :]
            result = (result.to(tl.float32) * factor).to(output.dtype.element_ty)
        tl.store(output + row[:, None] * columns + column[None, :], result, mask=inside)
        largest = tl.maximum(largest, tl.where(inside, finite_magnitude(result), 0.0))
    tl.store(amaxes + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


_launch_cast = Launcher(activation_cast_kernel)
_launch_output = Launcher(activation_output_kernel)


class Prepared(NamedTuple):
    """A launch: what it writes, how many programs, and the arguments in three parts."""

    outputs: tuple[Any, ...]
    programs: Any
    tensors: tuple[Tensor, ...]
    numbers: tuple[Any, ...]
    constants: tuple[Any, ...]


def prepare_cast(
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    channels: Tensor | None,
    used: Tensor | None,
) -> Prepared:
    """The launch of `activation_cast_kernel` for a matrix whose rows are contiguous: codes, scale, codes_t.

    used: what the scale is written to; None gives out the given one.
    """
    rows, gated = x.shape[0], activation in GATED
    columns = x.shape[1] // 2 if gated else x.shape[1]
    padded_rows, padded_columns = padded(rows), padded(columns)
    codes = x.new_empty((padded_rows, padded_columns), dtype=format.dtype) if rowwise else None
    codes_t = x.new_empty((padded_columns, padded_rows), dtype=format.dtype) if columnwise else None
    given_out = scale.reshape(()) if used is None else used
    # A pointer that the flags leave unused may be any.
    unused = codes if codes is not None else codes_t if codes_t is not None else given_out
    tensors = (
        x,
        scale,
        unused if codes is None else codes,
        unused if codes_t is None else codes_t,
        given_out,
        unused if gathered is None else gathered,
        unused if channels is None else channels,
    )
    constants = (
        base_of(activation), gated, channels is not None, THROUGH_DTYPES[through], rowwise, columnwise,
        used is not None, gathered is not None, CODE_DTYPES[format.name], INTERPRETED, _BLOCK_ROWS, _BLOCK_COLUMNS,
    )  # fmt: skip
    programs = -(-padded_rows // _BLOCK_ROWS) * -(-padded_columns // _BLOCK_COLUMNS)
    return Prepared((codes, given_out, codes_t), programs, tensors, (rows, columns, x.stride(0)), constants)


def activation_cast_triton(
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    channels: Tensor | None = None,
    own_scale: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """As `octavo.kernels.activation_cast.activation_cast`: E4M3 or E5M2, more than one column, a device of Triton's.

    own_scale: the scale that comes out is a tensor of its own.
    """
    x, channels = with_contiguous_rows(x), None if channels is None else channels.contiguous()
    own_scale = own_scale or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    used = x.new_empty((), dtype=torch.float32) if own_scale else None
    call = prepare_cast(x, activation, format, scale, through, gathered, rowwise, columnwise, channels, used)
    key = (key_of(x, channels), key_of_numbers(*call.numbers), format.name, call.constants)
    _launch_cast(call.programs, key, call.tensors, call.numbers, call.constants, WARPS)
    codes, scale, codes_t = call.outputs
    return codes, scale, codes_t


def output_layout(rows: Any, columns: int, block: int) -> tuple[int, int]:
    """(columns of a block of `block` elements, programs) of a pass that writes high precision with its amax."""
    width = min(_OUTPUT_WIDTH, triton.next_power_of_2(columns))
    # Of a traced number of rows nothing is asked: each answer would be a graph of its own.
    if not isinstance(rows, int):
        return width, _MOST_PARTIALS
    tiles = -(-rows // (block // width)) * -(-columns // width)
    return width, min(_MOST_PARTIALS, triton.next_power_of_2(tiles))


def prepare_output(x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None) -> Prepared:
    """The launch of `activation_output_kernel` for a matrix whose rows are contiguous: output, amaxes."""
    rows, gated = x.shape[0], activation in GATED
    columns = x.shape[1] // 2 if gated else x.shape[1]
    width, partials = output_layout(rows, columns, _OUTPUT_BLOCK)
    output, amaxes = x.new_empty((rows, columns), dtype=dtype), x.new_empty(partials, dtype=torch.float32)
    constants = (base_of(activation), gated, channels is not None, INTERPRETED, _OUTPUT_BLOCK, width, partials)
    tensors = (x, output, amaxes, amaxes if channels is None else channels)
    return Prepared((output, amaxes), partials, tensors, (rows, columns, x.stride(0)), constants)


def activation_output_triton(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.activation_cast.activation_output`, for more than one column on a device of Triton's."""
    x, channels = with_contiguous_rows(x), None if channels is None else channels.contiguous()
    call = prepare_output(x, activation, dtype, channels)
    key = (key_of(x, channels), dtype, key_of_numbers(*call.numbers), call.constants)
    _launch_output(call.programs, key, call.tensors, call.numbers, call.constants, OUTPUT_WARPS)
    output, amaxes = call.outputs
    return output, amaxes
