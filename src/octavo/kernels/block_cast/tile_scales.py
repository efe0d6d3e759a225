"""Functions of the block casts' kernels: from an amax to multiplier and scale, and where those of 128x128 are kept."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def multiplier_of(
    amax,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """(multiplier, scale) of finite amaxes, by `octavo.scaling.rules`.

    A power of two needs no division. With M = 1.75 * 2^k, which both formats have, M / amax rounded down to one is the
    difference of the exponents, less one if the fraction of amax is above .75: the difference of the two numbers' bits,
    without its fraction. (No quotient below a power of two is so near that rounding would reach it.) Its reciprocal is
    exact: exponents add up to 254.
    """
    raised = tl.where(amax < EPSILON, EPSILON, amax)
    if POWER_OF_TWO:
        # What is smaller than this has the largest multiplier, too.
        bits = tl.maximum(raised, FORMAT_MAX * SMALLEST).to(tl.int32, bitcast=True)
        top = tl.full(bits.shape, FORMAT_MAX, tl.float32).to(tl.int32, bitcast=True)
        exponent = ((top - bits) & -0x800000) + 0x3F800000
        m = tl.where(raised == 0.0, 1.0, exponent.to(tl.float32, bitcast=True))
        scale = (0x7F000000 - m.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        # Divisions are rounded, unlike Triton's `/`.
        m = tl.div_rn(tl.full(raised.shape, FORMAT_MAX, tl.float32), raised)
        m = tl.where(raised == 0.0, 1.0, m)
        m = tl.where(m < SMALLEST, SMALLEST, m)
        m = tl.where(m > LARGEST, LARGEST, m)
        scale = tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m)
    return m, scale


@triton.jit
def _store_square_scale(target, index, of_k, width, value):
    """One scale of 128x128 at `index` of a row of `width`; the last of `of_k` fills the row up with ones."""
    offset = tl.arange(0, 4)
    first = offset == 0
    fills = (index + 1 == of_k) & (index + offset < width)
    tl.store(target + index + offset, tl.where(first, value, 1.0), mask=first | fills)


@triton.jit
def store_square_scales(
    scale, scale_t, tile_row, tile_column, tall, wide, value, HAS_CODES: tl.constexpr, HAS_CODES_T: tl.constexpr
):
    """One scale of a tile of 128x128 in that of each layout; of tiles there are `tall` by `wide`."""
    if HAS_CODES:
        width = (wide + 3) // 4 * 4
        _store_square_scale(scale + tile_row * width, tile_column, wide, width, value)
    if HAS_CODES_T:
        width = (tall + 3) // 4 * 4
        _store_square_scale(scale_t + tile_column * width, tile_row, tall, width, value)


@triton.jit
def store_scales(target, index, extent, padded, values):
    """Scales by 1x128 of one block of K: those from `extent` to `padded` are filled up with ones."""
    tl.store(target + index, tl.where(index < extent, values, 1.0), mask=index < padded)
