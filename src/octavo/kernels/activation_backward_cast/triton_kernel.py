"""activation_backward_cast on a GPU: each program reads one block and writes the codes of its gradient in both layouts.

Bytes moved an element of the activation's result, bf16: 4 read and 2 written (grad, x; two codes); if gated 6 read and
4 written. A backward and then a cast move 4 + 2 + 2 + 2, if gated 6 + 4 + 4 + 4. The columns of codes_t are written 64
bytes at a time, or 32 if gated, one sector.

Column sums are partial, one a block of rows, and torch adds them: the same order in every run.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activation_cast.triton_functions import activated_and_gradient
from octavo.kernels.activation_cast.triton_kernel import Prepared, output_layout
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

# (rows, columns, warps) of a block: 32 elements a thread, of which a gated kind holds twice as many numbers.
_BLOCK = (64, 64, 4)
_GATED_BLOCK = (32, 64, 2)
# Elements of a block of the pass that writes high precision.
_OUTPUT_BLOCK = 4096
OUTPUT_WARPS = 8


@triton.jit
def _store_sums(sums, values_0, values_1, tile_row, column, end, width):
    total = tl.sum(values_0 + values_1, axis=0)
    tl.store(sums + tile_row.to(tl.int64) * width + column, total, mask=column < end)


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("scale", "scale_used", "gathered", "sums"))
def activation_backward_cast_kernel(
    grad,
    x,
    scale,
    codes,
    codes_t,
    scale_used,
    gathered,
    sums,
    rows,
    columns,
    stride_grad,
    stride_x,
    BASE: tl.constexpr,
    IS_GATED: tl.constexpr,
    THROUGH: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of grad [rows, columns] and x [rows, width], width = columns or 2 columns if gated.

    -> codes [padded rows, padded width], codes_t its transpose, sums [blocks of rows, width].
    """
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31. If gated, it is two of the result.
    width = columns * 2 if IS_GATED else columns
    padded_width = (width + 15) // 16 * 16
    # What pads the width lies behind the last column of the result, which if gated is that of the second half.
    tiles_wide = tl.cdiv(padded_width - columns if IS_GATED else padded_width, BLOCK_COLUMNS)
    program = tl.program_id(0)
    tile_row = program // tiles_wide
    pair = tile_row.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = (program % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside_0 = (2 * pair < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (2 * pair + 1 < rows)[:, None] & (column < columns)[None, :]
    # 2. The gradient of its values, even rows and odd ones, each [PAIRS, BLOCK_COLUMNS]. f'(0) * 0 is 0: so is padding.
    source = grad + 2 * pair[:, None] * stride_grad + column[None, :]
    grad_0, grad_1 = load_rows(source, inside_0), load_rows(source + stride_grad, inside_1)
    source_x = x + 2 * pair[:, None] * stride_x + column[None, :]
    x_0, x_1 = load_rows(source_x, inside_0), load_rows(source_x + stride_x, inside_1)
    multiplier = scale_and_multiplier(scale, scale_used, program, STORE_SCALE)
    end = columns if IS_GATED else padded_width
    largest = 0.0
    if IS_GATED:
        gate_0 = load_rows(source_x + columns, inside_0)
        gate_1 = load_rows(source_x + columns + stride_x, inside_1)
        y_0, dx_0 = activated_and_gradient(x_0, grad_0 * gate_0, BASE, INTERPRETED)
        y_1, dx_1 = activated_and_gradient(x_1, grad_1 * gate_1, BASE, INTERPRETED)
        dgate_0, dgate_1 = rounded(grad_0 * y_0, THROUGH, INTERPRETED), rounded(grad_1 * y_1, THROUGH, INTERPRETED)
        store_codes(
            codes, codes_t, dgate_0, dgate_1, multiplier, inside_0, inside_1, pair, columns + column, padded_width,
            rows, padded_width, True, True, INF_TO_NAN, CODE, INTERPRETED,
        )  # fmt: skip
        if COLUMN_SUM:
            _store_sums(sums, dgate_0, dgate_1, tile_row, columns + column, width, width)
        if GATHER:
            largest = tl.maximum(largest, largest_of(dgate_0, dgate_1))
    else:
        _, dx_0 = activated_and_gradient(x_0, grad_0, BASE, INTERPRETED)
        _, dx_1 = activated_and_gradient(x_1, grad_1, BASE, INTERPRETED)
    dx_0, dx_1 = rounded(dx_0, THROUGH, INTERPRETED), rounded(dx_1, THROUGH, INTERPRETED)
    # 3. Its amax, its sums, its codes in both layouts.
    if GATHER:
        tl.atomic_max(gathered, tl.maximum(largest, largest_of(dx_0, dx_1)), sem="relaxed")
    if COLUMN_SUM:
        _store_sums(sums, dx_0, dx_1, tile_row, column, columns, width)
    store_codes(
        codes, codes_t, dx_0, dx_1, multiplier, inside_0, inside_1, pair, column, end,
        rows, padded_width, True, True, INF_TO_NAN, CODE, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def activation_backward_output_kernel(
    grad,
    x,
    output,
    amaxes,
    rows,
    columns,
    stride_grad,
    stride_x,
    BASE: tl.constexpr,
    IS_GATED: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Every PARTIALS-th block of the gradient -> output [rows, width], its largest finite magnitude -> amaxes."""
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    width = columns * 2 if IS_GATED else columns
    tiles_wide = tl.cdiv(columns, WIDTH)
    largest = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT) * tiles_wide, PARTIALS):
        row = (tile // tiles_wide).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_wide).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gradient = load_rows(grad + row[:, None] * stride_grad + column[None, :], inside)
        source = x + row[:, None] * stride_x + column[None, :]
        target = output + row[:, None] * width + column[None, :]
        values = load_rows(source, inside)
        if IS_GATED:
            gate = load_rows(source + columns, inside)
            y, dx = activated_and_gradient(values, gradient * gate, BASE, INTERPRETED)
            dgate = (gradient * y).to(output.dtype.element_ty)
            tl.store(target + columns, dgate, mask=inside)
            largest = tl.maximum(largest, finite_magnitude(dgate))
        else:
            _, dx = activated_and_gradient(values, gradient, BASE, INTERPRETED)
        result = dx.to(output.dtype.element_ty)
        tl.store(target, result, mask=inside)
        largest = tl.maximum(largest, finite_magnitude(result))
    tl.store(amaxes + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


_launch_cast = Launcher(activation_backward_cast_kernel)
_launch_output = Launcher(activation_backward_output_kernel)


def prepare_backward(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
    used: Tensor | None,
) -> Prepared:
    """The launch of `activation_backward_cast_kernel` for matrices whose rows are contiguous.

    Its outputs: codes, scale, codes_t, parts of the sums. used: what the scale is written to; None gives out the given
    one.
    """
    (rows, columns), width = grad.shape, x.shape[1]
    padded_rows, padded_width = padded(rows), padded(width)
    codes = x.new_empty((padded_rows, padded_width), dtype=format.dtype)
    codes_t = x.new_empty((padded_width, padded_rows), dtype=format.dtype)
    given_out = scale.reshape(()) if used is None else used
    gated = activation in GATED
    block_rows, block_columns, _ = _GATED_BLOCK if gated else _BLOCK
    tiles_tall = -(-padded_rows // block_rows)
    sums = x.new_empty((tiles_tall, width), dtype=torch.float32) if column_sum else None
    # A pointer that the flags leave unused may be any.
    unused = (codes if given is None else given for given in (gathered, sums))
    tensors = (grad, x, scale, codes, codes_t, given_out, *unused)
    constants = (
        base_of(activation), gated, THROUGH_DTYPES[through], used is not None, gathered is not None, inf_to_nan,
        column_sum, CODE_DTYPES[format.name], INTERPRETED, block_rows, block_columns,
    )  # fmt: skip
    programs = tiles_tall * -(-(padded_width - columns if gated else padded_width) // block_columns)
    numbers = (rows, columns, grad.stride(0), x.stride(0))
    return Prepared((codes, given_out, codes_t, sums), programs, tensors, numbers, constants)


def warps_of(activation: str) -> int:
    """Per program of `activation_backward_cast_kernel`."""
    return (_GATED_BLOCK if activation in GATED else _BLOCK)[2]


def activation_backward_cast_triton(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: Format,
    scale: Tensor,
    through: torch.dtype | None = None,
    gathered: Tensor | None = None,
    inf_to_nan: bool = True,
    column_sum: bool = False,
    own_scale: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """As `octavo.kernels.activation_backward_cast.activation_backward_cast`: E4M3 or E5M2, more than one column, a
    device of Triton's. own_scale: the scale that comes out is a tensor of its own."""
    grad, x = with_contiguous_rows(grad), with_contiguous_rows(x)
    own_scale = own_scale or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    used = x.new_empty((), dtype=torch.float32) if own_scale else None
    call = prepare_backward(grad, x, activation, format, scale, through, gathered, inf_to_nan, column_sum, used)
    key = (key_of(grad, x), key_of_numbers(*call.numbers), format.name, call.constants)
    _launch_cast(call.programs, key, call.tensors, call.numbers, call.constants, warps_of(activation))
    codes, scale, codes_t, sums = call.outputs
    return codes, scale, codes_t, None if sums is None else sums.sum(0)


def prepare_backward_output(grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype) -> Prepared:
    """The launch of `activation_backward_output_kernel` for matrices whose rows are contiguous: output, amaxes."""
    rows, columns = grad.shape
    width, partials = output_layout(rows, columns, _OUTPUT_BLOCK)
    output, amaxes = x.new_empty(x.shape, dtype=dtype), x.new_empty(partials, dtype=torch.float32)
    numbers = (rows, columns, grad.stride(0), x.stride(0))
    constants = (base_of(activation), activation in GATED, INTERPRETED, _OUTPUT_BLOCK, width, partials)
    return Prepared((output, amaxes), partials, (grad, x, output, amaxes), numbers, constants)


def activation_backward_output_triton(
    grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.activation_backward_cast.activation_backward_output`, for more than one column on a device of
    Triton's."""
    grad, x = with_contiguous_rows(grad), with_contiguous_rows(x)
    call = prepare_backward_output(grad, x, activation, dtype)
    key = (key_of(grad, x), dtype, key_of_numbers(*call.numbers), call.constants)
    _launch_output(call.programs, key, call.tensors, call.numbers, call.constants, OUTPUT_WARPS)
    output, amaxes = call.outputs
    return output, amaxes
