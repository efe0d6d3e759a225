"""Sums as Hopper's tensor cores make them: literals, integers of any size, another's emulator, and their bias.

`mmaemu` (Xun Ding, Apache-2.0) follows the model of Khattak and Mikaitis and is held against recordings of an H100.
"""

from __future__ import annotations

import itertools
import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, Format, cast, decode
from octavo.kernels.block_cast import block_cast, expanded
from octavo.kernels.cast_transpose import ScaleRule
from octavo.kernels.scaled_mm import hopper, scaled_mm_hopper, scaled_mm_reference
from octavo.kernels.scaled_mm.blockwise import block_scaled_mm_hopper, block_scaled_mm_reference
from octavo.kernels.scaled_mm.hopper import hopper_sum
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]
KINDS = ["normal", "one sign", "heavy tails", "subnormal", "mostly zeros", "any finite code", "any code"]
INNER = [1, 7, 31, 32, 33, 64, 127, 128, 129, 160, 500, 1024]


@pytest.fixture(scope="module")
def mmaemu() -> ModuleType:
    return pytest.importorskip("mmaemu", reason="mmaemu, the independent emulator, is not installed: ./dev installs it")


def drawn(kind: str, rows: int, inner: int, format: Format) -> Tensor:
    """Codes [rows, inner] of a kind of data."""
    if kind.startswith("any"):
        codes = torch.randint(0, 256, (rows, inner), dtype=torch.uint8).view(format.dtype)
        return (
            codes if kind == "any code" else torch.where(decode(codes).isfinite(), decode(codes), 0.0).to(format.dtype)
        )
    x = torch.randn(rows, inner)
    if kind == "one sign":
        x = x.abs() * 8
    elif kind == "heavy tails":
        x = x * torch.exp(3 * torch.randn(rows, inner))
    elif kind == "subnormal":
        x = x * (format.min_normal / 2)
    elif kind == "mostly zeros":
        x = torch.where(torch.rand(rows, inner) < 0.9, 0.0, x)
    return cast(x, format)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """All bits, but any NaN for any NaN."""
    nan = one.isnan() & other.isnan()
    return bool((nan | (one.view(torch.int32) == other.view(torch.int32))).all())


def significand(code: float, format: Format) -> tuple[int, int]:
    """A finite value as integer * 2^(exponent - mantissa bits), the exponent at least the format's."""
    least = math.frexp(format.min_normal)[1] - 1
    exponent = max(math.frexp(code)[1] - 1, least) if code else least
    return int(math.ldexp(code, format.mantissa_bits - exponent)), exponent


def cut(value: int, places: int) -> int:
    """value * 2^places, toward zero."""
    size = abs(value) << places if places >= 0 else abs(value) >> -places
    return size if value >= 0 else -size


def one_by_one(a: Tensor, b: Tensor, formats: tuple[Format, Format], promoted: bool) -> float:
    """The sum of one row by one row, in Python's integers."""
    bits = formats[0].mantissa_bits + formats[1].mantissa_bits
    products = []
    for x, y in zip(decode(a).tolist(), decode(b).tolist(), strict=True):
        (left, of_left), (right, of_right) = significand(x, formats[0]), significand(y, formats[1])
        products.append((left * right, of_left + of_right))
    total, register = torch.zeros(()), 0.0
    for start in range(0, len(products), 32):
        terms = [(n, e, bits) for n, e in products[start : start + 32] if n]
        if register:
            exponent = math.frexp(register)[1] - 1
            terms.append((int(math.ldexp(register, 13 - exponent)), exponent, 13))
        if terms:
            largest = max(e for _, e, _ in terms)
            units = sum(cut(n, 13 - of_bits + e - largest) for n, e, of_bits in terms)
            drop = max(units.bit_length() - 14, 0)
            register = math.ldexp(cut(cut(units, -drop), drop), largest - 13)
        if promoted and (start + 32) % 128 == 0:
            total, register = total + register, 0.0
    return float(total + register)


@pytest.mark.parametrize("formats", PAIRS, ids=str)
@pytest.mark.parametrize("promoted", [False, True])
def test_sums_are_those_made_one_by_one_in_integers(promoted: bool, formats: tuple[Format, Format]) -> None:
    for kind, inner in itertools.product(KINDS[:-1], (1, 33, 160, 700)):
        a, b = drawn(kind, 2, inner, formats[0]), drawn(kind, 3, inner, formats[1])
        expected = [[one_by_one(x, y, formats, promoted) for y in b] for x in a]
        assert same_bits(hopper_sum(a, b, promoted), torch.tensor(expected)), (kind, inner)


