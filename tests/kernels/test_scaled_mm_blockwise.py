"""Products by block: the emulation against float64, what the native call is given, and why a device is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule, runs_natively, scaled_mm
from octavo.kernels.block_cast import block_cast
from octavo.kernels.scaled_mm import blockwise
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

KINDS = ["fprop", "dgrad", "wgrad"]
SHAPES = [(16, 128, 16), (7, 100, 33), (200, 384, 144), (130, 640, 300), (1, 1, 1), (64, 2, 257)]


def operand(x: Tensor, blocks: Any, transposed: bool, format: Format = E4M3) -> tuple[Tensor, Tensor]:
    cast = block_cast(x, format, blocks, ScaleRule(), not transposed, transposed)
    codes, scale = (cast.codes_t, cast.scale_t) if transposed else (cast.codes, cast.scale)
    assert codes is not None
    assert scale is not None
    return codes, scale


def product(kind: str, m: int, k: int, n: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """((a, b, scale_a, scale_b), the decoded operands [m, k] and [n, k] in float64), rows of many magnitudes."""
    spread = torch.exp2(torch.randint(-6, 7, (m, 1)).float())
    x, y = torch.randn(m, k) * spread, torch.randn(n, k)
    blocks = (1, 128) if kind == "wgrad" else (128, 128)
    if kind == "wgrad":
        (a, scale_a), (b, scale_b) = (operand(t.t().contiguous(), BLOCK_1X128, True) for t in (x, y))
    else:
        a, scale_a = operand(x, BLOCK_1X128, False)
        b, scale_b = operand(y.t().contiguous() if kind == "dgrad" else y, BLOCK_128X128, kind == "dgrad")
    decoded = [octavo.quantize(t, E4M3, each).dequantize(torch.float64) for t, each in ((x, (1, 128)), (y, blocks))]
    return (a, b, scale_a, scale_b), decoded[0], decoded[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_emulation_is_the_product_of_the_values(kind: str, shape: tuple[int, int, int]) -> None:
    """Each value rounded once (its scale is no power of two), then K sums: K + 3 roundings of 2^-24 of each term."""
    arguments, a, b = product(kind, *shape)
    out = scaled_mm(*arguments, None, torch.float32, "precise")
    exact = a @ b.t()
    limit = a.abs() @ b.abs().t() * (shape[1] + 3) * 2.0**-24
    assert bool(((out[: shape[0], : shape[2]].double() - exact).abs() <= limit).all())
    assert not out[shape[0] :].any()
    assert not out[:, shape[2] :].any()


def test_the_bias_is_added_before_the_one_rounding() -> None:
    arguments, *_ = product("fprop", 16, 128, 16)
    bias = torch.randn(16) * 10
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        whole = scaled_mm(*arguments, None, torch.float32)
        assert torch.equal(scaled_mm(*arguments, bias, dtype), (whole + bias).to(dtype))


def test_one_scale_a_row_is_still_one_scale_a_row() -> None:
    """Also where a single block of K would have the same numbers in another shape."""
    a, b = torch.randn(16, 128).to(E4M3.dtype), torch.randn(32, 128).to(E4M3.dtype)
    by_row, other = torch.rand(16, 1), torch.rand(32, 1)
    whole = scaled_mm(a, b, by_row, other, None, torch.float32)
    assert torch.equal(whole, (a.float() @ b.float().t()) * (by_row * other.t()))
    in_blocks = scaled_mm(a, b, by_row.t().contiguous(), other.t().contiguous(), None, torch.float32)
    # The values are rounded before they are multiplied, the products of scales are not.
    assert torch.allclose(in_blocks, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_the_same(kind: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(scaled_mm, backend="aot_eager", fullgraph=True)
    for tokens in (40, 72, 24):
        shape = (32, tokens, 48) if kind == "wgrad" else (tokens, 256, 48)
        arguments, *_ = product(kind, *shape)
        assert torch.equal(
            compiled(*arguments, None, torch.float32, "precise"), scaled_mm(*arguments, None, torch.float32, "precise")
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(256, 512, 384), (7, 100, 33), (200, 384, 144), (300, 1152, 272)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_native_call_has_the_strides_that_torch_asks_for(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    """1x128: [M, K / 128] with columns contiguous. 128x128: [K / 128 to 4, N / 128], the same."""
    arguments, *_ = product(kind, *shape)
    a, b, scale_a, scale_b = arguments
    blocks = a.shape[1] // 128
    called: list[tuple[Any, ...]] = []
    answer = torch.randn(a.shape[0], b.shape[0])

    def spy(*given: Any) -> Tensor:
        called.append(given)
        return answer.to(given[9])

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    bias = torch.randn(b.shape[0]) if with_bias else None
    out = blockwise.block_scaled_mm_native(a, b, scale_a, scale_b, bias, dtype)
    ((mat_a, mat_b, scales_a, kind_a, swizzle_a, scales_b, kind_b, swizzle_b, inside, out_dtype, dims, fast),) = called
    assert mat_a is a
    assert mat_b.shape == (a.shape[1], b.shape[0])
    assert mat_b.stride() == (1, a.shape[1])
    assert (tuple(scales_a[0].shape), scales_a[0].stride()) == ((a.shape[0], blocks), (1, a.shape[0]))
    padded = (blocks + 3) // 4 * 4
    if kind == "wgrad":
        assert (tuple(scales_b[0].shape), scales_b[0].stride()) == ((b.shape[0], blocks), (1, b.shape[0]))
    else:
        assert (tuple(scales_b[0].shape), scales_b[0].stride()) == ((padded, -(-b.shape[0] // 128)), (1, padded))
    names = torch.nn.functional.ScalingType
    assert kind_a == [names.BlockWise1x128.value]
    assert kind_b == [(names.BlockWise1x128 if kind == "wgrad" else names.BlockWise128x128).value]
    assert (swizzle_a, swizzle_b, inside, dims, fast) == ([], [], None, (), False)
    assert out_dtype == (torch.float32 if with_bias else dtype)
    assert torch.equal(out, answer.to(dtype) if bias is None else (answer + bias).to(dtype))


@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_only_a_bias_of_bfloat16_with_such_an_output_is_added_by_the_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, bias_dtype: torch.dtype
) -> None:
    arguments, *_ = product("fprop", 48, 256, 64)
    inside, answer = dtype == bias_dtype == torch.bfloat16, torch.randn(48, 64)
    bias = torch.randn(2 * 64).to(bias_dtype)[::2]
    called: list[tuple[Any, ...]] = []

    def spy(*given: Any) -> Tensor:
        called.append(given)
        return answer.to(given[9])

    monkeypatch.setattr(torch, "_scaled_mm_v2", spy)
    out = blockwise.block_scaled_mm_native(*arguments, bias, dtype)
    ((*_, handed, out_dtype, _, _),) = called
    assert (handed is not None) == inside
    if inside:
        # cuBLASLt is told where it begins and nothing of gaps.
        assert handed.is_contiguous()
        assert torch.equal(handed, bias)
    assert out_dtype == (torch.bfloat16 if inside else torch.float32)
    assert torch.equal(out, answer.to(dtype) if inside else (answer + bias.float()).to(dtype))


@pytest.mark.parametrize("kind", KINDS)
def test_torch_itself_accepts_the_call(kind: str) -> None:
    """Its checks of shapes, dtypes and strides, on tensors without data."""
    (a, b, scale_a, scale_b), *_ = product(kind, 256, 512, 384)
    out = blockwise.block_scaled_mm_native(*(t.to("meta") for t in (a, b, scale_a, scale_b)), None, torch.bfloat16)
    assert (tuple(out.shape), out.dtype) == ((256, 384), torch.bfloat16)
    with pytest.raises((RuntimeError, ValueError), match=r"scale|Scale"):
        blockwise.block_scaled_mm_native(
            *(t.to("meta") for t in (a, b, scale_a.t().contiguous(), scale_b)), None, torch.bfloat16
        )


def test_why_a_product_is_emulated() -> None:
    a, b = torch.zeros(16, 128, dtype=E4M3.dtype), torch.zeros(16, 128, dtype=E4M3.dtype)
    assert blockwise.unsupported_reasons(a, b) == ["cpu has no FP8 matrix units"]
    assert not runs_natively(a, b, torch.ones(1, 16))
    assert blockwise.shape_reasons(a, b) == []
    odd = torch.zeros(7, 100, dtype=E5M2.dtype)
    formats, *extents = blockwise.shape_reasons(odd, odd)
    assert "torch multiplies E4M3 by E4M3 only" in formats
    assert extents == [
        "M = 7 is no multiple of 16",
        "K = 100 is no multiple of 128",
        "N = 7 is no multiple of 16",
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(256, 512, 384), (7, 100, 33), (200, 384, 144), (300, 1152, 272)], ids=str)
def test_on_hopper_it_is_native_and_promoted(kind: str, shape: tuple[int, int, int]) -> None:
    """Four truncations of 33 terms to 2^-13 between promotions: sqrt(44) 2^-13 in the root mean square, which
    `benchmarks/check_products.py` derives; then bf16's rounding."""
    arguments, *_ = product(kind, *shape)
    a, b, scale_a, scale_b = (t.cuda() for t in arguments)
    reasons = blockwise.unsupported_reasons(a, b)
    if reasons:
        pytest.skip("; ".join(reasons))
    native = scaled_mm(a, b, scale_a, scale_b, None, torch.bfloat16, "precise").double()
    emulated = blockwise.block_scaled_mm_reference(a, b, scale_a, scale_b, None, torch.float32).double()
    assert float((native - emulated).norm() / emulated.norm()) <= 44**0.5 * 2.0**-13 + 2.0**-8
