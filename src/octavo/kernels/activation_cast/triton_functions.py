"""The functions of `octavo.kernels.activations` and their gradients, for Triton, on blocks of float32.

Memory allows some 27 instructions an element, so exponentials and reciprocals are the hardware's own (2^t and 1/t
within 2^-22 relative, results below 2^-126 flushed to 0), log2 e is part of the constants, and Phi of gelu_erf comes
from Abramowitz and Stegun 7.1.26, whose e^(-x^2/2) the gradient needs too:

    Phi(-|x|) = (a1 t + a2 t^2 + ... + a5 t^5) e^(-x^2/2) / 2,  t = 1 / (1 + p |x| / sqrt 2)      within 0.75e-7

relu and srelu and their gradients are the reference's to the bit. With u = 2^-24, z the argument of the sigmoid and s
its value, the others lie within these distances of the exact function (products and sums may be fused or not):

    s            (12 + 4 |z|) u s       z is rounded thrice, and what that makes of e^-z is relative |z|
    f = x s      (13 + 4 |z|) u |f|
    f'           (26 + 8 |z|) u (s + |x z'| s (1 - s)) + 6 u s |x z'|      the last from 1 - s, and not where z > 18
    Phi          10 u,  f = x Phi  11 u |x|,  f'  12 u + 6 u |x|           without |x| where |x| > 14

Of Phi's 10 u the formula has 1.3, 2^t at most 1.4 (half of 2^-22.5), 1/t 3.5 (2^-23 times a slope of 1.7), and what is
rounded the rest. To all comes what is flushed: 2^-125 (1 + |x z'|).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import triton
import triton.language as tl

from octavo.kernels.activations import QUICK, TANH_CUBIC, TANH_FLAT, TANH_LINEAR

_LOG2_E = tl.constexpr(math.log2(math.e))
_QUICK = tl.constexpr(QUICK)
_TANH_LINEAR = tl.constexpr(TANH_LINEAR)
_TANH_CUBIC = tl.constexpr(TANH_CUBIC)
_TANH_FLAT = tl.constexpr(TANH_FLAT)
_DENSITY = tl.constexpr(1 / math.sqrt(2 * math.pi))
# Abramowitz and Stegun 7.1.26 of |x| / sqrt 2; a halved.
_P = tl.constexpr(0.3275911 * math.sqrt(0.5))
_A1 = tl.constexpr(0.254829592 / 2)
_A2 = tl.constexpr(-0.284496736 / 2)
_A3 = tl.constexpr(1.421413741 / 2)
_A4 = tl.constexpr(-1.453152027 / 2)
_A5 = tl.constexpr(1.061405429 / 2)


@triton.jit
def _power_of_two(t, INTERPRETED: tl.constexpr):
    """2^t."""
    if INTERPRETED:
        return tl.exp2(t)
    else:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _reciprocal(t, INTERPRETED: tl.constexpr):
    """1 / t."""
    if INTERPRETED:
        return 1.0 / t
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def _sigmoid(x, BASE: tl.constexpr, INTERPRETED: tl.constexpr):
    """s in f(x) = x s; of "sigmoid", f itself."""
    if BASE == "gelu_tanh":
        minus_z = x * (-_LOG2_E * _TANH_LINEAR - _LOG2_E * _TANH_CUBIC * (x * x))
    elif BASE == "qgelu":
        minus_z = x * (-_LOG2_E * _QUICK)
    else:
        minus_z = x * -_LOG2_E
    return _reciprocal(1.0 + _power_of_two(minus_z, INTERPRETED), INTERPRETED)


@triton.jit
def _normal(x, INTERPRETED: tl.constexpr):
    """(Phi(x), e^(-x^2/2))."""
    power = _power_of_two(x * x * (-0.5 * _LOG2_E), INTERPRETED)
    t = _reciprocal(1.0 + _P * tl.abs(x), INTERPRETED)
    tail = t * (_A1 + t * (_A2 + t * (_A3 + t * (_A4 + t * _A5)))) * power
    return tl.where(x < 0.0, tail, 1.0 - tail), power


@triton.jit
def activated(x, BASE: tl.constexpr, INTERPRETED: tl.constexpr):
    """f(x)."""
    if BASE == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
    elif BASE == "srelu":
        kept = tl.where(x <= 0.0, 0.0, x)
        y = kept * kept
    elif BASE == "gelu_erf":
        below, _ = _normal(x, INTERPRETED)
        y = x * below
    elif BASE == "sigmoid":
        y = _sigmoid(x, BASE, INTERPRETED)
    else:
        y = x * _sigmoid(x, BASE, INTERPRETED)
    return y


@triton.jit
def activated_and_gradient(x, grad, BASE: tl.constexpr, INTERPRETED: tl.constexpr):
    """(f(x), grad * f'(x)); what is not used costs nothing."""
    if BASE == "relu":
        y = tl.where(x <= 0.0, 0.0, x)
        gradient = tl.where(x <= 0.0, 0.0, grad)
    elif BASE == "srelu":
        kept = tl.where(x <= 0.0, 0.0, x)
        y = kept * kept
        gradient = tl.where(x <= 0.0, 0.0, grad * (2.0 * x))
    elif BASE == "gelu_erf":
        below, power = _normal(x, INTERPRETED)
        y = x * below
        gradient = grad * (below + x * (power * _DENSITY))
    else:
        s = _sigmoid(x, BASE, INTERPRETED)
        rise = s * (1.0 - s)
        if BASE == "sigmoid":
            y = s
            gradient = grad * rise
        elif BASE == "gelu_tanh":
            y = x * s
            near = tl.minimum(tl.maximum(x, -_TANH_FLAT), _TANH_FLAT)
            gradient = grad * (s + rise * (near * (_TANH_LINEAR + 3.0 * _TANH_CUBIC * (near * near))))
        elif BASE == "qgelu":
            y = x * s
            gradient = grad * (s + rise * x * _QUICK)
        else:
            y = x * s
            gradient = grad * (s + rise * x)
    return y, gradient