@pytest.mark.parametrize("formats", PAIRS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_an_independent_emulator(
    kind: str, formats: tuple[Format, Format], mmaemu: ModuleType
) -> None:
    # The longest once: whatever the formats, its steps are those of 1024.
    for inner, promoted in itertools.product([*INNER, *[4096] * (formats == PAIRS[1])], (False, True)):
        a, b = drawn(kind, 5, inner, formats[0]), drawn(kind, 9, inner, formats[1])
        expected = mmaemu.accumulate(a, b, use_fast_accum=not promoted, splitk=1, profile="hopper")
        assert same_bits(hopper_sum(a, b, promoted), expected), (inner, promoted)


def test_literal_sums() -> None:
    def of(values: list[float]) -> float:
        a = cast(torch.tensor([values]), E4M3)
        return hopper_sum(a, cast(torch.ones_like(a, dtype=torch.float32), E4M3), False).item()

    # 2^8 leaves 2^-5 as the unit: 2^-6 is cut off, from either side of zero, as often as it comes; 2^-5 is not.
    assert of([256.0] + [2.0**-6] * 31) == 256.0
    assert of([256.0] + [-(2.0**-6)] * 31) == 256.0
    assert of([256.0, 2.0**-5]) == 256.0 + 2.0**-5
    # 33 products: the last meets the register.
    assert of([256.0] + [0.0] * 31 + [2.0**-6]) == 256.0
    assert of([-256.0] + [0.0] * 31 + [2.0**-6]) == -256.0
    # Two of 1.75 * 2^7 in one block sum to 448, whose own unit is 2^-5; what comes later is cut off at that.
    assert of([224.0, 224.0] + [0.0] * 30 + [2.0**-6]) == 448.0
    # The exponent of 1.5 * 1.5 is 0, not 1: aligned to it, 2^-13 stays as a term, and the register drops it.
    a = cast(torch.tensor([[1.5, 2.0**-6]]), E4M3)
    b = cast(torch.tensor([[1.5, 2.0**-7]]), E4M3)
    assert hopper_sum(a, b, False).item() == 2.25
    b = cast(torch.tensor([[2.0 / 3.0, 2.0**-7]]), E5M2)
    assert hopper_sum(a, b, False).item() == 0.9375 + 2.0**-13


def test_a_subnormal_has_the_least_exponent_of_its_format() -> None:
    # 2^8 * 2^-9 has the exponent 8 - 6, so the unit is 2^-11 and 2^-13 is cut off; of 2^5 * 2^-6 it is 5 - 6.
    small = E4M3.min_subnormal
    of_subnormal = cast(torch.tensor([[2.0**8, 2.0**-4]]), E4M3), cast(torch.tensor([[small, small]]), E4M3)
    of_normals = cast(torch.tensor([[2.0**5, 2.0**-4]]), E4M3), cast(torch.tensor([[2.0**-6, small]]), E4M3)
    assert hopper_sum(*of_subnormal, False).item() == 0.5
    assert hopper_sum(*of_normals, False).item() == 0.5 + 2.0**-13


def test_a_register_is_promoted_every_128() -> None:
    # The first 128 lose all but 256; the others do not meet it before they are in float32.
    a, b = torch.full((1, 4096), 2.0**-6), torch.ones(1, 4096)
    a[0, 0] = 256.0
    codes = cast(a, E4M3), cast(b, E4M3)
    assert hopper_sum(*codes, False).item() == 256.0
    assert hopper_sum(*codes, True).item() == 256.0 + (4096 - 128) * 2.0**-6


def test_zeros_are_positive_and_empty_sums_are_zero() -> None:
    for shape in ((0, 16, 16), (16, 0, 16), (16, 16, 0)):
        a, b = cast(torch.ones(shape[0], shape[1]), E4M3), cast(torch.ones(shape[2], shape[1]), E4M3)
        assert torch.equal(hopper_sum(a, b, False), torch.zeros(shape[0], shape[2]))
    a, b = cast(torch.full((2, 40), -0.0), E4M3), cast(torch.ones(3, 40), E4M3)
    assert not hopper_sum(a, b, False).signbit().any()


def test_values_that_are_not_finite_are_those_of_ieee() -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([[inf, 1.0], [inf, inf], [inf, -inf], [nan, 1.0], [1.0, 1.0]]).to(E5M2.dtype)
    b = torch.tensor([[1.0, 1.0], [0.0, 1.0], [-1.0, 2.0]]).to(E4M3.dtype)
    expected = [[inf, nan, -inf], [inf, nan, nan], [nan, nan, -inf], [nan, nan, nan], [2.0, 1.0, 1.0]]
    for promoted in (False, True):
        assert torch.equal(hopper_sum(a, b, promoted).nan_to_num(nan=7.0), torch.tensor(expected).nan_to_num(nan=7.0))


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_tiles_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = drawn("normal", 13, 200, E4M3), drawn("normal", 11, 200, E5M2)
    whole = hopper_sum(a, b, True)
    monkeypatch.setitem(hopper._TILE, "cpu", tile)
    monkeypatch.setattr(hopper, "_WIDEST", 5)
    assert same_bits(hopper_sum(a, b, True), whole)


@pytest.mark.parametrize("kind", ["half-normal", "uniform"])
def test_data_of_one_sign_is_biased_as_documented(kind: str) -> None:
    for inner, fast in ((1024, -0.0145), (4096, -0.071), (16384, -0.24)):
        draw = torch.rand if kind == "uniform" else lambda *shape: torch.randn(*shape).abs()
        a, b = (cast(x * (E4M3.max / x.max()), E4M3) for x in (draw(16, inner), draw(16, inner)))
        exact = decode(a, torch.float64) @ decode(b, torch.float64).t()
        bias = [float(((hopper_sum(a, b, promoted).double() - exact) / exact).mean()) for promoted in (False, True)]
        assert bias[0] == pytest.approx(fast, rel=0.15)
        assert -0.0007 < bias[1] < -0.0004


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
def test_small_integers_are_exact_and_so_the_same_in_both_emulations(by_row: bool, dtype: torch.dtype) -> None:
    a, b = (torch.randint(-3, 4, (rows, 200)).float().to(E4M3.dtype) for rows in (24, 40))
    # Scales by row of few digits: in whichever order they multiply the sum, nothing is rounded.
    by_rows = torch.randint(1, 9, (24, 1)) / 8, torch.randint(1, 9, (40, 1)) / 8
    scales = by_rows if by_row else (torch.tensor(0.3), torch.tensor(1.7))
    for bias, accumulate in itertools.product((None, torch.randn(40)), ("fast", "precise")):
        found = scaled_mm_hopper(a, b, *scales, bias, dtype, accumulate)
        assert torch.equal(found, scaled_mm_reference(a, b, *scales, bias, dtype, accumulate))


def test_formats_that_hopper_has_not_follow_the_same_rule() -> None:
    formats = (E4M3FNUZ, E4M3FNUZ)
    a, b = drawn("normal", 2, 100, E4M3FNUZ), drawn("heavy tails", 3, 100, E4M3FNUZ)
    expected = [[one_by_one(x, y, formats, False) for y in b] for x in a]
    assert same_bits(hopper_sum(a, b, False), torch.tensor(expected))


@pytest.mark.parametrize("granularity", [BLOCK_1X128, BLOCK_128X128], ids=str)
def test_scales_by_block_multiply_the_sum_of_each_block(granularity: object) -> None:
    rule = ScaleRule(power_of_two=True)
    # No block like another.
    x, w = (torch.randn(rows, 300) * torch.exp2(torch.arange(300.0) // 40) for rows in (32, 48))
    a, scale_a, *_ = block_cast(x, E4M3, BLOCK_1X128, rule)
    b, scale_b, *_ = block_cast(w, E4M3, granularity, rule)
    assert a is not None
    assert b is not None
    assert scale_a is not None
    assert scale_b is not None
    expected = torch.zeros(a.shape[0], b.shape[0])
    for start in range(0, a.shape[1], 128):
        k = slice(start, start + 128)
        factor = expanded(scale_a, a)[:, start, None] * expanded(scale_b, b)[:, start]
        expected += hopper_sum(a[:, k], b[:, k], False) * factor
    found = block_scaled_mm_hopper(a, b, scale_a, scale_b, None, torch.float32)
    assert torch.equal(found, expected)
    near = block_scaled_mm_reference(a, b, scale_a, scale_b, None, torch.float32)
    assert not torch.equal(found, near)
    assert (found - near).norm() < 2e-3 * near.norm()
