"""scaled_mm: the emulation against exact products in float64, the operator, and the native product on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, Format, cast, decode
from octavo.kernels import runs_natively, scaled_mm
from octavo.kernels.scaled_mm import scaled_mm_reference, unsupported_reasons
from octavo.kernels.scaled_mm.native import scaled_mm_native

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)]


def operands(
    shape: tuple[int, int, int], formats: tuple[Format, Format] = (E4M3, E4M3), by_row: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, inner, columns = shape
    a, b = cast(torch.randn(rows, inner) * 8, formats[0]), cast(torch.randn(columns, inner) * 8, formats[1])
    if by_row:
        return a, b, torch.rand(rows, 1) + 0.5, torch.rand(columns, 1) + 0.5
    return a, b, torch.tensor(0.013), torch.tensor(0.7)


def exact(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The product in float64, and the sum of the magnitudes that it was made of."""
    scales = scale_a.double() * (scale_b.double().t() if scale_b.dim() else scale_b.double())
    a64, b64 = decode(a, torch.float64), decode(b, torch.float64)
    addend = torch.zeros(()) if bias is None else bias.double()
    return (a64 @ b64.t()) * scales + addend, (a64.abs() @ b64.abs().t()) * scales + addend.abs()


def bound(value: Tensor, magnitude: Tensor, inner: int, dtype: torch.dtype) -> Tensor:
    """How far a float32 sum of K exact products may be from its value.

    A product of two codes has at most 8 significant bits and is exact in float32. Of any order of summation the error
    is at most (K - 1) u / (1 - (K - 1) u) of the sum of magnitudes, u = 2^-24 (Higham 2002, 4.2). The two products with
    scales and the sum with the bias add one u each; then the output is rounded: half an eps of the value, or, below
    the dtype's normal numbers, half its least subnormal.
    """
    roundings = inner + 3
    unit = 2.0**-24
    info = torch.finfo(dtype)
    accumulated = magnitude * (roundings * unit / (1 - roundings * unit))
    return accumulated + (value.abs() + accumulated) * info.eps / 2 + info.tiny * info.eps / 2


@pytest.mark.parametrize("shape", [(16, 32, 16), (7, 129, 5), (1, 1, 1), (64, 4096, 48)], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_emulation_is_the_exact_product_but_for_float32_sums(
    dtype: torch.dtype, by_row: bool, shape: tuple[int, int, int]
) -> None:
    for formats, with_bias in itertools.product(PAIRS, (False, True)):
        arguments = operands(shape, formats, by_row)
        bias = torch.randn(shape[2]).to(torch.bfloat16) if with_bias else None
        found = scaled_mm(*arguments, bias=bias, out_dtype=dtype)
        value, magnitude = exact(*arguments, bias)
        assert found.dtype == dtype
        finite = value.abs() < torch.finfo(dtype).max
        assert finite.all()
        assert ((found.double() - value).abs() <= bound(value, magnitude, shape[1], dtype)).all()


def test_a_literal_product() -> None:
    a = cast(torch.tensor([[1.0, 2.0], [-3.0, 0.5]]), E4M3)
    b = cast(torch.tensor([[4.0, 1.0], [0.0, 8.0], [2.0, 2.0]]), E5M2)
    out = scaled_mm(a, b, torch.tensor(0.5), torch.tensor(2.0), torch.tensor([0.0, 1.0, -1.0]), torch.float32)
    assert out.tolist() == [[6.0, 17.0, 5.0], [-11.5, 5.0, -6.0]]
    by_row = scaled_mm(a, b, torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [0.5], [4.0]]), out_dtype=torch.float32)
    assert by_row.tolist() == [[6.0, 8.0, 24.0], [-23.0, 4.0, -40.0]]


def test_the_output_is_rounded_once_after_the_bias() -> None:
    # 257 is half-way between bf16 neighbours 256 and 258 and goes to 256; with the bias it is 257.5, which goes to 258.
    a, b, one = cast(torch.tensor([[1.0, 256.0]]), E4M3), cast(torch.ones(1, 2), E4M3), torch.ones(())
    assert scaled_mm(a, b, one, one).item() == 256.0
    assert scaled_mm(a, b, one, one, torch.tensor([0.5])).item() == 258.0


def test_special_codes_reach_the_output() -> None:
    one = torch.ones(())
    a = torch.tensor([[0x7C, 0x3C], [0x7F, 0x3C], [0x3C, 0x3C]], dtype=torch.uint8).view(E5M2.dtype)
    b = cast(torch.ones(1, 2), E4M3)
    out = scaled_mm(a, b, one, one, out_dtype=torch.float32)
    assert out[0].isinf()
    assert out[1].isnan()
    assert out[2].item() == 2.0


