"""Two matrices cast by one launch on a GPU: each program casts one tile, first those of x and then those of w.

A card takes a number of programs at once, and those of the last wave rarely are as many: the tiles of a weight run in
the places that the input's last wave leaves free, in place of a wave of their own, and the host launches once. Both are
of bf16 or fp16 in words; `packed_kernel` has a tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.block_cast import BlockCast
from octavo.kernels.block_cast.packed_kernel import OPTIONS, cast_tile
from octavo.kernels.block_cast.triton_kernel import prepare
from octavo.kernels.launcher import Launcher, WithOptions

_Outputs = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@triton.jit(
    do_not_specialize=("x_rows", "x_words", "x_stride_row", "w_rows", "w_words", "w_stride_row"),
    do_not_specialize_on_alignment=("x_scale", "x_scale_t", "x_sums", "w_scale", "w_scale_t", "w_sums"),
)
def packed_pair_cast_kernel(
    x,
    x_codes,
    x_codes_t,
    x_scale,
    x_scale_t,
    x_sums,
    w,
    w_codes,
    w_codes_t,
    w_scale,
    w_scale_t,
    w_sums,
    x_rows,
    x_words,
    x_stride_row,
    w_rows,
    w_words,
    w_stride_row,
    X_ALIGN: tl.constexpr,
    X_OFFSET: tl.constexpr,
    X_HAS_CODES: tl.constexpr,
    X_HAS_CODES_T: tl.constexpr,
    X_SQUARE: tl.constexpr,
    X_EPSILON: tl.constexpr,
    X_POWER_OF_TWO: tl.constexpr,
    X_INF_TO_NAN: tl.constexpr,
    X_COLUMN_SUM: tl.constexpr,
    X_CODE: tl.constexpr,
    X_INTERPRETED: tl.constexpr,
    X_FORMAT_MAX: tl.constexpr,
    X_SMALLEST: tl.constexpr,
    X_LARGEST: tl.constexpr,
    W_ALIGN: tl.constexpr,
    W_OFFSET: tl.constexpr,
    W_HAS_CODES: tl.constexpr,
    W_HAS_CODES_T: tl.constexpr,
    W_SQUARE: tl.constexpr,
    W_EPSILON: tl.constexpr,
    W_POWER_OF_TWO: tl.constexpr,
    W_INF_TO_NAN: tl.constexpr,
    W_COLUMN_SUM: tl.constexpr,
    W_CODE: tl.constexpr,
    W_INTERPRETED: tl.constexpr,
    W_FORMAT_MAX: tl.constexpr,
    W_SMALLEST: tl.constexpr,
    W_LARGEST: tl.constexpr,
):
    """One tile of x or of w; arguments of each are those of `packed_block_cast_kernel`."""
    program = tl.program_id(0)
    tiles = ((x_rows + 127) // 128) * ((x_words * X_ALIGN + 63) // 64)
    if program < tiles:
        cast_tile(
            program, x, x_codes, x_codes_t, x_scale, x_scale_t, x_sums, x_rows, x_words, x_stride_row, X_ALIGN,
            X_OFFSET, X_HAS_CODES, X_HAS_CODES_T, X_SQUARE, X_EPSILON, X_POWER_OF_TWO, X_INF_TO_NAN, X_COLUMN_SUM,
            X_CODE, X_INTERPRETED, X_FORMAT_MAX, X_SMALLEST, X_LARGEST,
        )  # fmt: skip
    else:
        cast_tile(
            program - tiles, w, w_codes, w_codes_t, w_scale, w_scale_t, w_sums, w_rows, w_words, w_stride_row, W_ALIGN,
            W_OFFSET, W_HAS_CODES, W_HAS_CODES_T, W_SQUARE, W_EPSILON, W_POWER_OF_TWO, W_INF_TO_NAN, W_COLUMN_SUM,
            W_CODE, W_INTERPRETED, W_FORMAT_MAX, W_SMALLEST, W_LARGEST,
        )  # fmt: skip


_launch_pair = Launcher(WithOptions(packed_pair_cast_kernel, **OPTIONS))


def block_cast_pair_triton(x: BlockCast, w: BlockCast) -> tuple[_Outputs, _Outputs]:
    """Outputs of both, as of `triton_kernel.block_cast_triton`; one device, each matrix in words with contiguous rows.

    See `octavo.kernels.amax.packed_kernel.is_packed`.
    """
    of_x, of_w = prepare(*x, False, False, True), prepare(*w, False, False, True)
    constants = (*of_x.constants, *of_w.constants)
    # None of the numbers has more than 31 bits; nor has that of the programs: no card holds the codes of 2^31 tiles.
    _launch_pair(
        of_x.programs + of_w.programs,
        (x.x.dtype, x.format.name, w.x.dtype, w.format.name, constants),
        (*of_x.tensors, *of_w.tensors),
        (*of_x.numbers, *of_w.numbers),
        constants,
        of_x.warps,
    )
    return of_x.outputs, of_w.outputs
