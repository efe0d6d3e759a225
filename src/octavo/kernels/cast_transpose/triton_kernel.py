"""cast_transpose on a GPU: each program reads one block of x and writes its codes in both layouts.

    code = convert(clamp(fp32(x) * m, -M, M))     one multiplication, rounded to nearest

and then, in the few blocks where inf or NaN is about, a second pass that writes the NaN code over what became of NaN
(and, on request, of inf). So saturation and NaN are what `octavo.formats` says whatever the conversion makes of them,
and a block without any pays only for the maximum over bits, which amax takes anyway. (As a selection in every
element it cost five instructions of about twenty; with more than 28 the kernel waits for them rather than for memory.)

Of a bf16 block what passes through shared memory is x and not the codes: units of 16 bits have a transposing load, and
converting twice is cheaper than moving single bytes. The compiler chooses that by itself.

What pads the extents to multiples of 16 is written by the blocks at the edge.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.layout import ALIGNMENT, padded

# A block: 256 bytes of a row of bf16 in, 128 bytes of a row of codes out, in both layouts. 64 elements a thread.
_BLOCK_ROWS = 128
_BLOCK_COLUMNS = 128
_WARPS = 8

_CODE_DTYPES = {E4M3.name: tl.float8e4nv, E5M2.name: tl.float8e5}


@triton.jit
def _encode(values, multiplier, FORMAT_MAX: tl.constexpr, CODE: tl.constexpr):
    """Bits (uint8) of cast(values * multiplier), values float32; of NaN anything."""
    return tl.clamp(values * multiplier, -FORMAT_MAX, FORMAT_MAX).to(CODE).to(tl.uint8, bitcast=True)


@triton.jit
def _has_special(multiplier, VECTOR: tl.constexpr):
    """Whether a multiplier, scalar or vector, is inf or NaN anywhere."""
    magnitude = multiplier.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (tl.max(magnitude, axis=0) if VECTOR else magnitude) >= 0x7F800000


@triton.jit
def _is_nan(values, multiplier, inside, INF_TO_NAN: tl.constexpr):
    """Where inside the matrix the code must be NaN."""
    product = values * multiplier
    nan = product != product
    if INF_TO_NAN:
        nan = nan | (tl.abs(values) == float("inf"))
    return nan & inside


# A scale may be any element of a tensor of scales: no second compilation, perhaps within a capture, for its alignment.
@triton.jit(do_not_specialize_on_alignment=("multiplier", "multiplier_t", "amax"))
def cast_transpose_kernel(
    x,
    codes,
    codes_t,
    multiplier,
    multiplier_t,
    amax,
    rows,
    columns,
    stride_row,
    stride_column,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    SHARED: tl.constexpr,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    NAN_CODE: tl.constexpr,
    CODE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of x [rows, columns] -> codes [padded rows, padded columns], codes_t its transpose, amax [].

    SHARED: both layouts hold the same codes. BY_ROW, BY_COLUMN: the multiplier is a vector [rows], the multiplier_t one
    [columns]; else scalars. EVEN: blocks tile the matrix without a rest, and nothing needs a mask.
    """
    # 1. Which block; 64 bits, since an offset can exceed 2^31.
    padded_rows = (rows + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    padded_columns = (columns + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    tiles_wide = tl.cdiv(padded_columns, BLOCK_COLUMNS)
    row = (tl.program_id(0) // tiles_wide).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = (tl.program_id(0) % tiles_wide).to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    # 2. Its values, [BLOCK_ROWS, BLOCK_COLUMNS].
    offsets = row[:, None] * stride_row + column[None, :] * stride_column
    values = (tl.load(x + offsets) if EVEN else tl.load(x + offsets, mask=inside, other=0.0)).to(tl.float32)
    # 3. Their amax: bits of magnitudes order as integers, those of inf and NaN after all others.
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(magnitude, axis=1), axis=0)
    special = largest >= 0x7F800000
    if special:
        largest = tl.max(tl.max(tl.where(magnitude < 0x7F800000, magnitude, 0), axis=1), axis=0)
    tl.atomic_max(amax, largest.to(tl.float32, bitcast=True), sem="relaxed")
    # 4. The codes; padding is zero even if the multiplier is not a number.
    target = codes + row[:, None] * padded_columns + column[None, :]
    target_t = codes_t + column[:, None] * padded_rows + row[None, :]
    if HAS_CODES:
        m = tl.load(multiplier + row, mask=row < rows, other=0.0) if BY_ROW else tl.load(multiplier)
        special = special | _has_special(m, BY_ROW)
        m = m[:, None] if BY_ROW else m
        bits = _encode(values, m, FORMAT_MAX, CODE)
        if EVEN:
            tl.store(target, bits.to(CODE, bitcast=True))
        else:
            bits = tl.where(inside, bits, 0).to(tl.uint8)
            within = (row < padded_rows)[:, None] & (column < padded_columns)[None, :]
            tl.store(target, bits.to(CODE, bitcast=True), mask=within)
    # 5. The same block of the other layout.
    if HAS_CODES_T:
        if SHARED:
            m_t = m
        else:
            m_t = (
                tl.load(multiplier_t + column, mask=column < columns, other=0.0) if BY_COLUMN else tl.load(multiplier_t)
            )
            special = special | _has_special(m_t, BY_COLUMN)
            m_t = m_t[None, :] if BY_COLUMN else m_t
            bits = _encode(values, m_t, FORMAT_MAX, CODE)
            if not EVEN:
                bits = tl.where(inside, bits, 0).to(tl.uint8)
        if EVEN:
            tl.store(target_t, tl.trans(bits).to(CODE, bitcast=True))
        else:
            within_t = (column < padded_columns)[:, None] & (row < padded_rows)[None, :]
            tl.store(target_t, tl.trans(bits).to(CODE, bitcast=True), mask=within_t)
    # 6. The rare pass: NaN, over what other threads of this block may have written.
    if special:
        tl.debug_barrier()
        nan = tl.full([1, 1], NAN_CODE, tl.uint8).to(CODE, bitcast=True)
        if HAS_CODES:
            tl.store(target, nan, mask=_is_nan(values, m, inside, INF_TO_NAN))
        if HAS_CODES_T:
            tl.store(target_t, nan, mask=tl.trans(_is_nan(values, m_t, inside, INF_TO_NAN)))


def cast_transpose_triton(
    x: Tensor, format: Format, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """As `octavo.kernels.cast_transpose.cast_transpose`: E4M3 or E5M2, at least one element, a device of Triton's."""
    if x.dtype == torch.float64:
        x = x.float()
    if x.stride(1) != 1 and x.stride(0) == 1:
        # Contiguous the other way round: the transposed problem, with the roles of the layouts exchanged.
        codes_t, codes, amax = _cast_rows(x.t(), format, multiplier_t, multiplier, inf_to_nan)
        return codes, codes_t, amax
    return _cast_rows(x, format, multiplier, multiplier_t, inf_to_nan)


def _cast_rows(
    x: Tensor, format: Format, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """`cast_transpose_triton` of an x whose rows are best contiguous."""
    rows, columns = x.shape
    padded_rows, padded_columns = padded(rows), padded(columns)
    codes = codes_t = None
    if multiplier is not None:
        codes = torch.empty((padded_rows, padded_columns), dtype=format.dtype, device=x.device)
    if multiplier_t is not None:
        codes_t = torch.empty((padded_columns, padded_rows), dtype=format.dtype, device=x.device)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    # Of float32, Triton 3.6 transposes shared codes wrongly on sm_90 (seen in whole 128 x 128 blocks; check_kernels.py
    # holds it to that): encoding once a layout is right in all.
    shared = multiplier is multiplier_t and x.element_size() == 2
    by_row = multiplier is not None and multiplier.numel() > 1
    by_column = multiplier_t is not None and multiplier_t.numel() > 1
    grid = (triton.cdiv(padded_rows, _BLOCK_ROWS) * triton.cdiv(padded_columns, _BLOCK_COLUMNS),)
    cast_transpose_kernel[grid](
        # A pointer that the flags leave unused may be any.
        x,
        amax if codes is None else codes,
        amax if codes_t is None else codes_t,
        amax if multiplier is None else multiplier.contiguous(),
        amax if multiplier_t is None else multiplier_t.contiguous(),
        amax,
        rows, columns, x.stride(0), x.stride(1),
        HAS_CODES=codes is not None, HAS_CODES_T=codes_t is not None, SHARED=shared,
        BY_ROW=by_row, BY_COLUMN=by_column, INF_TO_NAN=inf_to_nan,
        EVEN=rows % _BLOCK_ROWS == 0 and columns % _BLOCK_COLUMNS == 0,
        FORMAT_MAX=format.max, NAN_CODE=format.nan_code, CODE=_CODE_DTYPES[format.name],
        ALIGNMENT=ALIGNMENT, BLOCK_ROWS=_BLOCK_ROWS, BLOCK_COLUMNS=_BLOCK_COLUMNS, num_warps=_WARPS,
    )  # fmt: skip
    return codes, codes_t, amax
