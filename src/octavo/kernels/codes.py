"""Functions of Triton kernels around codes: from a scale or an amax to the multiplier, from values to codes.

Values come in pairs of rows, even ones and odd ones, each a float32 matrix of its own: so the codes of two neighbours
in a column are made as one 16-bit word, and what passes through shared memory to the other layout is a matrix of words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from octavo.formats import E4M3, E5M2

CODE_DTYPES = {E4M3.name: tl.float8e4nv, E5M2.name: tl.float8e5}


@triton.jit
def multiplier_of_amax(
    amax,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """The multiplier that comes from an amax by the rule of `octavo.scaling.rules`."""
    raised = tl.where(amax < EPSILON, EPSILON, amax)
    m = tl.div_rn(tl.full(raised.shape, FORMAT_MAX, tl.float32), raised)
    m = tl.where(raised == 0.0, 1.0, m)
    m = tl.where(m < SMALLEST, SMALLEST, m)
    m = tl.where(m > LARGEST, LARGEST, m)
    if POWER_OF_TWO:
        # Without its fraction, a normal float32 is the power of two below.
        m = (m.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return m


@triton.jit
def multiplier_and_scale(
    source,
    index,
    extent,
    VECTOR: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    PARTIALS: tl.constexpr,
    EPSILON: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """(multiplier, scale) of `index`, or one for all unless VECTOR: given the scale, or the amax and
    the rule of `octavo.scaling.rules`.

    Divisions round to nearest: Triton's `/` is an approximation, off by up to 2 ulp. Every choice is a comparison that
    NaN fails, so that NaN passes through, as in the reference.
    """
    if VECTOR:
        given = tl.load(source + index, mask=index < extent, other=1.0)
    elif PARTIALS > 1:
        given = tl.max(tl.load(source + tl.arange(0, PARTIALS)), axis=0)
    else:
        given = tl.load(source)
    if FROM_AMAX:
        m = multiplier_of_amax(given, EPSILON, POWER_OF_TWO, FORMAT_MAX, SMALLEST, LARGEST)
        scale = tl.div_rn(tl.full(m.shape, 1.0, tl.float32), m)
    else:
        scale = given
        m = tl.div_rn(tl.full(given.shape, 1.0, tl.float32), given)
    return m, scale


@triton.jit
def scaled(values, multiplier, inside, INF_TO_NAN: tl.constexpr):
    """values * multiplier, float32, rounded once; 0 outside of the matrix, even if the multiplier is not a number."""
    product = values * multiplier
    if INF_TO_NAN:
        # inf - inf is NaN; 0 taken from anything changes nothing, the sign of a zero included.
        product = product - (values - values)
    return tl.where(inside, product, 0.0)


@triton.jit
def pairs_of_codes(upper, lower, CODE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Codes of two float32 matrices as one of 16-bit words, each with that of `lower` in its low byte.

    The conversion writes pairs, and is asked for just these. (Made of single codes by shifts, the words came out wrong
    on sm_90 in some variants, though the PTX was right: Triton 3.6's ptxas. `check_kernels.py` looks at all of them.)
    """
    if INTERPRETED:
        low = lower.to(CODE).to(tl.uint8, bitcast=True).to(tl.uint16)
        words = low | (upper.to(CODE).to(tl.uint8, bitcast=True).to(tl.uint16) << 8)
    elif CODE == tl.float8e4nv:  # noqa: SIM300
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 first, second;
            cvt.rn.satfinite.e4m3x2.f32 first, $1, $3;
            cvt.rn.satfinite.e4m3x2.f32 second, $2, $4;
            mov.b32 $0, {first, second}; }""",
            "=r,f,f,f,f", [upper, lower], dtype=tl.uint16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        words = tl.inline_asm_elementwise(
            """{ .reg .b16 first, second;
            cvt.rn.satfinite.e5m2x2.f32 first, $1, $3;
            cvt.rn.satfinite.e5m2x2.f32 second, $2, $4;
            mov.b32 $0, {first, second}; }""",
            "=r,f,f,f,f", [upper, lower], dtype=tl.uint16, is_pure=True, pack=2,
        )  # fmt: skip
    return words


@triton.jit
def largest_finite(magnitude):
    """The largest entry of a matrix of |x|, float32; inf and NaN count as 0."""
    return tl.max(tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=1), axis=0)


# Triton's interpreter knows no assembly.
INTERPRETED = not isinstance(pairs_of_codes, triton.runtime.JITFunction)
