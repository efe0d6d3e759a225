"""Formats: what each of the 256 codes means, and the limits that follow."""

from __future__ import annotations

import dataclasses
import math

import gfloat
import pytest
import torch
from tests.formats.oracles import GFLOAT, decoded, same_bits_but_for_nan

from octavo.formats import E4M3, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0, FORMATS, Format, decode, finfo, format_named, format_of

ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_every_code_decodes_to_what_ml_dtypes_says(format: Format) -> None:
    values = decode(ALL_CODES.view(format.dtype), torch.float64)
    assert same_bits_but_for_nan(values, decoded(ALL_CODES, format)).all()


@pytest.mark.parametrize("format", list(GFLOAT), ids=repr)
def test_every_code_decodes_to_what_gfloat_says(format: Format) -> None:
    values = decode(ALL_CODES.view(format.dtype), torch.float64)
    expected = torch.tensor([gfloat.decode_float(GFLOAT[format], code).fval for code in range(256)])
    assert same_bits_but_for_nan(values, expected.double()).all()


def value_by_definition(format: Format, code: int) -> float:
    """The formula of the module, with the specials of each kind of format, in Python's exact floats."""
    exponent = (code >> format.mantissa_bits) & (2**format.exponent_bits - 1)
    fraction = (code & (2**format.mantissa_bits - 1)) / 2**format.mantissa_bits
    sign = -1.0 if format.signed and code & 0x80 else 1.0
    if format.nan == "negative_zero" and code == 0x80:
        return math.nan
    top = exponent == 2**format.exponent_bits - 1
    if format.has_inf and top:
        return sign * math.inf if fraction == 0 else math.nan
    if format.nan == "all_ones" and top and fraction == (2**format.mantissa_bits - 1) / 2**format.mantissa_bits:
        return math.nan
    if exponent == 0 and format.signed:
        return sign * 2.0 ** (1 - format.bias) * fraction
    return sign * 2.0 ** (exponent - format.bias) * (1 + fraction)


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_the_data_of_a_format_say_what_its_dtype_does(format: Format) -> None:
    expected = torch.tensor([value_by_definition(format, code) for code in range(256)], dtype=torch.float64)
    assert same_bits_but_for_nan(decode(ALL_CODES.view(format.dtype), torch.float64), expected).all()


@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_limits_are_those_of_the_codes(format: Format) -> None:
    values = decoded(ALL_CODES, format)
    finite = values[values.isfinite()]
    positive = finite[finite > 0]
    assert format.max == finite.max()
    assert format.min_subnormal == positive.min()
    assert finfo(format).min == (finite.min() if format.signed else format.min_normal)
    above_one = finite[finite > 1]
    assert format.eps == above_one.min() - 1
    assert format.max_exponent == math.floor(math.log2(format.max))
    assert decoded(torch.tensor([format.nan_code], dtype=torch.uint8), format).isnan()
    if format.signed:
        # Below the least normal value the distance of neighbours stops shrinking.
        assert format.min_normal == format.min_subnormal * 2**format.mantissa_bits


@pytest.mark.parametrize(
    ("format", "limits"),
    [
        (E4M3, (448.0, 2.0**-6, 2.0**-9, 0.125, 0x7F, 464.0, 8)),
        (E5M2, (57344.0, 2.0**-14, 2.0**-16, 0.25, 0x7F, 61440.0, 15)),
        (E4M3FNUZ, (240.0, 2.0**-7, 2.0**-10, 0.125, 0x80, 248.0, 7)),
        (E5M2FNUZ, (57344.0, 2.0**-15, 2.0**-17, 0.25, 0x80, 61440.0, 15)),
        (E8M0, (2.0**127, 2.0**-127, 2.0**-127, 1.0, 0xFF, 1.5 * 2.0**127, 127)),
    ],
    ids=lambda value: repr(value) if isinstance(value, Format) else "",
)
def test_limits_have_the_values_of_the_specifications(format: Format, limits: tuple[float, ...]) -> None:
    found = (
        format.max, format.min_normal, format.min_subnormal, format.eps, format.nan_code, format.overflow_threshold,
        format.max_exponent,
    )  # fmt: skip
    assert found == limits
    assert format.bits == 8


def test_finfo_of_a_format_has_the_fields_of_the_specification() -> None:
    info = finfo(E4M3)
    assert dataclasses.asdict(info) == {
        "name": "E4M3", "bits": 8, "max": 448.0, "min": -448.0, "smallest_normal": 0.015625,
        "smallest_subnormal": 0.001953125, "eps": 0.125,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "subnormal"),
    [(torch.float32, 2.0**-149), (torch.float16, 2.0**-24), (torch.bfloat16, 2.0**-133), (torch.float64, 2.0**-1074)],
    ids=str,
)
def test_finfo_of_a_torch_dtype_agrees_with_torch(dtype: torch.dtype, subnormal: float) -> None:
    info, known = finfo(dtype), torch.finfo(dtype)
    assert (info.bits, info.max, info.min, info.eps) == (known.bits, known.max, known.min, known.eps)
    assert (info.smallest_normal, info.smallest_subnormal) == (known.tiny, subnormal)


@pytest.mark.parametrize("format", [E4M3, E5M2, E4M3FNUZ, E5M2FNUZ], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_decoding_is_exact_in_every_dtype_that_the_docstring_names(format: Format, dtype: torch.dtype) -> None:
    values = decode(ALL_CODES.view(format.dtype), dtype)
    assert values.dtype == dtype
    assert same_bits_but_for_nan(values.double(), decoded(ALL_CODES, format)).all()


def test_a_format_is_found_by_name_and_by_dtype() -> None:
    for format in FORMATS:
        assert format_named(format.name) is format
        assert format_of(format.dtype) is format


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown format 'E3M4'.*E4M3, E5M2, E8M0, E4M3FNUZ, E5M2FNUZ"):
        format_named("E3M4")
    with pytest.raises(ValueError, match=r"torch.float16 stores no eight-bit format.*float8_e4m3fn"):
        format_of(torch.float16)


def test_a_format_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        E4M3.bias = 8  # type: ignore[misc]


def test_limits_are_found_by_name_too() -> None:
    assert finfo("E5M2") == finfo(E5M2)
    with pytest.raises(ValueError, match="unknown format 'E4M4': the known ones are E4M3, E5M2"):
        finfo("E4M4")
    with pytest.raises(ValueError, match=r"format is 4: expected one of E4M3, .* its name or its dtype"):
        finfo(4)
    with pytest.raises(ValueError, match=r"torch\.int8 has no limits of a floating-point format"):
        finfo(torch.int8)
