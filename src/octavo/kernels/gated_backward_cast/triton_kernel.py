"""gated_backward_cast on a GPU: each program reads one block and writes the codes of both gradients in both layouts.

Bytes moved an element, bf16: 6 read and 4 written. All else is as in
`octavo.kernels.activation_backward_cast.triton_kernel`, whose gated kinds have gate and up in one matrix.

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
from octavo.kernels.amax.triton_kernel import finite_magnitude
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.gated_backward_cast.reference import Codes, Pair
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

# 32 elements a thread, of each of which it holds two results.
_BLOCK_ROWS, _BLOCK_COLUMNS, WARPS = 32, 64, 2
# Elements of a block of the pass that writes high precision.
_OUTPUT_BLOCK = 4096
OUTPUT_WARPS = 8
_UNALIGNED = ("scale_gate", "scale_up", "used_gate", "used_up", "gathered_gate", "gathered_up", "sums_gate", "sums_up")


@triton.jit
def _hand_out(
    values_0,
    values_1,
    scale,
    codes,
    codes_t,
    scale_used,
    gathered,
    sums,
    inside_0,
    inside_1,
    pair,
    column,
    rows,
    columns,
    program,
    tile_row,
    STORE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The amax, the sums and the codes of one gradient."""
    padded_columns = (columns + 15) // 16 * 16
    if GATHER:
        tl.atomic_max(gathered, largest_of(values_0, values_1), sem="relaxed")
    if COLUMN_SUM:
        total = tl.sum(values_0 + values_1, axis=0)
        tl.store(sums + tile_row.to(tl.int64) * columns + column, total, mask=column < columns)
    multiplier = scale_and_multiplier(scale, scale_used, program, STORE_SCALE)
    store_codes(
        codes, codes_t, values_0, values_1, multiplier, inside_0, inside_1, pair, column, padded_columns, rows,
        padded_columns, True, True, INF_TO_NAN, CODE, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=_UNALIGNED)
