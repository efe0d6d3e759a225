"""norm_cast on a GPU: each program takes whole rows, sweeps over them once for the statistics and again to cast.

Bytes moved an element of bf16: 2 read and 2 written, if the second sweep finds in the L1 or L2 cache what the first has
read. It goes backward, so that it begins with what was read last, and of long rows no more are in flight at once than
the L2 cache holds. A normalisation and then a cast move 2 + 2 + 2 + 2; one launch for the statistics and one for the
rest would read everything twice from memory.

A block is 32 rows tall, or 16 where rows are long or few: columns of codes_t are written 32 or 16 bytes at a time, and
neighbouring programs, which run together, fill the rest of a line while it is in the L2 cache.

No product is fused with a sum, so that codes are the reference's to the bit, given the statistics.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, Format
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.launcher import Launcher, WithOptions
from octavo.kernels.layout import padded
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import Result, output_dtype
from octavo.kernels.norm_cast.triton_functions import largest_finite_of_rows, normalised, parameter, statistics
from octavo.kernels.tile import (
    INTERPRETED,
    THROUGH_DTYPES,
    key_of,
    key_of_numbers,
    scale_and_multiplier,
    store_codes,
    with_contiguous_rows,
)
from octavo.kernels.triton_support import multiprocessors


class Block(NamedTuple):
    """Extents of a block, warps of a program, and at most so many programs for each multiprocessor (0: no limit)."""

    rows: int
    columns: int
    warps: int
    programs: int


# By the length of rows in bytes, up to and including.
_CAST_BLOCKS = {5120: Block(32, 256, 8, 0), 16384: Block(32, 512, 16, 1), 1 << 62: Block(16, 1024, 16, 1)}
# Where there are fewer rows than that for each multiprocessor.
_FEW_ROWS = 32
_CAST_FEW = Block(16, 512, 8, 0)
# With the number of programs that take turns, and of the amaxes that they leave, at most.
_OUTPUT_BLOCKS = {5120: (Block(8, 256, 4, 0), 1024), 1 << 62: (Block(8, 1024, 16, 0), 256)}


@triton.jit(
    do_not_specialize=("rows",),
    do_not_specialize_on_alignment=("scale", "mean", "rstd", "scale_used", "amaxes"),
)
def norm_cast_kernel(
    x,
    weight,
    bias,
    scale,
    codes,
    codes_t,
    output,
    mean,
    rstd,
    scale_used,
    amaxes,
    rows,
    columns,
    stride_row,
    CENTRED: tl.constexpr,
    EPSILON: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    THROUGH: tl.constexpr,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    HAS_OUTPUT: tl.constexpr,
    STORE_SCALE: tl.constexpr,
    GATHER: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Groups of BLOCK_ROWS rows of x [rows, columns], which the programs take in turn; EVEN: columns of whole blocks.

    -> codes [padded rows, padded columns] and codes_t, its transpose, or else amaxes in parts [programs] (with codes,
    amaxes [] by max); output [rows, columns], mean [rows], rstd [rows].
    """
    PAIRS: tl.constexpr = BLOCK_ROWS // 2
    padded_columns = (columns + 15) // 16 * 16
    tiles = tl.cdiv(padded_columns, BLOCK_COLUMNS)
    program = tl.program_id(0)
    multiplier = 1.0
    if HAS_CODES:
        multiplier = scale_and_multiplier(scale, scale_used, program, STORE_SCALE)
    largest = tl.max(tl.zeros([16], tl.float32), axis=0)
    for group in range(program, tl.cdiv(rows, BLOCK_ROWS), tl.num_programs(0)):
        # 1. Which rows, even and odd ones; 64 bits, since an offset can exceed 2^31.
        pair = tl.cast(group, tl.int64) * PAIRS + tl.arange(0, PAIRS)
        row_0, row_1 = 2 * pair, 2 * pair + 1
        in_0, in_1 = (row_0 < rows)[:, None], (row_1 < rows)[:, None]
        source = x + row_0[:, None] * stride_row
        # 2. Their statistics.
        mean_0, rstd_0, mean_1, rstd_1 = statistics(
            source, stride_row, in_0, in_1, columns, CENTRED, EPSILON, EVEN, PAIRS, BLOCK_COLUMNS
        )
        if CENTRED:
            tl.store(mean + row_0, mean_0, mask=row_0 < rows)
            tl.store(mean + row_1, mean_1, mask=row_1 < rows)
        tl.store(rstd + row_0, rstd_0, mask=row_0 < rows)
        tl.store(rstd + row_1, rstd_1, mask=row_1 < rows)
        # 3. Block by block, the last one first.
        peak = tl.zeros([PAIRS, BLOCK_COLUMNS], tl.float32)
        for index in range(tiles):
            column = tl.cast(tiles - 1 - index, tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
            within = (column < columns)[None, :]
            inside_0, inside_1 = in_0 if EVEN else in_0 & within, in_1 if EVEN else in_1 & within
            gamma = parameter(weight, column, columns, HAS_WEIGHT, ADDED, EVEN)
            beta = parameter(bias, column, columns, HAS_BIAS, 0.0, EVEN)
            y_0 = normalised(
                source + column[None, :], inside_0, mean_0, rstd_0, gamma, beta, CENTRED, HAS_WEIGHT, HAS_BIAS,
                THROUGH, INTERPRETED,
            )  # fmt: skip
            y_1 = normalised(
                source + stride_row + column[None, :], inside_1, mean_1, rstd_1, gamma, beta, CENTRED, HAS_WEIGHT,
                HAS_BIAS, THROUGH, INTERPRETED,
            )  # fmt: skip
            if HAS_OUTPUT:
                target = output + row_0[:, None] * columns + column[None, :]
                tl.store(target, y_0.to(output.dtype.element_ty), mask=inside_0)
                tl.store(target + columns, y_1.to(output.dtype.element_ty), mask=inside_1)
            if GATHER:
                magnitude_0, magnitude_1 = tl.where(inside_0, tl.abs(y_0), 0.0), tl.where(inside_1, tl.abs(y_1), 0.0)
                peak = tl.maximum(peak, tl.maximum(magnitude_0, magnitude_1))
            if HAS_CODES:
                store_codes(
                    codes, codes_t, y_0, y_1, multiplier, inside_0, inside_1, pair, column, padded_columns, rows,
                    padded_columns, True, HAS_CODES_T, False, CODE, INTERPRETED,
                )  # fmt: skip
        # 4. The largest finite magnitude: that of the first look, but for an infinite weight or result.
        if GATHER:
            found = tl.max(tl.max(peak, axis=1), axis=0)
            if not (found < float("inf")):
                found = largest_finite_of_rows(
                    source, stride_row, in_0, in_1, mean_0, rstd_0, mean_1, rstd_1, weight, bias, columns,
                    CENTRED, HAS_WEIGHT, HAS_BIAS, ADDED, THROUGH, INTERPRETED, PAIRS, BLOCK_COLUMNS,
                )  # fmt: skip
            largest = tl.maximum(largest, found)
    if GATHER:
        if HAS_CODES:
            tl.atomic_max(amaxes, largest, sem="relaxed")
        else:
            tl.store(amaxes + program, largest)


# Products and sums stay apart; two programs of 8 warps fit on a multiprocessor.
OPTIONS = {"enable_fp_fusion": False, "maxnreg": 128}
_launch_kernel = Launcher(WithOptions(norm_cast_kernel, **OPTIONS))


# codes, codes_t, output, mean, rstd, scale_used, amaxes: what a launch writes, None for what is not wanted.
Written = tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor, Tensor | None, Tensor | None
]  # fmt: skip


