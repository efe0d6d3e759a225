"""`quantize`, `cast_to_representable`: from values to codes by every granularity, with the awkward inputs first."""

from __future__ import annotations

import numpy
import pytest
import torch
from tests.measures import relative_error

import octavo
from octavo.scaling import block_amax, expand_scale, granularity_named

GRANULARITIES = ["tensor", "row", "column", (1, 128), (128, 1), (128, 128), "mx"]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", [octavo.E4M3, octavo.E5M2])
def test_case_1_zeros_come_back(granularity: object, format: octavo.Format) -> None:
    """Case 1: all zero, one zero row, one zero block: exact zeros, scales finite and positive, other rows unchanged."""
    x = torch.randn(256, 256)
    for zeroed in (slice(None), (slice(3, 4),), (slice(0, 1), slice(0, 128)), (slice(0, 128), slice(128, 256))):
        z = x.clone()
        z[zeroed] = 0.0
        q = octavo.quantize(z, format, granularity)
        back = q.dequantize()
        assert bool((back[zeroed] == 0).all())
        assert not bool(back.isnan().any())
        scale = q.scale.float()
        assert bool((scale.isfinite() & (scale > 0)).all())
    z = x.clone()
    z[3] = 0.0
    rows = [i for i in range(256) if i != 3]
    if granularity == "row":
        assert torch.equal(
            octavo.quantize(z, format, "row").dequantize()[rows], octavo.quantize(x, format, "row").dequantize()[rows]
        )


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("value", [1e-37, 1e-40])
def test_case_2_tiny_amax(granularity: object, value: float) -> None:
    """Case 2: scale and its reciprocal finite, the result near x or 0."""
    x = torch.full((128, 128), value)
    q = octavo.quantize(x, octavo.E4M3, granularity)
    scale = q.scale.float()
    assert bool((scale.isfinite() & (scale > 0) & scale.reciprocal().isfinite()).all())
    back = q.dequantize()
    # The multiplier is clamped at 2^126, so a code of 1e-37 is near 8.5 (within 1/16) and one of 1e-40 near 0.0085, a
    # subnormal of E4M3: within half of 2^-9 of it, a quarter here.
    near = ((back - x).abs() <= x * 0.25).all()
    assert bool(near) or bool((back == 0).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("format", [octavo.E4M3, octavo.E5M2])
def test_a_code_is_the_cast_of_the_scaled_value(granularity: object, format: octavo.Format) -> None:
    """To the bit: m = M / amax in float32, codes = cast(x * m), scale = 1 / m."""
    x = torch.randn(200, 300)
    q = octavo.quantize(x, format, granularity)
    blocks = granularity_named(granularity)
    if granularity == "mx":
        multiplier = q.scale.float().reciprocal()
    else:
        # NumPy's division rounds once; torch multiplies a scalar by a reciprocal.
        quotient = numpy.float32(format.max) / block_amax(x, blocks).numpy()
        multiplier = torch.from_numpy(quotient)
        assert torch.equal(q.scale.reshape(-1), torch.from_numpy(numpy.float32(1) / quotient).reshape(-1))
    codes = octavo.cast(x * expand_scale(multiplier, blocks, (200, 300)), format)
    assert torch.equal(codes.view(torch.uint8), q.codes.view(torch.uint8))


def test_a_given_scale_is_used_as_it_is() -> None:
    x = torch.tensor([1.0, 3.0, 1000.0])
    q = octavo.quantize(x, octavo.E4M3, scale=2.0)
    assert q.dequantize().tolist() == [1.0, 3.0, 896.0]
    for wrong in (0.0, -1.0, float("inf"), float("nan"), torch.ones(2)):
        with pytest.raises(ValueError, match="positive finite"):
            octavo.quantize(x, octavo.E4M3, scale=wrong)
    with pytest.raises(ValueError, match="one number for the whole tensor"):
        octavo.quantize(x, octavo.E4M3, "row", scale=2.0)


def test_power_of_two_scales_saturate_nothing() -> None:
    x = torch.randn(64, 64)
    q = octavo.quantize(x, octavo.E4M3, "row", power_of_two=True)
    mantissa, _ = torch.frexp(q.scale)
    assert bool((mantissa == 0.5).all())
    assert bool((x.abs().amax(1, keepdim=True) / q.scale <= octavo.E4M3.max).all())


def test_epsilon_raises_small_amaxes() -> None:
    x = torch.full((4, 4), 1e-3)
    assert octavo.quantize(x, octavo.E4M3, epsilon=1.0).scale.item() == pytest.approx(1 / 448)
    assert octavo.quantize(x, octavo.E4M3, epsilon=1e-6).scale.item() == pytest.approx(1e-3 / 448)


def test_what_is_no_number_in_floating_point_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floating-point.*int64"):
        octavo.quantize(torch.arange(3), octavo.E4M3)
    with pytest.raises(ValueError, match="unknown granularity 'rows'"):
        octavo.quantize(torch.ones(3), octavo.E4M3, "rows")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_representable_values_survive_the_cast_under_their_scale(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    r = octavo.cast_to_representable(x)
    assert r.dtype == dtype
    assert torch.equal(octavo.quantize(r, octavo.E4M3, scale=1.0).dequantize(), r)
    assert 0 < relative_error(x, r) < 0.05
    assert octavo.cast_to_representable(torch.tensor([3.3]), scale=4.0).item() == 3.25
    for wrong in (0.0, -2.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive"):
            octavo.cast_to_representable(x, scale=wrong)


def test_a_format_is_named_by_itself_its_dtype_or_its_name() -> None:
    x = torch.randn(5, 7)
    expected = octavo.quantize(x, octavo.E4M3)
    for name in (torch.float8_e4m3fn, "E4M3"):
        assert torch.equal(octavo.quantize(x, name), expected)
        assert torch.equal(octavo.cast(x, name).view(torch.uint8), octavo.cast(x, octavo.E4M3).view(torch.uint8))
    with pytest.raises(ValueError, match=r"unknown format 'E9M9': the known ones are E4M3"):
        octavo.quantize(x, "E9M9")
    with pytest.raises(ValueError, match=r"torch.float32 stores no eight-bit format"):
        octavo.quantize(x, torch.float32)
