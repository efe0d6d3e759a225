"""`octavo.inspection.statistics` on data whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch
from tests.measures import sqnr_db

import octavo
from octavo.inspection import Statistics, statistics

GRANULARITIES = ["tensor", "row", "column", (1, 128), (128, 1), (128, 128), "mx"]


def test_case_5_underflow_counts_what_was_flushed_and_not_what_was_zero() -> None:
    """Case 5: 30 % exact zeros, 10 % flushed to +0, 10 % to -0: reported 20 %."""
    x = torch.ones(1000)
    x[:300] = 0.0
    x[300:400], x[400:500] = 1e-9, -1e-9
    q = octavo.quantize(x, octavo.E4M3)
    flushed = q.codes.view(torch.uint8)[300:500]
    assert flushed[:100].tolist() == [0x00] * 100
    assert flushed[100:].tolist() == [0x80] * 100
    seen = statistics(x, q)
    assert seen.underflow == pytest.approx(0.2)
    assert seen.saturation == 0
    assert seen.amax == 1.0


def test_subnormals_are_no_underflow() -> None:
    """Under scale 1, 2^-10 is the tie that goes to 0, and what lies above it becomes 2^-9."""
    x = torch.tensor([2.0**-10, 2.0**-10 * 1.01, 2.0**-9, 1.0])
    assert statistics(x, octavo.quantize(x, octavo.E4M3, scale=1.0)).underflow == 0.25


@pytest.mark.parametrize(("format", "largest"), [(octavo.E4M3, 448.0), (octavo.E5M2, 57344.0)])
def test_saturation_counts_what_lay_beyond_the_largest_value(format, largest: float) -> None:
    above = largest * (1 + 2.0**-20)  # rounds to the largest value, and lay beyond it
    x = torch.tensor([largest, -largest, above, -2 * largest, 1.0, 0.0, 0.0, 0.0])
    seen = statistics(x, octavo.quantize(x, format, scale=1.0))
    assert seen.saturation == 0.25
    assert seen.amax == 2 * largest
    assert seen.sqnr_db == pytest.approx(10 * math.log10((7 * largest**2) / largest**2), abs=1e-3)
    assert seen.nonfinite == 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_nothing_saturates_under_measured_scales(granularity) -> None:
    """Neither do amaxes themselves, whose scaled magnitude may round past M by an ulp."""
    for _ in range(20):
        x = torch.randn(130, 140) * torch.logspace(-3, 3, 130).unsqueeze(1)
        assert statistics(x, octavo.quantize(x, octavo.E4M3, granularity)).saturation == 0


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_error_is_that_of_the_decoded_values(granularity) -> None:
    x = torch.randn(3, 50, 140)
    q = octavo.quantize(x, octavo.E4M3, granularity)
    seen = statistics(x, q)
    # Differences are taken in float32 here, whose rounding is 2^-20 of E4M3's.
    assert seen.sqnr_db == pytest.approx(sqnr_db(x, q.dequantize()), abs=1e-4)
    assert seen.underflow == ((q.codes.float() == 0) & (x != 0)).sum().item() / x.numel()


def test_what_is_not_finite_is_counted_apart() -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 448.0, 1.0, 0.0, 2.0**-12, 3.0])
    seen = statistics(x, octavo.quantize(x, octavo.E4M3, scale=1.0))
    assert seen.as_dict() == pytest.approx(
        {
            "amax": 448.0,
            "underflow": 1 / 8,
            "saturation": 0.0,
            "nonfinite": 3,
            "sqnr_db": 10 * math.log10((448.0**2 + 10 + 2.0**-24) / 2.0**-24),
        }
    )
    lost = statistics(x[:3], octavo.quantize(x[:3], octavo.E4M3))
    assert lost == Statistics(amax=0.0, underflow=0.0, saturation=0.0, nonfinite=3, sqnr_db=math.inf)


@pytest.mark.parametrize("shape", [(0,), (0, 16), (4, 0), (2, 0, 3)])
def test_nothing_has_no_figures(shape) -> None:
    x = torch.zeros(shape)
    nothing = Statistics(amax=0.0, underflow=0.0, saturation=0.0, nonfinite=0, sqnr_db=math.inf)
    assert statistics(x, octavo.quantize(x, octavo.E4M3)) == nothing


def test_the_ends_of_the_decibel_scale() -> None:
    zeros, whole = torch.zeros(8), torch.tensor([1.0, 2.0, -448.0])
    assert statistics(zeros, octavo.quantize(zeros, octavo.E4M3)).sqnr_db == math.inf
    assert statistics(whole, octavo.quantize(whole, octavo.E4M3, scale=1.0)).sqnr_db == math.inf
    lost = torch.full((4,), 1e-30)
    assert statistics(lost, octavo.quantize(lost, octavo.E4M3, scale=1.0)).sqnr_db == 0
    assert statistics(lost, octavo.quantize(lost, octavo.E4M3, scale=1.0)).underflow == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_are_compared_by_value(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    same = statistics(x.float(), octavo.quantize(x.float(), octavo.E4M3))
    assert statistics(x, octavo.quantize(x, octavo.E4M3)) == same


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"x has shape \(4, 4\) and its codes \(2, 8\)"):
        statistics(torch.randn(4, 4), octavo.quantize(torch.randn(2, 8), octavo.E4M3))
