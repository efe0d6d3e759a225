"""MX blocks: block_cast by them against octavo.quantize and by hand, their products against float64, and reasons."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

import octavo
from octavo.formats import E4M3, E5M2, E8M0, Format
from octavo.kernels import ScaleRule, padded, runs_natively, scaled_mm
from octavo.kernels.block_cast import block_cast, expanded, unsupported_reasons, whole_blocks
from octavo.kernels.scaled_mm import blockwise
from octavo.scaling import BLOCK_1X128, MX, mx_scale

LARGER = [(32, 32), (40, 100), (65, 31), (3, 257)]
PRODUCTS = [(16, 32, 16), (7, 100, 33), (1, 1, 1), (64, 2, 17), (33, 257, 40)]
NUMPY = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
ROUNDINGS = ["up", "floor"]


def rule(rounding: Any) -> ScaleRule:
    return ScaleRule(power_of_two=True, rounding=rounding)


def wide(*shape: int) -> Tensor:
    """Values of many magnitudes."""
    return torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGER], ids=str)
def test_codes_and_scales_are_those_of_quantize(shape: tuple[int, int], format: Format, rounding: Any) -> None:
    """Both layouts, bit for bit; what pads is the code zero and the scale one."""
    rows, columns = shape
    x = with_specials(wide(rows, columns))
    cast = block_cast(x, format, MX, rule(rounding), column_sum=True)
    for matrix, codes, scale in ((x, cast.codes, cast.scale), (x.t(), cast.codes_t, cast.scale_t)):
        assert codes is not None
        assert scale is not None
        q = octavo.quantize(matrix, format, "mx", scale_rounding=rounding)
        tall, of_k = matrix.shape
        blocks = -(-of_k // 32)
        assert codes.shape == (padded(tall), whole_blocks(of_k, 32))
        assert scale.shape == (blocks, padded(tall))
        assert scale.dtype == q.scale.dtype == E8M0.dtype
        assert torch.equal(bits(codes)[:tall, :of_k], bits(q.codes))
        assert torch.equal(bits(scale)[:, :tall].t(), bits(q.scale))
        assert not bits(codes)[tall:].any()
        assert not bits(codes)[:, of_k:].any()
        assert bool((bits(scale)[:, tall:] == 127).all())
    assert cast.column_sum is not None
    assert torch.equal(cast.column_sum.nan_to_num(3.25), x.sum(0).nan_to_num(3.25))


def exponent_by_hand(amax: float, format: Format, rounding: str) -> int:
    """The least e of 2^e >= amax / M; or the exponent of amax less that of M. In exact fractions."""
    if amax == 0:
        return -127
    if rounding == "floor":
        return max(math.frexp(amax)[1] - 1 - (math.frexp(format.max)[1] - 1), -127)
    e = -127
    while Fraction(2) ** e * Fraction(format.max) < Fraction(amax):
        e += 1
    return e


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
def test_codes_and_scales_are_those_of_the_formula(format: Format, rounding: str) -> None:
    """By exact fractions, numpy and ml_dtypes; amaxes on M 2^k, on powers of two, next to them, tiny, zero, huge."""
    largest = format.max
    edges = [largest, math.nextafter(largest, math.inf), largest / 7, 1.0, 2.0, 1e-38, 1e-44, 0.0, 3e38, 0.1]
    x = torch.randn(len(edges), 32)
    x = x / x.abs().amax(1, keepdim=True) * torch.tensor(edges)[:, None]
    x[:, 5] = -torch.tensor(edges)
    codes, scale, *_ = block_cast(x, format, MX, rule(rounding))
    assert codes is not None
    assert scale is not None
    for row, values in enumerate(x.numpy()):
        e = exponent_by_hand(float(np.abs(values).max()), format, rounding)
        assert int(bits(scale)[0, row]) == e + 127
        exact = np.clip(values.astype(np.float64) * 2.0**-e, -largest, largest).astype(np.float32)
        assert np.array_equal(bits(codes)[row].numpy(), exact.astype(NUMPY[format]).view(np.uint8)), edges[row]


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_are_those_of_transformer_engine(dtype: torch.dtype, format: Format) -> None:
    """For every finite amax of 16 bits: its `float_to_e8m0(amax * (1 / M))`, a float32 product rounded up.

    Of float32 amaxes a few next above M 2^k differ: there its product is rounded to the power of two.
    """
    count = 31744 if dtype == torch.float16 else 32640
    amax = torch.arange(count, dtype=torch.int16).view(dtype).float()
    product = (amax * torch.tensor(1 / format.max)).view(torch.int32)
    exponent, fraction = product >> 23, product & 0x7FFFFF
    rounds_up = (fraction > 0) & ((exponent > 0) | (fraction > 0x400000))
    assert torch.equal(bits(mx_scale(amax, format)), (exponent + rounds_up.int()).to(torch.uint8))


def test_what_is_not_finite_decides_no_scale() -> None:
    """inf saturates or, of a gradient, is NaN; NaN stays; the other values keep their block's scale."""
    x = torch.ones(2, 64)
    x[0, 3], x[0, 40], x[1, 7] = float("inf"), float("nan"), -float("inf")
    plain, gradient = (block_cast(x, E4M3, MX, rule("up"), inf_to_nan=flag) for flag in (False, True))
    for cast in (plain, gradient):
        assert cast.codes is not None
        assert cast.scale is not None
        # 1 = 256 * 2^-8: the least power of two that takes 1 below 448 is 2^-8.
        assert bool((bits(cast.scale)[:, :2] == 127 - 8).all())
        values = (cast.codes.float() * expanded(cast.scale, cast.codes))[:2]
        assert bool(values[0, 40].isnan())
        assert int((values == 1).sum()) == 125
    assert plain.codes is not None
    assert gradient.codes is not None
    assert plain.codes[0, 3].float().item() == 448 == -plain.codes[1, 7].float().item()
    assert bool(gradient.codes[0, 3].float().isnan() & gradient.codes[1, 7].float().isnan())