def gated_backward_cast_kernel(
    grad,
    gate,
    up,
    scale_gate,
    scale_up,
    codes_gate,
    codes_up,
    codes_t_gate,
    codes_t_up,
    used_gate,
    used_up,
    gathered_gate,
    gathered_up,
    sums_gate,
    sums_up,
    rows,
    columns,
    stride_grad,
    stride_gate,
    stride_up,
    BASE: tl.constexpr,
    THROUGH: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    GATHER_GATE: tl.constexpr,
    GATHER_UP: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    SUM_GATE: tl.constexpr,
    SUM_UP: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of grad, gate, up [rows, columns] -> of each gradient codes, codes_t, sums [blocks, columns]."""
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    tiles_wide = tl.cdiv((columns + 15) // 16 * 16, BLOCK_COLUMNS)
    program = tl.program_id(0)
    tile_row = program // tiles_wide
    pair = tile_row.to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = (program % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside_0 = (2 * pair < rows)[:, None] & (column < columns)[None, :]
    inside_1 = (2 * pair + 1 < rows)[:, None] & (column < columns)[None, :]
    # 2. The gradients, even rows and odd ones, each [PAIRS, BLOCK_COLUMNS]. Outside grad is 0, and so are they.
    of_grad = grad + 2 * pair[:, None] * stride_grad + column[None, :]
    of_gate = gate + 2 * pair[:, None] * stride_gate + column[None, :]
    of_up = up + 2 * pair[:, None] * stride_up + column[None, :]
    grad_0, grad_1 = load_rows(of_grad, inside_0), load_rows(of_grad + stride_grad, inside_1)
    gate_0, gate_1 = load_rows(of_gate, inside_0), load_rows(of_gate + stride_gate, inside_1)
    up_0, up_1 = load_rows(of_up, inside_0), load_rows(of_up + stride_up, inside_1)
    y_0, dgate_0 = activated_and_gradient(gate_0, grad_0 * up_0, BASE, INTERPRETED)
    y_1, dgate_1 = activated_and_gradient(gate_1, grad_1 * up_1, BASE, INTERPRETED)
    dup_0, dup_1 = rounded(grad_0 * y_0, THROUGH, INTERPRETED), rounded(grad_1 * y_1, THROUGH, INTERPRETED)
    # 3. Of each its amax, its sums, its codes in both layouts.
    _hand_out(
        dup_0, dup_1, scale_up, codes_up, codes_t_up, used_up, gathered_up, sums_up, inside_0, inside_1, pair, column,
        rows, columns, program, tile_row, STORE_SCALE, GATHER_UP, INF_TO_NAN, SUM_UP, CODE, INTERPRETED,
    )  # fmt: skip
    dgate_0, dgate_1 = rounded(dgate_0, THROUGH, INTERPRETED), rounded(dgate_1, THROUGH, INTERPRETED)
    _hand_out(
        dgate_0, dgate_1, scale_gate, codes_gate, codes_t_gate, used_gate, gathered_gate, sums_gate, inside_0,
        inside_1, pair, column, rows, columns, program, tile_row, STORE_SCALE, GATHER_GATE, INF_TO_NAN, SUM_GATE,
        CODE, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=("rows",))
def gated_backward_output_kernel(
    grad,
    gate,
    up,
    dgate,
    dup,
    amaxes_gate,
    amaxes_up,
    rows,
    columns,
    stride_grad,
    stride_gate,
    stride_up,
    BASE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTIALS: tl.constexpr,
):
    """Every PARTIALS-th block of the gradients -> dgate, dup [rows, columns]; the largest finite magnitude of each."""
    HEIGHT: tl.constexpr = BLOCK // WIDTH
    tiles_wide = tl.cdiv(columns, WIDTH)
    largest_gate = tl.zeros([HEIGHT, WIDTH], tl.float32)
    largest_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, HEIGHT) * tiles_wide, PARTIALS):
        row = (tile // tiles_wide).to(tl.int64) * HEIGHT + tl.arange(0, HEIGHT)
        column = (tile % tiles_wide).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        gradient = load_rows(grad + row[:, None] * stride_grad + column[None, :], inside)
        of_gate = load_rows(gate + row[:, None] * stride_gate + column[None, :], inside)
        of_up = load_rows(up + row[:, None] * stride_up + column[None, :], inside)
        y, gradient_gate = activated_and_gradient(of_gate, gradient * of_up, BASE, INTERPRETED)
        target = row[:, None] * columns + column[None, :]
        result_gate = gradient_gate.to(dgate.dtype.element_ty)
        result_up = (gradient * y).to(dup.dtype.element_ty)
        tl.store(dgate + target, result_gate, mask=inside)
        tl.store(dup + target, result_up, mask=inside)
        largest_gate = tl.maximum(largest_gate, finite_magnitude(result_gate))
        largest_up = tl.maximum(largest_up, finite_magnitude(result_up))
    tl.store(amaxes_gate + tl.program_id(0), tl.max(tl.max(largest_gate, axis=1), axis=0))
    tl.store(amaxes_up + tl.program_id(0), tl.max(tl.max(largest_up, axis=1), axis=0))


_launch_cast = Launcher(gated_backward_cast_kernel)
_launch_output = Launcher(gated_backward_output_kernel)


def prepare_backward(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scales: Pair,
    through: torch.dtype | None,
    gathered: tuple[Tensor | None, Tensor | None],
    inf_to_nan: bool,
    column_sums: tuple[bool, bool],
    used: Pair | None,
) -> Prepared:
    """The launch of `gated_backward_cast_kernel` for matrices whose rows are contiguous.

    Its outputs, of each gradient: codes, scale, codes_t, parts of the sums.
    used: what the scales are written to; None gives out the given ones.
    """
    rows, columns = gate.shape
    padded_rows, padded_columns = padded(rows), padded(columns)
    tiles_tall = -(-padded_rows // _BLOCK_ROWS)

    def made(scale: Tensor, sums: bool) -> Codes:
        return (
            gate.new_empty((padded_rows, padded_columns), dtype=format.dtype),
            scale,
            gate.new_empty((padded_columns, padded_rows), dtype=format.dtype),
            gate.new_empty((tiles_tall, columns), dtype=torch.float32) if sums else None,
        )

    given_out = tuple(scale.reshape(()) for scale in scales) if used is None else used
    of_gate, of_up = made(given_out[0], column_sums[0]), made(given_out[1], column_sums[1])
    tensors = (
        grad, gate, up, *scales, of_gate[0], of_up[0], of_gate[2], of_up[2], *given_out,
        # A pointer that the flags leave unused may be any.
        *(of_gate[0] if given is None else given for given in (*gathered, of_gate[3], of_up[3])),
    )  # fmt: skip
    constants = (
        activation, THROUGH_DTYPES[through], used is not None, gathered[0] is not None, gathered[1] is not None,
        inf_to_nan, *column_sums, CODE_DTYPES[format.name], INTERPRETED, _BLOCK_ROWS, _BLOCK_COLUMNS,
    )  # fmt: skip
    programs = tiles_tall * -(-padded_columns // _BLOCK_COLUMNS)
    numbers = (rows, columns, grad.stride(0), gate.stride(0), up.stride(0))
    return Prepared((of_gate, of_up), programs, tensors, numbers, constants)


def gated_backward_cast_triton(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: Format,
    scales: Pair,
    through: torch.dtype | None = None,
    gathered: tuple[Tensor | None, Tensor | None] = (None, None),
    inf_to_nan: bool = True,
    column_sums: tuple[bool, bool] = (False, False),
    own_scale: bool = False,
) -> tuple[Codes, Codes]:
    """As `octavo.kernels.gated_backward_cast.gated_backward_cast`: E4M3 or E5M2, more than one column, a device of
    Triton's. own_scale: the scales that come out are tensors of their own."""
    grad, gate, up = with_contiguous_rows(grad), with_contiguous_rows(gate), with_contiguous_rows(up)
    own_scale = own_scale or (gate.is_cuda and torch.cuda.is_current_stream_capturing())
    used = None
    if own_scale:
        used = (gate.new_empty((), dtype=torch.float32), gate.new_empty((), dtype=torch.float32))
    call = prepare_backward(
        grad, gate, up, activation, format, scales, through, gathered, inf_to_nan, column_sums, used
    )
    key = (key_of(grad, gate, up), key_of_numbers(*call.numbers), format.name, call.constants)
    _launch_cast(call.programs, key, call.tensors, call.numbers, call.constants, WARPS)
    (codes, scale, codes_t, parts), (codes_2, scale_2, codes_t_2, parts_2) = call.outputs
    return (
        (codes, scale, codes_t, None if parts is None else parts.sum(0)),
        (codes_2, scale_2, codes_t_2, None if parts_2 is None else parts_2.sum(0)),
    )


def prepare_backward_output(grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> Prepared:
    """The launch of `gated_backward_output_kernel` for matrices whose rows are contiguous: dgate, dup, their amaxes."""
    rows, columns = gate.shape
    width, partials = output_layout(rows, columns, _OUTPUT_BLOCK)
    outputs = (
        gate.new_empty((rows, columns), dtype=dtype),
        gate.new_empty((rows, columns), dtype=dtype),
        gate.new_empty(partials, dtype=torch.float32),
        gate.new_empty(partials, dtype=torch.float32),
    )
    numbers = (rows, columns, grad.stride(0), gate.stride(0), up.stride(0))
    constants = (activation, INTERPRETED, _OUTPUT_BLOCK, width, partials)
    return Prepared(outputs, partials, (grad, gate, up, *outputs), numbers, constants)


def gated_backward_output_triton(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Pair, Pair]:
    """As `octavo.kernels.gated_backward_cast.gated_backward_output`: more than one column, a device of Triton's."""
    grad, gate, up = with_contiguous_rows(grad), with_contiguous_rows(gate), with_contiguous_rows(up)
    call = prepare_backward_output(grad, gate, up, activation, dtype)
    key = (key_of(grad, gate, up), dtype, key_of_numbers(*call.numbers), call.constants)
    _launch_output(call.programs, key, call.tensors, call.numbers, call.constants, OUTPUT_WARPS)
    dgate, dup, amaxes, amaxes_2 = call.outputs
    return (dgate, amaxes), (dup, amaxes_2)
