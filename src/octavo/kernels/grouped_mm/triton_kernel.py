"""Products of codes by group in Triton: for what torch's grouped products do not take.

That is E5M2 in one operand, and outputs other than bfloat16. Scales, one a row of either operand, and a bias come in
float32, then one rounding. A program finds its group by walking over the ends of all groups, so the host need not
know them: there are as many programs as any sizes could need, and those left over do nothing.

"precise" promotes every 128 products to float32 (`max_num_imprecise_acc`; 0 would leave `wgmma`). Through pointers, not
descriptors of TMA, such products ran at 0.69 to 0.85 of the library's rate on an H200 (`benchmarks/LOG.md`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_K = 128
PROMOTED = 128
# Tile in M and N, warps, tiles under way: with one accumulator, and with the second that promotion needs.
FAST_BLOCKS = (128, 256, 8, 3)
PRECISE_BLOCKS = (128, 128, 8, 4)


@triton.jit
def _tile(program, tiles_m, tiles_n):
    """(row, column) of a tile; eight rows of tiles are walked together, so that what they read stays in L2."""
    first = program // (8 * tiles_n) * 8
    height = min(tiles_m - first, 8)
    within = program % (8 * tiles_n)
    return first + within % height, within // height


@triton.jit
def by_rows_kernel(
    a,
    b,
    out,
    scale_a,
    scale_b,
    bias,
    ends,
    tiles_m,
    rows,
    columns,
    inner,
    num_groups,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [rows, columns] of a [rows, inner] and b [groups, columns, inner]; scale_b, bias [groups, columns]."""
    tile_m, tile_n = _tile(tl.program_id(0), tiles_m, tl.cdiv(columns, BLOCK_N))
    # 1. Whose rows: tiles are counted group by group.
    nothing = tl.zeros((), tl.int32)
    group, first, stop, start, counted = nothing - 1, nothing, nothing, nothing, nothing
    for e in range(num_groups):
        end = tl.load(ends + e)
        tiles = tl.cdiv(end - start, BLOCK_M)
        hit = (tile_m >= counted) & (tile_m < counted + tiles)
        group = tl.where(hit, e, group)
        first = tl.where(hit, start + (tile_m - counted) * BLOCK_M, first)
        stop = tl.where(hit, end, stop)
        counted += tiles
        start = end
    if group >= 0:
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
        # 2. What lies beyond is read from within and not stored.
        k = tl.arange(0, BLOCK_K)
        a_at = a + tl.minimum(row, rows - 1)[:, None] * inner + k[None, :]
        b_row = group.to(tl.int64) * columns + tl.minimum(column, columns - 1)
        b_at = b + b_row[None, :] * inner + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for done in range(0, inner, BLOCK_K):
            left = inner - done
            x = tl.load(a_at + done, mask=(k < left)[None, :], other=0.0)
            y = tl.load(b_at + done, mask=(k < left)[:, None], other=0.0)
            if WIDE:  # the interpreter multiplies no FP8
                x, y = x.to(tl.float32), y.to(tl.float32)
            total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
        # 3. Scales and bias in float32, one rounding.
        inside = (row < stop)[:, None] & (column < columns)[None, :]
        by_row = tl.load(scale_a + row, mask=row < stop, other=1.0)
        result = total * (by_row[:, None] * tl.load(scale_b + b_row)[None, :])
        if HAS_BIAS:
            result += tl.load(bias + b_row).to(tl.float32)[None, :]
        tl.store(out + row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def over_rows_kernel(
    a,
    b,
    out,
    scale_a,
    scale_b,
    ends,
    rows,
    columns,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IMPRECISE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out [groups, rows, columns] of a [rows, width] and b [columns, width]; scales [groups, rows], [groups, columns].

    Every group's part of the width begins and ends at a multiple of BLOCK_K.
    """
    tile_m, tile_n = _tile(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N))
    group = tl.program_id(1)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    row = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_at = a + tl.minimum(row, rows - 1)[:, None] * width + k[None, :]
    b_at = b + tl.minimum(column, columns - 1)[None, :] * width + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for done in range(start // BLOCK_K * BLOCK_K, stop // BLOCK_K * BLOCK_K, BLOCK_K):
        x, y = tl.load(a_at + done), tl.load(b_at + done)
        if WIDE:  # the interpreter multiplies no FP8
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, max_num_imprecise_acc=IMPRECISE)
    at_row, at_column = group.to(tl.int64) * rows + row, group.to(tl.int64) * columns + column
    by_row = tl.load(scale_a + at_row, mask=row < rows, other=1.0)
    by_column = tl.load(scale_b + at_column, mask=column < columns, other=1.0)
    result = total * (by_row[:, None] * by_column[None, :])
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(out + at_row[:, None] * columns + column[None, :], result.to(out.dtype.element_ty), mask=inside)


# Triton's interpreter multiplies no FP8.
INTERPRETED = not isinstance(by_rows_kernel, triton.runtime.JITFunction)


def grouped_mm_triton(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    ends: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    """As `octavo.kernels.grouped_mm.on_device.grouped_mm`; a of one row or more."""
    rows, inner = a.shape
    num_groups, columns = b.shape[:2]
    out = torch.empty((rows, columns), dtype=out_dtype, device=a.device)
    block_m, block_n, warps, stages = FAST_BLOCKS if accumulate == "fast" else PRECISE_BLOCKS
    tiles_m = triton.cdiv(rows, block_m) + num_groups
    tensors = (a, b, out, scale_a.contiguous(), scale_b.contiguous(), bias, ends)
    constants = (block_m, block_n, BLOCK_K, None if accumulate == "fast" else PROMOTED, bias is not None, INTERPRETED)
    grid = (tiles_m * triton.cdiv(columns, block_n), 1)
    _launch(by_rows_kernel, grid, tensors, (tiles_m, rows, columns, inner, num_groups), constants, warps, stages)
    return out


def grouped_mm_over_rows_triton(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    ends_t: Tensor,
    out_dtype: torch.dtype,
    accumulate: str,
) -> Tensor:
    """As `octavo.kernels.grouped_mm.on_device.grouped_mm_over_rows`."""
    (rows, width), columns, num_groups = a.shape, b.shape[0], ends_t.shape[0]
    out = torch.empty((num_groups, rows, columns), dtype=out_dtype, device=a.device)
    block_m, block_n, warps, stages = FAST_BLOCKS if accumulate == "fast" else PRECISE_BLOCKS
    tensors = (a, b, out, scale_a.contiguous(), scale_b.contiguous(), ends_t)
    constants = (block_m, block_n, BLOCK_K, None if accumulate == "fast" else PROMOTED, INTERPRETED)
    grid = (triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n), num_groups)
    _launch(over_rows_kernel, grid, tensors, (rows, columns, width), constants, warps, stages)
    return out


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Any,
    numbers: tuple[int, ...],
    constants: Any,
    warps: int,
    stages: int,
) -> None:
    kernel[grid](*tensors, *numbers, *constants, num_warps=warps, num_stages=stages)
