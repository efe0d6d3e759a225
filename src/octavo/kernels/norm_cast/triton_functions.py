"""Statistics of rows and what is made of them, for Triton, on pairs of rows as in `octavo.kernels.tile`.

Statistics are float32 sums of x - c and (x - c)^2, c the mean of the row's first B columns, and

    mean = c + d,  d = sum / K          variance = sum of squares / K - d^2

Since B of K elements have mean c, (K - B) / B >= d^2 / variance: cancellation costs at most a factor K / B, and none to
speak of unless the first columns are unlike the others. With n = K / B + log2 B + 2 additions a term passes, the
variance is off by at most 2 n (K / B) 2^-24 of itself, the mean by 2 n 2^-24 of the mean |x - c|.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.tile import load_rows, rounded


@triton.jit
def _by_eight(values):
    """Sums of eight neighbours, which one thread has read, so that few numbers are kept from block to block."""
    return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1] // 8, 8]), axis=2)


@triton.jit
def _shift(source, inside, columns, BLOCK_COLUMNS: tl.constexpr):
    """The mean of the first columns, of rows that start at source [rows, 1]."""
    lane = tl.arange(0, BLOCK_COLUMNS)
    total = tl.sum(load_rows(source + lane[None, :], inside & (lane < columns)[None, :]), axis=1)
    return tl.div_rn(total, tl.full(total.shape, 1.0, tl.float32) * tl.minimum(columns, BLOCK_COLUMNS).to(tl.float32))


@triton.jit
def _deviations(source, shift, inside, within, CENTRED: tl.constexpr, EVEN: tl.constexpr):
    """Entries less the shift, kept in the caches if it can be; 0 behind the last column."""
    values = tl.load(source, mask=inside if EVEN else inside & within, other=0.0, eviction_policy="evict_last")
    values = values.to(tl.float32)
    if CENTRED:
        values = values - shift[:, None]
        if not EVEN:
            values = tl.where(within, values, 0.0)
    return values


@triton.jit
def _mean_and_rstd(sums, squares, shift, columns, CENTRED: tl.constexpr, EPSILON: tl.constexpr):
    """(mean, 1 / sqrt(variance + epsilon)) of rows from their sums by column; see the module."""
    total = tl.sum(squares, axis=1)
    count = tl.full(total.shape, 1.0, tl.float32) * columns.to(tl.float32)
    variance = tl.div_rn(total, count)
    mean = shift
    if CENTRED:
        distance = tl.div_rn(tl.sum(sums, axis=1), count)
        mean = shift + distance
        variance = variance - distance * distance
        # Not by a maximum, which would lose NaN.
        variance = tl.where(variance < 0.0, 0.0, variance)
    return mean, tl.div_rn(tl.full(total.shape, 1.0, tl.float32), tl.sqrt_rn(variance + EPSILON))


@triton.jit
def statistics(
    source,
    stride_row,
    in_0,
    in_1,
    columns,
    CENTRED: tl.constexpr,
    EPSILON: tl.constexpr,
    EVEN: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """(mean, rstd) of even rows, which start at source [PAIRS, 1], and of the odd ones below them."""
    shift_0, shift_1 = tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)
    if CENTRED:
        shift_0 = _shift(source, in_0, columns, BLOCK_COLUMNS)
        shift_1 = _shift(source + stride_row, in_1, columns, BLOCK_COLUMNS)
    sums_0 = tl.zeros([PAIRS, BLOCK_COLUMNS // 8], tl.float32)
    sums_1, squares_0, squares_1 = sums_0, sums_0, sums_0
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        away_0 = _deviations(source + column, shift_0, in_0, column < columns, CENTRED, EVEN)
        away_1 = _deviations(source + stride_row + column, shift_1, in_1, column < columns, CENTRED, EVEN)
        if CENTRED:
            sums_0, sums_1 = sums_0 + _by_eight(away_0), sums_1 + _by_eight(away_1)
        squares_0, squares_1 = squares_0 + _by_eight(away_0 * away_0), squares_1 + _by_eight(away_1 * away_1)
    mean_0, rstd_0 = _mean_and_rstd(sums_0, squares_0, shift_0, columns, CENTRED, EPSILON)
    mean_1, rstd_1 = _mean_and_rstd(sums_1, squares_1, shift_1, columns, CENTRED, EPSILON)
    return mean_0, rstd_0, mean_1, rstd_1


@triton.jit
def parameter(source, column, columns, HAS: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr):
    """[1, BLOCK_COLUMNS] of a weight or bias in float32; 0 where there is none."""
    values = tl.zeros([1, 1], tl.float32)
    if HAS:
        if EVEN:
            values = tl.load(source + column).to(tl.float32)[None, :] + ADDED
        else:
            values = tl.load(source + column, mask=column < columns, other=0.0).to(tl.float32)[None, :] + ADDED
    return values


@triton.jit
def normalised(
    source,
    inside,
    mean,
    rstd,
    gamma,
    beta,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """((values - mean) rstd) gamma + beta, rounded at every step, then to THROUGH."""
    values = load_rows(source, inside)
    if CENTRED:
        values = values - mean[:, None]
    y = values * rstd[:, None]
    if HAS_WEIGHT:
        y = y * gamma
    if HAS_BIAS:
        y = y + beta
    return rounded(y, THROUGH, INTERPRETED)


@triton.jit
def largest_finite_of_rows(
    source,
    stride_row,
    in_0,
    in_1,
    mean_0,
    rstd_0,
    mean_1,
    rstd_1,
    weight,
    bias,
    columns,
    CENTRED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDED: tl.constexpr,
    THROUGH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Of the result in a group of rows, computed once more."""
    peak = tl.zeros([PAIRS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)
        gamma = parameter(weight, column, columns, HAS_WEIGHT, ADDED, False)
        beta = parameter(bias, column, columns, HAS_BIAS, 0.0, False)
        inside_0, inside_1 = in_0 & (column < columns)[None, :], in_1 & (column < columns)[None, :]
        y_0 = normalised(
            source + column[None, :], inside_0, mean_0, rstd_0, gamma, beta, CENTRED, HAS_WEIGHT, HAS_BIAS, THROUGH,
            INTERPRETED,
        )  # fmt: skip
        y_1 = normalised(
            source + stride_row + column[None, :], inside_1, mean_1, rstd_1, gamma, beta, CENTRED, HAS_WEIGHT,
            HAS_BIAS, THROUGH, INTERPRETED,
        )  # fmt: skip
        peak = tl.maximum(peak, tl.maximum(_finite(y_0, inside_0), _finite(y_1, inside_1)))
    return tl.max(tl.max(peak, axis=1), axis=0)


@triton.jit
def _finite(y, inside):
    magnitude = tl.abs(y)
    return tl.where(inside & (magnitude < float("inf")), magnitude, 0.0)
