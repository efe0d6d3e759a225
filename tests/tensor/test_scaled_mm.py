"""`octavo.scaled_mm` against the exact product of the decoded codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octavo


def bound(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Of one product: K additions in float32 and the scale, each within 2^-24; then half an ulp of the output."""
    magnitude = a.double().abs() @ b.double().abs()
    half_ulp = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11}[out.dtype]
    return magnitude * ((a.shape[1] + 3) * 2.0**-24) + out.double().abs() * (half_ulp * 2)


@pytest.mark.parametrize(
    "granularities", [("tensor", "tensor"), ("row", "column"), ((1, 128), (128, 128)), ("mx", "tensor")]
)
@pytest.mark.parametrize("shape", [(16, 32, 48), (7, 133, 5), (1, 16, 1), (0, 16, 16), (16, 0, 16)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_exact_product(granularities: tuple, shape: tuple[int, int, int], out_dtype: torch.dtype) -> None:
    m, k, n = shape
    a = octavo.quantize(torch.randn(m, k), octavo.E4M3, granularities[0])
    b = octavo.quantize(torch.randn(k, n), octavo.E5M2, granularities[1])
    bias = torch.randn(n)
    out = octavo.scaled_mm(a, b, bias=bias, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    exact_a, exact_b = a.dequantize(torch.float64), b.dequantize(torch.float64)
    exact = exact_a @ exact_b + bias.double()
    limit = bound(exact_a, exact_b, out) + bias.double().abs() * 2.0**-23
    assert bool(((out.double() - exact).abs() <= limit).all())


def test_plain_codes_with_their_scales() -> None:
    a, b = torch.randn(8, 32), torch.randn(32, 24)
    qa, qb = octavo.quantize(a, octavo.E4M3, "row"), octavo.quantize(b, octavo.E4M3, "column")
    expected = octavo.scaled_mm(qa, qb, out_dtype=torch.float32)
    plain = octavo.scaled_mm(qa.codes, qb.codes, qa.scale, qb.scale, out_dtype=torch.float32)
    assert torch.equal(plain, expected)
    ta, tb = octavo.quantize(a, octavo.E4M3), octavo.quantize(b, octavo.E4M3)
    assert torch.equal(octavo.scaled_mm(ta.codes, tb, ta.scale), octavo.scaled_mm(ta, tb))


def test_an_fp8_output_is_the_cast_of_the_float32_product() -> None:
    a, b = octavo.quantize(torch.randn(8, 32), octavo.E4M3), octavo.quantize(torch.randn(32, 24), octavo.E4M3)
    scale = torch.tensor(0.125)
    codes, amax = octavo.scaled_mm(a, b, out_dtype=torch.float8_e4m3fn, out_scale=scale)
    high = octavo.scaled_mm(a, b, out_dtype=torch.float32)
    assert torch.equal(codes.view(torch.uint8), octavo.cast(high * 8, octavo.E4M3).view(torch.uint8))
    assert amax == high.abs().amax()


def test_torch_autocast_adds_no_rounding() -> None:
    a, b = octavo.quantize(torch.randn(8, 64), octavo.E4M3), octavo.quantize(torch.randn(64, 24), octavo.E4M3)
    expected = octavo.scaled_mm(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(octavo.scaled_mm(a, b, out_dtype=torch.float32), expected)


def test_what_does_not_fit_is_named() -> None:
    a, b = octavo.quantize(torch.randn(8, 32), octavo.E4M3), octavo.quantize(torch.randn(32, 24), octavo.E4M3)
    with pytest.raises(ValueError, match=r"\[M, K\] by \[K, N\], found \(8, 32\) and \(8, 32\): give b\.t\(\)$"):
        octavo.scaled_mm(a, a)
    assert octavo.scaled_mm(a, a.t()).shape == (8, 8)
    with pytest.raises(ValueError, match=r"found \(32, \d+\) and \(8, 32\)$"):
        octavo.scaled_mm(b, a)
    with pytest.raises(ValueError, match="give scale_a"):
        octavo.scaled_mm(a.codes, b)
    with pytest.raises(ValueError, match="leave scale_b out"):
        octavo.scaled_mm(a, b, scale_b=torch.ones(()))
    with pytest.raises(ValueError, match="needs out_scale"):
        octavo.scaled_mm(a, b, out_dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="out_scale belongs to an FP8 out_dtype"):
        octavo.scaled_mm(a, b, out_scale=torch.ones(()))
    with pytest.raises(ValueError, match="bias has shape"):
        octavo.scaled_mm(a, b, bias=torch.ones(8))
    with pytest.raises(ValueError, match="accumulate is 'slow'"):
        octavo.scaled_mm(a, b, accumulate="slow")
    with pytest.raises(ValueError, match=r"scale_a has shape \(4, 1\)"):
        octavo.scaled_mm(a.codes, b, torch.ones(4, 1))
