"""The Triton kernels of grouped_mm, run by Triton's interpreter, against their references.

The interpreter multiplies in float32, so results differ from the references' by the order of sums alone: a few ulp of
float32 of the sum of magnitudes, which 1e-5 of the largest entry covers at these depths.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.test_grouped_cast import SIZES, by_group
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.variants import Launch, compiled, stack_and_local_bytes

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.grouped_cast import grouped_cast, groups_of
from octavo.kernels.grouped_mm import triton_kernel
from octavo.kernels.grouped_mm.on_device import _by_rows_reference, _over_rows_reference

FORMATS = [(E4M3, E4M3), (E5M2, E4M3)]


def codes_of(x: Tensor, sizes: list[int], format: Format) -> tuple[Tensor, ...]:
    """(codes, scales, codes_t, scales_t [E, K', 1]) by row."""
    groups = groups_of(torch.tensor(sizes, device=x.device), x.shape[0])
    m, s, m_t, s_t = by_group(x, groups, format, True)
    codes, codes_t = grouped_cast(x, groups, format, m, m_t)
    assert codes is not None
    assert codes_t is not None
    return codes, s, codes_t, s_t[:, :, None]


def near(one: Tensor, other: Tensor, relative: float = 1e-5) -> None:
    assert one.shape == other.shape
    assert bool(one.isfinite().all())
    assert float((one - other).abs().max()) <= relative * max(float(other.abs().max()), 1.0)


@interpreted
@silent
@pytest.mark.parametrize("sizes", [*SIZES[:5], [70, 1, 140]], ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("accumulate", ["fast", "precise"])
def test_products(
    sizes: list[int], formats: tuple[Format, Format], accumulate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact_conversions(monkeypatch)
    rows, groups = sum(sizes), groups_of(torch.tensor(sizes), sum(sizes))
    x, s, x_t, s_t = codes_of(torch.randn(rows, 144), sizes, formats[0])
    w, t, _, _ = codes_of(torch.randn(3 * 32, 144), [32, 32, 32], formats[1])
    bias = torch.randn(3, 32)
    b, scale_b = w.view(torch.uint8).reshape(3, 32, 144).view(w.dtype), t.reshape(3, 32, 1)
    for added in (None, bias):
        found = triton_kernel.grouped_mm_triton(x, b, s, scale_b, added, groups.ends, torch.float32, accumulate)
        near(found, _by_rows_reference(x, b, s, scale_b, added, groups.ends, torch.float32, accumulate))
    _, _, z_t, r_t = codes_of(torch.randn(rows, 32), sizes, formats[1])
    found = triton_kernel.grouped_mm_over_rows_triton(x_t, z_t, s_t, r_t, groups.ends_t, torch.float32, accumulate)
    near(found, _over_rows_reference(x_t, z_t, s_t, r_t, groups.ends, groups.ends_t, torch.float32, accumulate))


@pytest.mark.parametrize("formats", FORMATS, ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("accumulate", ["fast", "precise"])
def test_hopper_multiplies_codes_in_registers_alone(
    formats: tuple[Format, Format], accumulate: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched = []
    monkeypatch.setattr(triton_kernel, "_launch", lambda *arguments: launched.append(arguments))
    a, b = torch.zeros(256, 512, dtype=formats[0].dtype), torch.zeros(2, 256, 512, dtype=formats[1].dtype)
    ends = torch.tensor([128, 256], dtype=torch.int32)
    scale_a, scale_b = torch.ones(256, 1), torch.ones(2, 256, 1)
    triton_kernel.grouped_mm_triton(a, b, scale_a, scale_b, None, ends, torch.bfloat16, accumulate)
    triton_kernel.grouped_mm_over_rows_triton(a, b[0], scale_b, scale_b, ends, torch.float32, accumulate)
    for kernel, _, tensors, numbers, constants, warps, _ in launched:
        variant = compiled(kernel, Launch(0, None, tensors, numbers, constants, warps))
        kinds = ".".join({E4M3: "e4m3", E5M2: "e5m2"}[format] for format in formats)
        assert "wgmma.mma_async" in variant.asm["ptx"]
        assert kinds in variant.asm["ptx"]
        assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*SIZES[:5], [700, 0, 1400]], ids=str)
@pytest.mark.parametrize("formats", FORMATS, ids=["E4M3", "E5M2"])
def test_on_a_gpu(sizes: list[int], formats: tuple[Format, Format]) -> None:
    """Hopper's accumulator is off by sqrt(11 d / 32) 2^-13 of N(0, 1) data's result in the root mean square, see
    `product_bound` of benchmarks/check_products.py; the whole differs by three times that at most."""
    rows, groups = sum(sizes), groups_of(torch.tensor(sizes, device="cuda"), sum(sizes))
    x, s, x_t, s_t = codes_of(torch.randn(rows, 144, device="cuda"), sizes, formats[0])
    _, _, z_t, r_t = codes_of(torch.randn(rows, 32, device="cuda"), sizes, formats[1])
    w, t, _, _ = codes_of(torch.randn(3 * 32, 144, device="cuda"), [32, 32, 32], formats[1])
    b, scale_b = w.view(torch.uint8).reshape(3, 32, 144).view(w.dtype), t.reshape(3, 32, 1)
    for accumulate in ("fast", "precise"):
        found = triton_kernel.grouped_mm_triton(x, b, s, scale_b, None, groups.ends, torch.float32, accumulate)
        expected = _by_rows_reference(x, b, s, scale_b, None, groups.ends, torch.float32, accumulate)
        assert float((found - expected).norm() / expected.norm()) < 3 * math.sqrt(11 * 144 / 32) * 2.0**-13
        found = triton_kernel.grouped_mm_over_rows_triton(x_t, z_t, s_t, r_t, groups.ends_t, torch.float32, accumulate)
        expected = _over_rows_reference(x_t, z_t, s_t, r_t, groups.ends, groups.ends_t, torch.float32, accumulate)
        assert float((found - expected).norm() / expected.norm()) < 3 * math.sqrt(11 * max(sizes) / 32) * 2.0**-13
