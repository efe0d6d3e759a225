"""activation_channel_amax on a GPU: each program reads a stripe of columns of every PARTS-th block of rows.

Bytes moved an element of the result, bf16: 2 read (4 if gated). There are as many programs as fill the device some
times over, each with its own line of maxima, which torch joins: no atomics, and nothing that must begin at zero.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation_cast.triton_functions import activated
from octavo.kernels.activations import GATED, base_of
from octavo.kernels.amax.triton_kernel import finite_magnitude
from octavo.kernels.launcher import Launcher
from octavo.kernels.tile import (
    INTERPRETED,
    THROUGH_DTYPES,
    key_of,
    key_of_numbers,
    load_rows,
    rounded,
    with_contiguous_rows,
)

# (rows, columns) of a block; 16 elements a thread of 256, of which a gated kind holds twice as many numbers.
_BLOCK_ROWS = 32
_BLOCK_COLUMNS = 128
WARPS = 8
# Some four for each of an H200's 132 processors.
_PROGRAMS = 528


@triton.jit(do_not_specialize=("rows",))
def activation_channel_amax_kernel(
    x,
    amaxes,
    rows,
    columns,
    stride_row,
    BASE: tl.constexpr,
    IS_GATED: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A stripe of f(x), x [rows, columns] or [rows, 2 columns] -> one line of amaxes [PARTS, columns]."""
    # 1. Which columns, and which of the blocks of rows.
    tiles_wide = tl.cdiv(columns, BLOCK_COLUMNS)
    part = tl.program_id(0) // tiles_wide
    column = (tl.program_id(0) % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    largest = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    # 2. The function of each block; f(0) of padding is not 0 for every f, so that it is left out.
    for tile in range(part, tl.cdiv(rows, BLOCK_ROWS), PARTS):
        row = tl.arange(0, BLOCK_ROWS).to(tl.int64) + tile * BLOCK_ROWS
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        source = x + row[:, None] * stride_row + column[None, :]
        y = activated(load_rows(source, inside), BASE, INTERPRETED)
        if IS_GATED:
            y = y * load_rows(source + columns, inside)
        y = rounded(y, THROUGH, INTERPRETED)
        largest = tl.maximum(largest, tl.where(inside, finite_magnitude(y), 0.0))
    # 3. The largest of each column.
    tl.store(amaxes + part.to(tl.int64) * columns + column, tl.max(largest, axis=0), mask=column < columns)


_launch = Launcher(activation_channel_amax_kernel)


def activation_channel_amax_triton(x: Tensor, activation: str, through: torch.dtype | None = None) -> Tensor:
    """As `octavo.kernels.activation_channel_amax.activation_channel_amax`, for more than one column on a device of
    Triton's."""
    x = with_contiguous_rows(x)
    rows, gated = x.shape[0], activation in GATED
    columns = x.shape[1] // 2 if gated else x.shape[1]
    tiles_wide = -(-columns // _BLOCK_COLUMNS)
    # A power of two: each number of parts is a variant of its own.
    wanted = min(-(-rows // _BLOCK_ROWS), -(-_PROGRAMS // tiles_wide))
    parts = triton.next_power_of_2(wanted)
    amaxes = x.new_empty((parts, columns), dtype=torch.float32)
    numbers = (rows, columns, x.stride(0))
    constants = (
        base_of(activation), gated, THROUGH_DTYPES[through], INTERPRETED, _BLOCK_ROWS, _BLOCK_COLUMNS, parts,
    )  # fmt: skip
    key = (key_of(x), key_of_numbers(*numbers), constants)
    _launch(parts * tiles_wide, key, (x, amaxes), numbers, constants, WARPS)
    return amaxes.amax(0)
