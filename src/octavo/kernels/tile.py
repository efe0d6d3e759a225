"""What the fused casts do with a tile once its values are there, for Triton: scale, convert, store, gather.

A tile is two matrices, its even rows and its odd ones, each [pairs of rows, columns] in float32, as in
`octavo.kernels.cast_transpose.triton_kernel`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.codes import largest_finite, pairs_of_codes, scaled
from octavo.kernels.launcher import specialization

# What values are rounded through before they are cast; float32 rounds nothing.
THROUGH_DTYPES = {
    None: tl.float32,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def load_rows(source, inside):
    """A block as float32; 0 outside."""
    return tl.load(source, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def rounded(values, THROUGH: tl.constexpr, INTERPRETED: tl.constexpr):
    """float32 values rounded to another dtype.

    The conversion of a single float32 to bfloat16 is as slow as an exponential; that of two is not.
    """
    if THROUGH == tl.float32:  # noqa: SIM300
        return values
    elif INTERPRETED or THROUGH != tl.bfloat16:  # noqa: SIM300
        return values.to(THROUGH).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000; }""",
            "=f,=f,f,f", [values], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def scale_and_multiplier(source, target, program, STORE_SCALE: tl.constexpr):
    """The multiplier of a given scale; the scale is written to `target` by the first program."""
    scale = tl.load(source)
    if STORE_SCALE:
        tl.store(target, scale, mask=program == 0)
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def largest_of(values_0, values_1):
    """The largest finite magnitude of a tile; one look at most tiles, a second where something is not finite."""
    magnitude_0, magnitude_1 = tl.abs(values_0), tl.abs(values_1)
    largest = tl.max(tl.max(tl.maximum(magnitude_0, magnitude_1), axis=1), axis=0)
    if not (largest < float("inf")):
        largest = tl.maximum(largest_finite(magnitude_0), largest_finite(magnitude_1))
    return largest


@triton.jit
def store_codes(
    codes,
    codes_t,
    values_0,
    values_1,
    multiplier,
    inside_0,
    inside_1,
    pair,
    column,
    end,
    rows,
    padded_columns,
    HAS_CODES: tl.constexpr,
    HAS_CODES_T: tl.constexpr,
    INF_TO_NAN: tl.constexpr,
    CODE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes of the columns below `end` of a tile, in both layouts; 0 outside of the matrix.

    codes [padded rows, padded columns], codes_t its transpose; `rows` are those of the matrix.
    """
    scaled_0 = scaled(values_0, multiplier, inside_0, INF_TO_NAN)
    scaled_1 = scaled(values_1, multiplier, inside_1, INF_TO_NAN)
    if HAS_CODES:
        padded_rows = (rows + 15) // 16 * 16
        within = (column < end)[None, :] & (2 * pair < padded_rows)[:, None]
        target = codes + 2 * pair[:, None] * padded_columns + column[None, :]
        tl.store(target, scaled_0.to(CODE), mask=within)
        tl.store(target + padded_columns, scaled_1.to(CODE), mask=within)
    if HAS_CODES_T:
        words = pairs_of_codes(scaled_1, scaled_0, CODE, INTERPRETED)
        # The extent of codes_t in words; divisions and masks as the compiler needs them to store 16 bytes at once.
        width_t = (rows + 15) // 16 * 8
        target_t = codes_t.to(tl.pointer_type(tl.uint16)) + column[:, None] * width_t + pair[None, :]
        tl.store(target_t, tl.trans(words), mask=(column < end)[:, None] & (pair < width_t)[None, :])


# Triton's interpreter knows no assembly.
INTERPRETED = not isinstance(store_codes, triton.runtime.JITFunction)


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x as the kernels read it: float32 or narrower, the entries of a row side by side."""
    if x.dtype == torch.float64:
        x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def key_of(*tensors: Tensor | None) -> Hashable:
    """What Triton compiles variants for in tensors that it may find anywhere."""
    return tuple(None if t is None else (t.dtype, t.data_ptr() % 16 == 0) for t in tensors)


def key_of_numbers(rows: int, *numbers: int) -> Hashable:
    """What it compiles variants for in integers, of which the first is marked `do_not_specialize`."""
    return rows >> 31, specialization(*numbers)