def test_the_order_of_memory_changes_nothing() -> None:
    x = wide(35, 70)
    expected = block_cast(x, E4M3, MX, rule("up"), column_sum=True)
    for name, stored in memory_orders(x):
        found = block_cast(stored, E4M3, MX, rule("up"), column_sum=True)
        for a, b in zip(found[:4], expected[:4], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(bits(a), bits(b)), name
    one = block_cast(x, E4M3, MX, rule("up"), False, True)
    assert one[:2] == (None, None)
    assert one.codes_t is not None
    assert expected.codes_t is not None
    assert torch.equal(bits(one.codes_t), bits(expected.codes_t))


@pytest.mark.parametrize("emulation", ["fp32", "hopper"])
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products_are_those_of_the_values(shape: tuple[int, int, int], emulation: Any) -> None:
    """Values and their products are exact under powers of two; of K sums, the bias and the output K + 2 roundings.

    Of Hopper's register: 33 terms a step of 32 lose less than 2^-13 of the largest each, and the register another, so
    less than 34 * 2^-13 of the sum of magnitudes of its block.
    """
    m, k, n = shape
    x, w, bias = wide(m, k), wide(n, k), torch.randn(n)
    (a, scale_a, *_), (b, scale_b, *_) = (block_cast(t, E4M3, MX, rule("up"), True, False) for t in (x, w))
    assert a is not None
    assert b is not None
    assert scale_a is not None
    assert scale_b is not None
    with octavo.emulation(emulation):
        out = scaled_mm(a, b, scale_a, scale_b, torch.nn.functional.pad(bias, (0, padded(n) - n)), torch.float32)
    left, right = (octavo.quantize(t, E4M3, "mx").dequantize(torch.float64) for t in (x, w))
    magnitude = left.abs() @ right.abs().t() + bias.abs()
    limit = magnitude * ((k + 2) * 2.0**-24 + (34 * 2.0**-13 if emulation == "hopper" else 0.0))
    assert bool(((out[:m, :n].double() - (left @ right.t() + bias)).abs() <= limit).all())
    assert not out[m:, :n].sub(bias).any()
    assert not out[:, n:].any()


def test_hoppers_register_is_emptied_every_block() -> None:
    """32 products of 1 after 32 of 2^20 are lost in one register of 14 bits, but not in one of their own."""
    x, w = torch.ones(16, 64), torch.ones(16, 64)
    x[:, :32], w[:, :32] = 1024.0, 1024.0
    (a, scale_a, *_), (b, scale_b, *_) = (block_cast(t, E4M3, MX, rule("up"), True, False) for t in (x, w))
    with octavo.emulation("hopper"):
        out = scaled_mm(a, b, scale_a, scale_b, None, torch.float32)
    assert bool((out == 32 * 2.0**20 + 32).all())


def test_products_are_emulated_everywhere_and_say_so() -> None:
    codes = torch.zeros(16, 32, dtype=E4M3.dtype)
    scale = torch.full((1, 16), 127, dtype=torch.uint8).view(E8M0.dtype)
    emulated = "products under MX scales are emulated on every device in this version"
    assert not runs_natively(codes, codes, scale)
    assert blockwise.unsupported_reasons(codes, codes, scale) == ["cpu has no FP8 matrix units", emulated]
    assert blockwise.mx_device_reasons(torch.device("cuda", 0)) == [emulated]
    assert emulated in octavo.is_supported("mx_products").reasons
    x = torch.zeros(16, 32)
    assert "scales by mx: the kernel has blocks of 128 only" in unsupported_reasons(x, E4M3, MX)
    assert not any("mx" in reason for reason in unsupported_reasons(x, E4M3, BLOCK_1X128))


def test_a_gpu_with_fp8_units_emulates_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands on a device that multiplies blocks of 128 are asked for their scales first."""

    class OnCard:
        is_cuda, device, dtype, shape = True, torch.device("cuda", 0), E4M3.dtype, (128, 128)

    monkeypatch.setattr(blockwise, "multiplies_blocks_on", lambda index: True)
    floats, powers = torch.ones(1, 128), torch.ones(4, 128).to(E8M0.dtype)
    codes: Any = OnCard()
    assert blockwise.runs_natively(codes, codes, floats)
    assert not blockwise.runs_natively(codes, codes, powers)


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("shape", LARGER, ids=str)
def test_a_gpu_gives_the_bits_of_the_cpu(shape: tuple[int, int], rounding: Any) -> None:
    x = with_specials(wide(*shape))
    here, there = block_cast(x, E4M3, MX, rule(rounding)), block_cast(x.cuda(), E4M3, MX, rule(rounding))
    for a, b in zip(here[:4], there[:4], strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(bits(a), bits(b).cpu())
    assert here.scale is not None
    assert there.scale is not None
    assert here.codes is not None
    assert there.codes is not None
    assert torch.equal(expanded(here.scale, here.codes), expanded(there.scale, there.codes).cpu())