def _cast_block(x: Tensor) -> tuple[Block, int]:
    """The block for a matrix, and how many programs take turns with them."""
    rows, columns = x.shape
    block = next(block for bytes, block in _CAST_BLOCKS.items() if columns * x.element_size() <= bytes)
    if rows < _FEW_ROWS * multiprocessors(x) and block.rows > _CAST_FEW.rows:
        block = _CAST_FEW
    groups = -(-rows // block.rows)
    return block, min(groups, block.programs * multiprocessors(x)) if block.programs else groups


def _launch(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    written: Written,
    scale: Tensor | None,
    format: Format,
    block: Block,
    programs: int,
) -> None:
    """One launch."""
    codes, codes_t, output, _, rstd, used, amaxes = written
    weight, bias = (None if given is None else given.contiguous() for given in (weight, bias))
    # A pointer that the flags leave unused may be any.
    tensors = tuple(rstd if tensor is None else tensor for tensor in (x, weight, bias, scale, *written))
    numbers = (*x.shape, x.stride(0))
    constants = (
        norm.kind == "layer", norm.epsilon, weight is not None, bias is not None, float(norm.zero_centered),
        THROUGH_DTYPES[norm.through], codes is not None, codes_t is not None, output is not None, used is not None,
        amaxes is not None, CODE_DTYPES[format.name], INTERPRETED, x.shape[1] % block.columns == 0, block.rows,
        block.columns,
    )  # fmt: skip
    dtype = None if output is None else output.dtype
    key = (key_of(x, weight, bias), dtype, key_of_numbers(*numbers), format.name, constants)
    _launch_kernel(programs, key, tensors, numbers, constants, block.warps)


def norm_cast_triton(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    scale: Tensor,
    gathered: Tensor | None = None,
    columnwise: bool = True,
    return_output: bool = False,
    own_scale: bool = False,
) -> Result:
    """As `octavo.kernels.norm_cast.norm_cast`: E4M3 or E5M2, more than one column, a device of Triton's.

    own_scale: the scale that comes out is a tensor of its own.
    """
    dtype = output_dtype(x, norm)
    x = with_contiguous_rows(x)
    rows, columns = x.shape
    padded_rows, padded_columns = padded(rows), padded(columns)
    own_scale = own_scale or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    codes = x.new_empty((padded_rows, padded_columns), dtype=format.dtype)
    codes_t = x.new_empty((padded_columns, padded_rows), dtype=format.dtype) if columnwise else None
    output = x.new_empty((rows, columns), dtype=dtype) if return_output else None
    mean = x.new_empty(rows, dtype=torch.float32) if norm.kind == "layer" else None
    rstd = x.new_empty(rows, dtype=torch.float32)
    used = x.new_empty((), dtype=torch.float32) if own_scale else None
    _launch(x, norm, weight, bias, (codes, codes_t, output, mean, rstd, used, gathered), scale, format, *_cast_block(x))
    return codes, scale.reshape(()) if used is None else used, codes_t, output, mean, rstd


def norm_output_triton(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As `octavo.kernels.norm_cast.norm_output`, for more than one column on a device of Triton's."""
    dtype = output_dtype(x, norm)
    x = with_contiguous_rows(x)
    rows, columns = x.shape
    block, most = next(found for bytes, found in _OUTPUT_BLOCKS.items() if columns * x.element_size() <= bytes)
    programs = min(most, triton.next_power_of_2(-(-rows // block.rows)))
    amaxes = x.new_empty(programs, dtype=torch.float32)
    output, rstd = x.new_empty((rows, columns), dtype=dtype), x.new_empty(rows, dtype=torch.float32)
    mean = x.new_empty(rows, dtype=torch.float32) if norm.kind == "layer" else None
    # The amax is that of what is handed on.
    norm, written = norm._replace(through=dtype), (None, None, output, mean, rstd, None, amaxes)
    _launch(x, norm, weight, bias, written, None, E4M3, block, programs)
    return output, amaxes, mean, rstd
