"""The cast to nearest: against two oracles on every value that could tell them apart, and its stated edge cases."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis
import pytest
import torch
from hypothesis import strategies
from tests.formats.edge_values import around_every_tie, every_value, finite_grid, special_float32
from tests.formats.oracles import decoded, overflowing_codes, same_bits_but_for_nan, saturating_values
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, Format, cast, cast_float32, decode

OCP = (E4M3, E5M2)
SIGNED = (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ)


def inputs(source: str, format: Format) -> Tensor:
    if source == "ties":
        return torch.cat([around_every_tie(format), special_float32()])
    return every_value({"bf16": torch.bfloat16, "fp16": torch.float16}[source]).flatten()


def bits(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@pytest.mark.parametrize("source", ["bf16", "fp16", "ties"])
@pytest.mark.parametrize("format", OCP, ids=repr)
def test_saturating_casts_are_gfloats(format: Format, source: str) -> None:
    x = inputs(source, format)
    codes = cast(x, format)
    assert codes.dtype == format.dtype
    expected = saturating_values(x, format)
    assert int((~same_bits_but_for_nan(decoded(codes, format), expected)).sum()) == 0
    assert (bits(codes)[x.isnan()] == format.nan_code).all()


@pytest.mark.parametrize("source", ["bf16", "fp16", "ties"])
@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_casts_that_do_not_saturate_are_ml_dtypes(format: Format, source: str) -> None:
    x = inputs(source, format)
    codes = cast(x, format, saturate=False)
    expected = overflowing_codes(x, format)
    both_nan = decoded(codes, format).isnan() & decoded(expected, format).isnan()
    assert int(((bits(codes) != expected) & ~both_nan).sum()) == 0
    assert (bits(codes)[both_nan] == format.nan_code).all()


@pytest.mark.parametrize("source", ["bf16", "fp16", "ties"])
@pytest.mark.parametrize("format", [E4M3FNUZ, E5M2FNUZ], ids=repr)
def test_saturation_changes_only_what_overflows(format: Format, source: str) -> None:
    x = inputs(source, format)
    overflowing = cast(x, format, saturate=False)
    over = decoded(overflowing, format).isnan() & ~x.isnan()
    expected = torch.where(
        over, torch.copysign(torch.tensor(format.max), x.float()).double(), decoded(overflowing, format)
    )
    assert same_bits_but_for_nan(decoded(cast(x, format), format), expected).all()


@pytest.mark.parametrize("format", [E4M3FNUZ, E5M2FNUZ], ids=repr)
def test_fnuz_formats_have_no_negative_zero(format: Format) -> None:
    x = torch.tensor([-0.0, -format.min_subnormal / 4, 0.0])
    assert bits(cast(x, format)).tolist() == [0, 0, 0]


def test_the_values_that_differ_between_libraries() -> None:
    """Case 4, here in eager code; compiled below, in Triton and on a GPU in tests/kernels and check_kernels.py."""
    x = torch.tensor([448, 449, 464, 465, 1e4, -1e4, math.inf, math.nan, 0.0, -0.0])
    saturated = [0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x7F, 0x00, 0x80]
    assert bits(cast(x, E4M3)).tolist() == saturated
    assert bits(cast(x, E4M3, saturate=False)).tolist() == [0x7E, 0x7E, 0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0x7F, 0x00, 0x80]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_e5m2_overflows_to_inf_from_the_tie_on(dtype: torch.dtype) -> None:
    below = {torch.bfloat16: 61184.0, torch.float16: 61408.0}.get(dtype, 61439.0)
    x = torch.tensor([below, 61440.0, -61440.0, math.inf, -math.inf], dtype=dtype)
    assert bits(cast(x, E5M2, saturate=False)).tolist() == [0x7B, 0x7C, 0xFC, 0x7C, 0xFC]
    assert bits(cast(x, E5M2)).tolist() == [0x7B, 0x7B, 0xFB, 0x7B, 0xFB]


def test_nan_has_one_code_whatever_its_sign_and_payload() -> None:
    nan = special_float32()
    nan = nan[nan.isnan()]
    assert len(nan) == 6
    for format in SIGNED:
        for saturate in (True, False):
            assert (bits(cast(nan, format, saturate=saturate)) == format.nan_code).all()


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_float64_is_rounded_once(format: Format) -> None:
    # Just beyond a tie by less than float32 can see: by way of float32 each would land on the tie and go to even.
    grid = finite_grid(format)
    ties = (grid[1:] + grid[:-1]) / 2
    up, down = ties * (1 + 2.0**-40), ties * (1 - 2.0**-40)
    assert (up.float() == ties.float()).all()
    assert torch.equal(decoded(cast(up, format), format), grid[1:])
    assert torch.equal(decoded(cast(down, format), format), grid[:-1])
    codes = torch.arange(len(ties))
    assert torch.equal(bits(cast(ties, format)).long(), codes + codes % 2)


def test_float64_beyond_float32_overflows_and_underflows() -> None:
    x = torch.tensor([1e300, -1e300, 1e-300, -1e-300, math.nan, math.inf], dtype=torch.float64)
    assert bits(cast(x, E5M2)).tolist() == [0x7B, 0xFB, 0x00, 0x80, 0x7F, 0x7B]
    assert bits(cast(x, E5M2, saturate=False)).tolist() == [0x7C, 0xFC, 0x00, 0x80, 0x7F, 0x7C]


@pytest.mark.parametrize("format", SIGNED, ids=repr)
def test_representable_values_stay(format: Format) -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = decode(codes.view(format.dtype))
    kept = values.isfinite()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(bits(cast(values[kept].to(dtype), format)), codes[kept])


def test_the_input_is_left_alone() -> None:
    x = torch.tensor([1e6, math.nan, math.inf, -3.3])
    before = x.clone()
    for format in (*OCP, E8M0):
        cast(x, format)
        cast_float32(x, E4M3)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_shape_and_strides_are_no_matter() -> None:
    x = torch.randn(6, 8, 10)
    for view in (x, x.transpose(0, 2), x[:, ::2], x[1:, 1:, 1:], x[0, 0, 0], x[:0]):
        codes = cast(view, E4M3)
        assert codes.shape == view.shape
        assert torch.equal(bits(codes.contiguous()), bits(cast(view.contiguous(), E4M3)))


numbers = strategies.lists(strategies.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=64)


@hypothesis.given(values=numbers, format=strategies.sampled_from(SIGNED))
def test_any_float32_is_cast_as_ml_dtypes_does(values: list[float], format: Format) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    codes, expected = cast(x, format, saturate=False), overflowing_codes(x, format)
    assert same_bits_but_for_nan(decoded(codes, format), decoded(expected, format)).all()


@hypothesis.given(
    value=strategies.floats(allow_nan=False, allow_infinity=False), format=strategies.sampled_from(SIGNED)
)
def test_any_float64_goes_to_the_nearest_value_and_ties_to_the_even_one(value: float, format: Format) -> None:
    clipped = max(-format.max, min(format.max, value))
    found = cast(torch.tensor([value], dtype=torch.float64), format)
    code, result = int(bits(found)), Fraction(float(decode(found, torch.float64)))
    grid = [Fraction(v) for v in finite_grid(format).tolist()]
    distances = [abs(v - abs(Fraction(clipped))) for v in grid]
    assert abs(abs(result) - abs(Fraction(clipped))) == min(distances)
    if distances.count(min(distances)) == 2:
        assert code % 2 == 0


@hypothesis.given(values=numbers, format=strategies.sampled_from(OCP))
def test_casts_keep_order_and_sign_and_cast_again_to_themselves(values: list[float], format: Format) -> None:
    x = torch.tensor(values, dtype=torch.float32).nan_to_num().sort().values
    codes = cast(x, format)
    once = decode(codes)
    assert (once.diff() >= 0).all()
    assert torch.equal(bits(cast(-x, format)), bits(codes) ^ 0x80)
    assert torch.equal(bits(cast(once, format)), bits(codes))


# --- E8M0 -----------------------------------------------------------------------------------------------------------


def nearest_power(value: Fraction) -> int:
    """The E8M0 code nearest to a positive value, a tie going to the even code, without an upper end."""
    codes = range(300)
    powers = [Fraction(2) ** (code - 127) for code in codes]
    return min(codes, key=lambda code: (abs(powers[code] - value), code % 2))


def test_e8m0_takes_the_nearest_power_of_two() -> None:
    exponents = [-149, -140, -129, -128, -127, -126, -125, -2, -1, 0, 1, 2, 63, 126, 127]
    fractions = [1.0, 1.0 + 2.0**-23, 1.25, 1.5 - 2.0**-23, 1.5, 1.5 + 2.0**-23, 1.75, 2 - 2.0**-23]
    values = [math.ldexp(f, e) for e in exponents for f in fractions]
    x = torch.tensor(values, dtype=torch.float64).float()
    x = x[(x > 0) & x.isfinite()]
    expected = [min(nearest_power(Fraction(value)), 254) for value in x.tolist()]
    assert bits(cast(x, E8M0)).tolist() == expected
    beyond = [nearest_power(Fraction(value)) for value in x.tolist()]
    assert bits(cast(x, E8M0, saturate=False)).tolist() == [min(code, 255) for code in beyond]
    assert 255 in beyond


def test_e8m0_of_zero_negative_and_not_a_number() -> None:
    x = torch.tensor([0.0, -0.0, -1.0, -math.inf, math.nan, math.inf])
    assert bits(cast(x, E8M0)).tolist() == [0, 0, 255, 255, 255, 254]
    assert bits(cast(x, E8M0, saturate=False)).tolist() == [0, 0, 255, 255, 255, 255]


# --- Errors, and compiled code ----------------------------------------------------------------------------------------


def test_what_cannot_be_cast_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"found torch.int32: convert it first, x.float\(\)"):
        cast(torch.ones(3, dtype=torch.int32), E4M3)
    with pytest.raises(ValueError, match=r"unknown rounding 'up': expected 'nearest' or 'stochastic'"):
        cast(torch.ones(3), E4M3, rounding="up")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"E8M0 holds scales.*use rounding='nearest'"):
        cast(torch.ones(3), E8M0, rounding="stochastic")


@pytest.mark.parametrize(("backend", "formats"), [("aot_eager", FORMATS), ("inductor", OCP)], ids=str)
def test_compiled_casts_have_the_same_bits(backend: str, formats: tuple[Format, ...]) -> None:
    torch._dynamo.reset()

    def every_cast(x: Tensor) -> list[Tensor]:
        return [
            cast(x, format, saturate=saturate).view(torch.uint8) for format in formats for saturate in (True, False)
        ]

    compiled = torch.compile(every_cast, backend=backend, fullgraph=True)
    for x in (inputs("ties", E4M3), inputs("ties", E5M2)):
        for found, expected in zip(compiled(x), every_cast(x), strict=True):
            assert torch.equal(found, expected)
