"""norm_backward on a GPU: each program takes whole rows in turn, and sums its columns in registers as it goes.

Bytes moved an element of bf16: 4 read and 2 written, and 8 written and read for each program and column, of which there
are two programs for each multiprocessor at most. The sums of the programs are added by a launch more, in a fixed order.

No product is fused with a sum, so that dx is the reference's to the bit, given the means over the rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.launcher import Launcher, WithOptions
from octavo.kernels.norm_backward.reference import Gradients
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.triton_functions import parameter
from octavo.kernels.tile import (
    INTERPRETED,
    THROUGH_DTYPES,
    key_of,
    key_of_numbers,
    load_rows,
    rounded,
    with_contiguous_rows,
)
from octavo.kernels.triton_support import multiprocessors

# Elements of a tile, 16 a thread; wider rows are a tile each.
_TILE = 4096
_A_THREAD = 16


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("mean", "rstd"))
def norm_backward_kernel(
    dy,
    x,
    weight,
    mean,
    rstd,
    dx,
    dweight,
    dbias,
    rows,
    columns,
    stride_dy,
    stride_x,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ADDED: tl.constexpr,
    HAS_DX: tl.constexpr,
    HAS_DWEIGHT: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Groups of BLOCK_ROWS rows [rows, columns], which the programs take in turn; EVEN: columns of a whole block.

    -> dx [rows, columns]; dweight and dbias [programs, columns], what each program has summed.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK_COLUMNS)
    within = (column < columns)[None, :]
    gamma = parameter(weight, column, columns, HAS_WEIGHT, ADDED, EVEN)
    count = tl.full([BLOCK_ROWS], 1.0, tl.float32) * columns.to(tl.float32)
    sums_weight = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    sums_bias = sums_weight
    for group in range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        # 1. Which rows; 64 bits, since an offset can exceed 2^31.
        row = tl.cast(group, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        in_rows = row < rows
        inside = in_rows[:, None] if EVEN else in_rows[:, None] & within
        grad = load_rows(dy + row[:, None] * stride_dy + column[None, :], inside)
        values = load_rows(x + row[:, None] * stride_x + column[None, :], inside)
        # 2. What was scaled and shifted; 0 outside, even if the mean is not a number.
        scale = tl.load(rstd + row, mask=in_rows, other=0.0)[:, None]
        if CENTRED:
            values = values - tl.load(mean + row, mask=in_rows, other=0.0)[:, None]
        xhat = values * scale
        if not EVEN:
            xhat = tl.where(within, xhat, 0.0)
        # 3. Gradients of the parameters.
        if HAS_DWEIGHT:
            sums_weight += grad * xhat
        if HAS_DBIAS:
            sums_bias += grad
        # 4. That of x.
        if HAS_DX:
            if HAS_WEIGHT:
                grad = grad * gamma
            along = tl.div_rn(tl.sum(grad * xhat, axis=1), count)
            across = grad - xhat * along[:, None]
            if CENTRED:
                across = across - tl.div_rn(tl.sum(grad, axis=1), count)[:, None]
            result = rounded(across * scale, THROUGH, INTERPRETED)
            tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
    target = program * columns + column
    if HAS_DWEIGHT:
        tl.store(dweight + target, tl.sum(sums_weight, axis=0), mask=column < columns)
    if HAS_DBIAS:
        tl.store(dbias + target, tl.sum(sums_bias, axis=0), mask=column < columns)


# Products and sums stay apart; 512 threads fit on a multiprocessor.
OPTIONS = {"enable_fp_fusion": False, "maxnreg": 128}
_launch_kernel = Launcher(WithOptions(norm_backward_kernel, **OPTIONS))


def _most_programs(x: Tensor, tile: int) -> int:
    """As many as run at once."""
    return multiprocessors(x) * max(1, 2 * _TILE // tile)


def norm_backward_triton(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """As `octavo.kernels.norm_backward.norm_backward`: more than one column, 8192 at most, a device of Triton's."""
    dy, x = with_contiguous_rows(dy), with_contiguous_rows(x)
    weight = None if weight is None else weight.contiguous()
    rows, columns = x.shape
    block_columns = max(16, triton.next_power_of_2(columns))
    block_rows = max(1, _TILE // block_columns)
    tile = block_rows * block_columns
    programs = min(-(-rows // block_rows), _most_programs(x, tile))
    dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs[0] else None
    dweight, dbias = (x.new_empty((programs, columns), dtype=torch.float32) if needed else None for needed in needs[1:])
    # A pointer that the flags leave unused may be any.
    tensors = tuple(rstd if t is None else t for t in (dy, x, weight, mean, rstd, dx, dweight, dbias))
    numbers = (rows, columns, dy.stride(0), x.stride(0))
    constants = (
        norm.kind == "layer", weight is not None, float(norm.zero_centered), *needs, THROUGH_DTYPES[x.dtype],
        INTERPRETED, columns == block_columns, block_rows, block_columns,
    )  # fmt: skip
    # Whatever stands in an unused place has rstd's alignment, which is not asked for where it belongs.
    key = (key_of(dy, x, weight, rstd), key_of_numbers(*numbers), constants)
    _launch_kernel(programs, key, tensors, numbers, constants, tile // (32 * _A_THREAD))
    # Each in memory of its own: an operator's results must not share any, nor lie off the compiler's alignment.
    return dx, None if dweight is None else dweight.sum(0), None if dbias is None else dbias.sum(0)