@pytest.mark.parametrize("shape", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_an_empty_product_is_zero_or_the_bias(shape: tuple[int, int, int]) -> None:
    arguments = operands(shape)
    bias = torch.randn(shape[2])
    assert torch.equal(scaled_mm(*arguments, out_dtype=torch.float32), torch.zeros(shape[0], shape[2]))
    assert torch.equal(scaled_mm(*arguments, bias, torch.float32), bias.expand(shape[0], shape[2]))


@pytest.mark.parametrize("by_row", [False, True])
def test_compiled_into_one_graph_it_gives_the_same(by_row: bool) -> None:
    torch._dynamo.reset()

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
        return scaled_mm(a, b, scale_a, scale_b, bias, torch.float16, "precise") + 1

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    arguments = (*operands((32, 64, 48), by_row=by_row), torch.randn(48))
    assert torch.equal(compiled(*arguments), product(*arguments))


def test_the_operator_describes_itself_rightly() -> None:
    for by_row, bias in itertools.product((False, True), (None, torch.randn(48))):
        arguments = (*operands((32, 64, 48), by_row=by_row), bias, torch.bfloat16, "fast")
        # The schema's own check computes with its inputs, which codes do not allow.
        torch.library.opcheck(torch.ops.octavo.scaled_mm.default, arguments, test_utils="test_faketensor")


def test_every_rule_that_a_native_product_would_break_is_named() -> None:
    a, b = torch.zeros(5, 17).to(E5M2.dtype), torch.zeros(9, 17).to(E5M2.dtype)
    assert unsupported_reasons(a, b) == [
        "cpu has no FP8 matrix units",
        "E5M2 x E5M2: cuBLASLt has no such product, one operand must be E4M3",
        "K = 17 is no multiple of 16",
        "N = 9 is no multiple of 16",
    ]
    a = torch.zeros(16, 16).to(E4M3FNUZ.dtype)
    assert "FP8 units multiply E4M3 and E5M2" in unsupported_reasons(a, a)[1]
    assert not runs_natively(a, a)


@pytest.mark.gpu
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("formats", PAIRS[:3], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_product_is_exact_where_its_accumulator_is(
    dtype: torch.dtype, formats: tuple[Format, Format], by_row: bool
) -> None:
    # Small integers with K = 32: every product and every partial sum is an integer below 2^13, which Hopper's
    # accumulator, with 13 bits below the largest term, holds exactly. Scales are powers of two. So nothing is rounded
    # but the output.
    a = torch.randint(-3, 4, (64, 32), device="cuda").float().to(formats[0].dtype)
    b = torch.randint(-3, 4, (48, 32), device="cuda").float().to(formats[1].dtype)
    scale_a, scale_b = torch.tensor(0.5, device="cuda"), torch.tensor(4.0, device="cuda")
    if by_row:
        scale_a, scale_b = (torch.exp2(torch.randint(-2, 3, (n, 1), device="cuda").float()) for n in (64, 48))
    bias = torch.randint(-4, 5, (48,), device="cuda").to(torch.bfloat16)
    assert runs_natively(a, b)
    for addend in (None, bias):
        for accumulate in ("fast", "precise"):
            found = scaled_mm(a, b, scale_a, scale_b, addend, dtype, accumulate)  # type: ignore[arg-type]
            on_cpu = [t.cpu() for t in (a, b, scale_a, scale_b)]
            value, _ = exact(*on_cpu, None if addend is None else addend.cpu())
            assert torch.equal(found.cpu(), value.to(dtype))


@pytest.mark.parametrize("by_row", ["a", "b"])
def test_one_scale_by_one_a_row_is_the_product_of_two_by_row(by_row: str) -> None:
    a, b, scale_a, scale_b = operands((32, 64, 48), by_row=True)
    one = torch.tensor(0.25)
    mixed = (scale_a, one) if by_row == "a" else (one, scale_b)
    rows = [scale.expand(n, 1) for scale, n in zip(mixed, (32, 48), strict=True)]
    for bias in (None, torch.randn(48)):
        assert torch.equal(scaled_mm(a, b, *mixed, bias, torch.float32), scaled_mm(a, b, *rows, bias, torch.float32))


@pytest.mark.parametrize("by_row", ["a", "b"])
def test_what_is_mixed_reaches_cublaslt_by_row(by_row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *others: object, **more: object) -> Tensor:
        seen.append((tuple(scale_a.shape), tuple(scale_b.shape), scale_a.is_contiguous(), scale_b.is_contiguous()))
        return torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    a, b, scale_a, scale_b = operands((32, 64, 48), by_row=True)
    one = torch.tensor(0.25)
    mixed = (scale_a, one) if by_row == "a" else (one, scale_b)
    scaled_mm_native(a, b, *mixed, None, torch.bfloat16, "precise")
    assert seen == [((32, 1), (1, 48), True, True)]


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("by_row", ["a", "b"])
def test_a_native_product_of_one_scale_by_one_a_row(by_row: str, biased: bool, out_dtype: torch.dtype) -> None:
    a = torch.randint(-3, 4, (64, 32), device="cuda").float().to(E4M3.dtype)
    b = torch.randint(-3, 4, (48, 32), device="cuda").float().to(E4M3.dtype)
    one = torch.tensor(0.5, device="cuda")
    of_rows = torch.exp2(torch.randint(-2, 3, (64 if by_row == "a" else 48, 1), device="cuda").float())
    mixed = (of_rows, one) if by_row == "a" else (one, of_rows)
    bias = torch.randint(-4, 5, (48,), device="cuda").to(torch.bfloat16) if biased else None
    # Small integers: every sum is exact.
    expected = scaled_mm_reference(a, b, *mixed, bias, out_dtype)
    assert torch.equal(scaled_mm(a, b, *mixed, bias, out_dtype), expected)
