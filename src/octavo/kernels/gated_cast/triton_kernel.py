"""gated_cast on a GPU: each program reads one block of gate and of up and writes the codes of f(gate) * up.

Bytes moved an element, bf16: 4 read and 2 written. All else is as in `octavo.kernels.activation_cast.triton_kernel`,
whose gated kinds have the two in one matrix.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activation_cast.triton_functions import activated
from octavo.kernels.activation_cast.triton_kernel import Prepared, output_layout
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
# Elements of a block of the pass that writes high precision.
_OUTPUT_BLOCK = 8192
OUTPUT_WARPS = 8


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("scale", "scale_used", "gathered"))
def gated_cast_kernel(
    gate,
    up,
    scale,
    codes,
    codes_t,
    scale_used,
    gathered,
    rows,
    columns,
    stride_gate,
    stride_up,
    BASE: tl.constexpr,
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
    """One block of f(gate) * up, both [rows, columns] -> codes [padded rows, padded columns], codes_t."""
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    padded_columns = (columns + 15) // 16 * 16
    tiles_wide = tl.cdiv(padded_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    pair = (program // tiles_wide).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = (program % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside_0 = (2 * pair < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (2 * pair + 1 < rows)[:, None] & (column < columns)[None, :]
    # 2. The product of its values, even rows and odd ones, each [PAIRS, BLOCK_COLUMNS].
    of_gate = gate + 2 * pair[:, None] * stride_gate + column[None, :]
    of_up = up + 2 * pair[:, None] * stride_up + column[None, :]
    y_0 = activated(load_rows(of_gate, inside_0), BASE, INTERPRETED) * load_rows(of_up, inside_0)
    y_1 = activated(load_rows(of_gate + stride_gate, inside_1), BASE, INTERPRETED) * load_rows(
        of_up + stride_up, inside_1
    )
    y_0, y_1 = rounded(y_0, THROUGH, INTERPRETED), rounded(y_1, THROUGH, INTERPRETED)
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
def gated_output_kernel(
    gate,
    up,
    output,
    amaxes,
    rows,
    columns,
    stride_gate,
    stride_up,
    BASE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Every PARTIALS-th block of f(gate) * up -> output [rows, columns], its largest finite magnitude -> amaxes.

    A block is BLOCK // WIDTH rows of WIDTH columns; amaxes [PARTIALS].
    """
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    tiles_wide = tl.cdiv(columns, WIDTH)
    largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT) * tiles_wide, PARTIALS):
        row = (tile // tiles_wide).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_wide).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        of_gate = load_rows(gate + row[:, None] * stride_gate + column[None, :], inside)
        of_up = load_rows(up + row[:, None] * stride_up + column[None, :], inside)
        result = (activated(of_gate, BASE, INTERPRETED) * of_up).to(output.dtype.element_ty)
        tl.store(output + row[:, None] * columns + column[None, :], result, mask=inside)
        largest = tl.maximum(largest, tl.where(inside, finite_magnitude(result), 0.0))
    tl.store(amaxes + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


_launch_cast = Launcher(gated_cast_kernel)
_launch_output = Launcher(gated_output_kernel)


def prepare_cast(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    used: Tensor | None,
) -> Prepared:
    """The launch of `gated_cast_kernel` for matrices whose rows are contiguous: codes, scale, codes_t.

    used: what the scale is written to; None gives out the given one.
    """
    rows, columns = gate.shape
    padded_rows, padded_columns = padded(rows), padded(columns)
    codes = gate.new_empty((padded_rows, padded_columns), dtype=format.dtype) if rowwise else None
    codes_t = gate.new_empty((padded_columns, padded_rows), dtype=format.dtype) if columnwise else None
    given_out = scale.reshape(()) if used is None else used
    # A pointer that the flags leave unused may be any.
    unused = codes if codes is not None else codes_t if codes_t is not None else given_out
    tensors = (
        gate,
        up,
        scale,
        unused if codes is None else codes,
        unused if codes_t is None else codes_t,
        given_out,
        unused if gathered is None else gathered,
    )
    constants = (
        activation, THROUGH_DTYPES[through], rowwise, columnwise, used is not None, gathered is not None,
        CODE_DTYPES[format.name], INTERPRETED, _BLOCK_ROWS, _BLOCK_COLUMNS,
    )  # fmt: skip
    programs = -(-padded_rows // _BLOCK_ROWS) * -(-padded_columns // _BLOCK_COLUMNS)
    numbers = (rows, columns, gate.stride(0), up.stride(0))
    return Prepared((codes, given_out, codes_t), programs, tensors, numbers, constants)


def gated_cast_triton(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    own_scale: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """As `octavo.kernels.gated_cast.gated_cast`: E4M3 or E5M2, more than one column, a device of Triton's.

    own_scale: the scale that comes out is a tensor of its own.
    """
    gate, up = with_contiguous_rows(gate), with_contiguous_rows(up)
    own_scale = own_scale or (gate.is_cuda and torch.cuda.is_current_stream_capturing())
    used = gate.new_empty((), dtype=torch.float32) if own_scale else None
    call = prepare_cast(gate, up, activation, format, scale, through, gathered, rowwise, columnwise, used)
    key = (key_of(gate, up), key_of_numbers(*call.numbers), format.name, call.constants)
    _launch_cast(call.programs, key, call.tensors, call.numbers, call.constants, WARPS)
    codes, scale, codes_t = call.outputs
    return codes, scale, codes_t


def prepare_output(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> Prepared:
    """The launch of `gated_output_kernel` for matrices whose rows are contiguous: output, amaxes."""
    rows, columns = gate.shape
    width, partials = output_layout(rows, columns, _OUTPUT_BLOCK)
    output, amaxes = gate.new_empty((rows, columns), dtype=dtype), gate.new_empty(partials, dtype=torch.float32)
    numbers = (rows, columns, gate.stride(0), up.stride(0))
    constants = (activation, INTERPRETED, _OUTPUT_BLOCK, width, partials)
    return Prepared((output, amaxes), partials, (gate, up, output, amaxes), numbers, constants)


def gated_output_triton(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.gated_cast.gated_output`, for more than one column on a device of Triton's."""
    gate, up = with_contiguous_rows(gate), with_contiguous_rows(up)
    call = prepare_output(gate, up, activation, dtype)
    key = (key_of(gate, up), dtype, key_of_numbers(*call.numbers), call.constants)
    _launch_output(call.programs, key, call.tensors, call.numbers, call.constants, OUTPUT_WARPS)
    output, amaxes = call.outputs
    return output, amaxes
