"""Scale rules, bit by bit: against numpy's float32, and the shared powers of two against exact rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, E8M0, Format, cast_float32, decode
from octavo.scaling import multiplier_from_amax, mx_multiplier, mx_scale, scale_from_multiplier
from octavo.scaling.rules import ScaleRounding

FORMATS = (E4M3, E5M2, E4M3FNUZ)
TINY, HUGE = numpy.float32(2.0**-126), numpy.float32(2.0**126)


def many_amaxes() -> Tensor:
    """Every exponent of float32, 400 random fractions each, and the ends."""
    exponent = torch.arange(255, dtype=torch.int32).repeat_interleave(400)
    fraction = torch.randint(0, 2**23, exponent.shape, dtype=torch.int32)
    ends = torch.tensor([0, 1, 0x00400000, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F800000], dtype=torch.int32)
    return torch.cat([exponent << 23 | fraction, exponent[::400] << 23, ends]).view(torch.float32)


def by_numpy(amax: Tensor, format: Format, epsilon: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """The rule of the documentation in numpy's float32, whose division rounds to nearest."""
    values = amax.numpy()
    with numpy.errstate(all="ignore"):
        raised = numpy.maximum(values, numpy.float32(epsilon))
        multiplier = numpy.where(raised == 0, numpy.float32(1), numpy.float32(format.max) / raised)
        multiplier = numpy.minimum(numpy.maximum(multiplier, TINY), HUGE)
        if power_of_two:
            _, exponent = numpy.frexp(multiplier)
            multiplier = numpy.ldexp(numpy.float32(1), exponent - 1)
        scale = numpy.float32(1) / multiplier
    assert multiplier.dtype == scale.dtype == numpy.float32
    return torch.from_numpy(multiplier), torch.from_numpy(scale)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 0.3])
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_multiplier_and_scale_are_numpys_to_the_bit(format: Format, epsilon: float, power_of_two: bool) -> None:
    amax = many_amaxes()
    multiplier = multiplier_from_amax(amax, format, epsilon=epsilon, power_of_two=power_of_two)
    expected, expected_scale = by_numpy(amax, format, epsilon, power_of_two)
    assert torch.equal(multiplier.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(scale_from_multiplier(multiplier).view(torch.int32), expected_scale.view(torch.int32))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("amax", [0.0, 1e-37, 1e-40, 2.0**-149, 3e38, 1.0])
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_scale_and_reciprocal_are_normal_numbers_for_every_amax(
    format: Format, amax: float, power_of_two: bool
) -> None:
    multiplier = multiplier_from_amax(torch.tensor(amax), format, power_of_two=power_of_two)
    scale = scale_from_multiplier(multiplier)
    for value in (multiplier, scale):
        assert value.isfinite()
        assert value >= torch.finfo(torch.float32).tiny
    # What was amax comes back near amax, or as 0 where the clamp left it below the format's least value.
    restored = float(decode(cast_float32(torch.tensor(amax) * multiplier, format)) * scale)
    assert restored == 0.0 or restored == pytest.approx(amax, rel=format.eps)
    if amax >= 1e-30:
        assert restored == pytest.approx(amax, rel=2.0**-22 if not power_of_two else format.eps / 2)


def test_no_amax_means_a_multiplier_of_one() -> None:
    assert multiplier_from_amax(torch.zeros(2, 3), E4M3).tolist() == [[1.0] * 3] * 2
    assert multiplier_from_amax(torch.tensor(0.0), E4M3, epsilon=0.5).item() == E4M3.max / 0.5


@hypothesis.given(
    amax=strategies.floats(min_value=2.0**-110, max_value=2.0**120, width=32), format=strategies.sampled_from(FORMATS)
)
def test_powers_of_two_are_rounded_down_and_never_saturate(amax: float, format: Format) -> None:
    multiplier = float(multiplier_from_amax(torch.tensor(amax), format, power_of_two=True))
    assert math.frexp(multiplier)[0] == 0.5
    exact = Fraction(amax) * Fraction(multiplier)
    assert exact <= Fraction(format.max)
    # The next power of two would exceed M, but for the rounding of the quotient that it was taken from.
    assert exact * 2 > Fraction(format.max) * (1 - Fraction(1, 2**23))


def exact_mx_code(amax: float, format: Format, rounding: str) -> int:
    """The E8M0 code by rational arithmetic, searching every exponent."""
    value, largest = Fraction(amax), Fraction(format.max)
    if rounding == "up":
        exponent = next((e for e in range(-127, 128) if value <= largest * Fraction(2) ** e), 127)
    else:
        floor = max(e for e in range(-149, 129) if Fraction(2) ** e <= value)
        exponent = floor - math.floor(math.log2(format.max))
    return min(max(exponent + 127, 0), 254)


def mx_amaxes(format: Format) -> list[float]:
    exact = [format.max * 2.0**e for e in (-130, -60, -1, 0, 1, 60)]
    around = [numpy.nextafter(numpy.float32(v), numpy.float32(side)) for v in exact for side in (0, numpy.inf)]
    powers = [2.0**e for e in (-149, -140, -127, -126, -20, -1, 0, 1, 8, 9, 15, 16, 127)]
    randoms = torch.exp2(torch.rand(300) * 250 - 125).tolist()
    largest = torch.finfo(torch.float32).max
    return [v for v in map(float, (*exact, *around, *powers, *randoms, largest)) if 0 < v <= largest]


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_shared_powers_of_two_are_exact(format: Format, rounding: ScaleRounding) -> None:
    amaxes = mx_amaxes(format)
    codes = mx_scale(torch.tensor(amaxes), format, rounding)
    assert codes.dtype == E8M0.dtype
    assert codes.view(torch.uint8).tolist() == [exact_mx_code(amax, format, rounding) for amax in amaxes]


def test_an_empty_block_takes_the_smallest_shared_scale() -> None:
    for rounding in ("up", "floor"):
        assert mx_scale(torch.zeros(3), E4M3, rounding).view(torch.uint8).tolist() == [0, 0, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_rounding_up_never_saturates_and_rounding_by_floor_does(format: Format) -> None:
    amax = torch.exp2(torch.rand(1000) * 200 - 100)
    for rounding, saturates in (("up", False), ("floor", True)):
        product = amax.double() * mx_multiplier(mx_scale(amax, format, rounding)).double()  # type: ignore[arg-type]
        assert bool((product > format.max).any()) is saturates
        # Never more than one binade of the format's range is left unused (up), or exceeded (floor).
        assert (product > format.max / 2).all()
        assert (product < 2.0 ** (format.max_exponent + 1)).all()


def test_an_mx_multiplier_is_the_exact_reciprocal_of_its_scale() -> None:
    codes = torch.arange(255, dtype=torch.int32).to(torch.uint8).view(E8M0.dtype)
    assert torch.equal(mx_multiplier(codes).double() * decode(codes, torch.float64), torch.ones(255).double())
