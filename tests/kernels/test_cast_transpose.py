"""cast_transpose: against ml_dtypes, in both layouts; its padding; compiled; and the Triton twin on a GPU."""

from __future__ import annotations

import math

import ml_dtypes
import numpy
import pytest
import torch
from tests.formats.edge_values import edge_matrix, random_bits
from tests.formats.oracles import ML_DTYPES
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, Format
from octavo.kernels import cast_transpose
from octavo.kernels.cast_transpose import CastOutput, cast_transpose_reference, unsupported_reasons

FORMATS = [E4M3, E5M2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = ["shared", "scalars", "codes only", "transposed only", "amax only", "row and column", "row and scalar"]


def multipliers(kind: str, shape: tuple[int, ...], device: str = "cpu") -> tuple[Tensor | None, Tensor | None]:
    one, other = torch.tensor(1.7, device=device), torch.tensor(0.3, device=device)
    row = torch.rand(shape[0], 1, device=device) * 3 + 0.1
    column = torch.rand(1, shape[1], device=device) * 3 + 0.1
    return {
        "shared": (one, one),
        "scalars": (one, other),
        "codes only": (one, None),
        "transposed only": (None, other),
        "amax only": (None, None),
        "row and column": (row, column),
        "row and scalar": (row, other),
    }[kind]


def bits(codes: Tensor | None) -> Tensor:
    assert codes is not None
    assert codes.is_contiguous()
    return codes.view(torch.uint8).cpu()


def by_ml_dtypes(x: Tensor, format: Format, multiplier: Tensor, inf_to_nan: bool) -> Tensor:
    """Codes [M, K] by numpy and ml_dtypes: one float32 product, clipped, cast; NaN has one code."""
    values = x.float().numpy()
    with numpy.errstate(all="ignore"):
        product = values * multiplier.numpy()
        codes = numpy.clip(product, -format.max, format.max).astype(ML_DTYPES[format]).view(numpy.uint8)
    nan = numpy.isnan(product) | (numpy.isinf(values) if inf_to_nan else False)
    return torch.from_numpy(numpy.where(nan, numpy.uint8(format.nan_code), codes))


def check(x: Tensor, format: Format, pair: tuple[Tensor | None, Tensor | None], inf_to_nan: bool = False) -> CastOutput:
    """Everything that a result must be, given what ml_dtypes makes of the same numbers."""
    output = cast_transpose(x, format, *pair, inf_to_nan=inf_to_nan)
    rows, columns = x.shape
    padded_rows, padded_columns = -(-rows // 16) * 16, -(-columns // 16) * 16
    for codes, multiplier, transposed in ((output.codes, pair[0], False), (output.codes_t, pair[1], True)):
        if multiplier is None:
            assert codes is None
            continue
        assert codes is not None
        assert codes.dtype == format.dtype
        expected = torch.zeros(padded_rows, padded_columns, dtype=torch.uint8)
        expected[:rows, :columns] = by_ml_dtypes(x, format, multiplier, inf_to_nan)
        assert torch.equal(bits(codes), expected.t() if transposed else expected)
    finite = x.float().abs().nan_to_num(posinf=0)
    assert output.amax.shape == ()
    assert output.amax.dtype == torch.float32
    assert output.amax.item() == (finite.max().item() if x.numel() else 0.0)
    return output


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_codes_of_both_layouts_are_ml_dtypes_and_padding_is_zero(
    format: Format, kind: str, shape: tuple[int, int]
) -> None:
    for dtype in DTYPES:
        x = with_specials(torch.randn(shape) * 100).to(dtype)
        for _, view in memory_orders(x):
            check(view, format, multipliers(kind, shape))


@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_every_16_bit_value_and_every_tie_is_cast_as_ml_dtypes_does(
    format: Format, dtype: torch.dtype, inf_to_nan: bool
) -> None:
    x = edge_matrix(format, dtype)
    check(x, format, (torch.ones(()), torch.tensor(0.37)), inf_to_nan)


def test_infinity_saturates_forward_and_is_nan_in_a_gradient() -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1e30, -0.0]])
    one = torch.ones(())
    assert bits(cast_transpose(x, E5M2, one, None).codes)[0, :5].tolist() == [0x7B, 0xFB, 0x7F, 0x7B, 0x80]
    gradient = cast_transpose(x, E5M2, one, one, inf_to_nan=True)
    assert bits(gradient.codes)[0, :5].tolist() == [0x7F, 0x7F, 0x7F, 0x7B, 0x80]
    assert bits(gradient.codes_t)[:5, 0].tolist() == [0x7F, 0x7F, 0x7F, 0x7B, 0x80]
    assert gradient.amax.item() == torch.tensor(1e30).item()


def test_a_product_is_rounded_to_float32_before_the_cast() -> None:
    # x * m lies above the tie 1.0625 between 1 and 1.125 by less than float32 sees: on the tie it goes to 1.
    x, m = torch.tensor([[1 + 2.0**-12]]), torch.tensor(1.0625 * (1 - 2.0**-12) + 2.0**-23)
    exact = float(x) * float(m)
    product = x * m
    assert exact != product.item()
    expected = numpy.float32(product.item()).astype(ml_dtypes.float8_e4m3fn)
    assert cast_transpose(x, E4M3, m, None).codes.view(torch.uint8)[0, 0] == expected.view(numpy.uint8)  # type: ignore[union-attr]


def test_subnormal_inputs_are_multiplied_and_not_flushed() -> None:
    x = torch.tensor([[2.0**-140, -(2.0**-149)]])
    output = cast_transpose(x, E4M3, torch.tensor(2.0**126), None)
    # 2^-14 and 2^-23 lie below half the least subnormal: zeros that keep their sign.
    assert bits(output.codes)[0, :2].tolist() == [0x00, 0x80]
    large = cast_transpose(x * 2.0**14, E4M3, torch.tensor(2.0**126), None)
    assert bits(large.codes)[0, 0] == bits(cast_transpose(torch.ones(1, 1), E4M3, torch.ones(()), None).codes)[0, 0]
    assert output.amax.item() == 2.0**-140


def test_float64_is_rounded_to_float32_first() -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    m = torch.tensor(1.7)
    found = cast_transpose(x, E4M3, m, m)
    expected = cast_transpose(x.float(), E4M3, m, m)
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert torch.equal(bits(a), bits(b))
    assert cast_transpose(torch.tensor([[1e300, 2.0]], dtype=torch.float64), E4M3, m, None).amax.item() == 2.0


def test_layouts_and_input_share_no_memory() -> None:
    for shape in ((16, 16), (1, 1), (16, 1), (1, 16)):
        x = torch.randn(shape)
        m = torch.ones(())
        codes, codes_t, _ = cast_transpose(x, E4M3, m, m)
        assert codes is not None
        assert codes_t is not None
        assert codes.untyped_storage().data_ptr() != codes_t.untyped_storage().data_ptr()
        assert x.untyped_storage().data_ptr() not in (
            codes.untyped_storage().data_ptr(),
            codes_t.untyped_storage().data_ptr(),
        )


def test_the_input_is_left_alone() -> None:
    x = torch.tensor([[math.inf, math.nan, 1e9]])
    before = x.clone()
    cast_transpose(x, E5M2, torch.ones(()), torch.ones(()), inf_to_nan=True)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))


def test_a_multiplier_that_is_no_number_makes_nan_and_leaves_padding_zero() -> None:
    m = torch.tensor(math.nan)
    output = cast_transpose(torch.randn(3, 5), E4M3, m, m)
    assert (bits(output.codes)[:3, :5] == E4M3.nan_code).all()
    assert bits(output.codes).count_nonzero() == bits(output.codes_t).count_nonzero() == 15


def test_fnuz_formats_take_the_reference_everywhere_and_say_why() -> None:
    reasons = unsupported_reasons(torch.ones(1, 1), E4M3FNUZ)
    assert "format E4M3FNUZ: NVIDIA's conversion instructions write E4M3 and E5M2" in reasons
    assert unsupported_reasons(torch.ones(1, 1), E4M3) == ["the tensor is on cpu: Triton kernels need a CUDA device"]
    check(with_specials(torch.randn(20, 30) * 100), E4M3FNUZ, multipliers("shared", (20, 30)))


def test_what_cannot_be_cast_is_refused() -> None:
    m = torch.ones(())
    with pytest.raises(ValueError, match=r"floating-point matrix \[M, K\], found torch.float32 of shape \(3,\)"):
        cast_transpose(torch.ones(3), E4M3, m, None)
    with pytest.raises(ValueError, match=r"found torch.int32 of shape \(2, 2\)"):
        cast_transpose(torch.ones(2, 2, dtype=torch.int32), E4M3, m, None)
    x = torch.ones(4, 6)
    with pytest.raises(
        ValueError, match=r"multiplier has shape \(1, 6\); for x of shape \(4, 6\) it takes \[\] or \[4, 1\]"
    ):
        cast_transpose(x, E4M3, torch.ones(1, 6), None)
    with pytest.raises(ValueError, match=r"multiplier_t has shape \(6,\); .* it takes \[\] or \[1, 6\]"):
        cast_transpose(x, E4M3, None, torch.ones(6))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_into_one_graph_it_gives_the_same(kind: str) -> None:
    torch._dynamo.reset()

    def both(x: Tensor, m: Tensor | None, m_t: Tensor | None) -> CastOutput:
        return cast_transpose(x * 2, E4M3, m, m_t, inf_to_nan=True)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((5, 7), (33, 16), (0, 9)):
        x, pair = with_specials(torch.randn(shape)), multipliers(kind, shape)
        for found, expected in zip(compiled(x, *pair), both(x, *pair), strict=True):
            assert (found is None) == (expected is None)
            if found is not None:
                assert found.shape == expected.shape
                assert found.dtype == expected.dtype
                assert found.stride() == expected.stride()
                assert torch.equal(found.float().nan_to_num(1e9), expected.float().nan_to_num(1e9))


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_describes_itself_rightly(kind: str) -> None:
    for x in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(16, 32), torch.randn(0, 5)):
        arguments = (x, "E5M2", *multipliers(kind, x.shape), True)
        torch.library.opcheck(
            torch.ops.octavo.cast_transpose.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


def same_bits(x: Tensor, format: Format, pair: tuple[Tensor | None, Tensor | None], inf_to_nan: bool = False) -> None:
    """Triton's outputs on the device and the reference's on the CPU."""
    found = cast_transpose(x, format, *pair, inf_to_nan=inf_to_nan)
    on_cpu = [None if m is None else m.cpu() for m in pair]
    if pair[0] is pair[1]:
        on_cpu[1] = on_cpu[0]
    expected = cast_transpose_reference(x.cpu(), format, *on_cpu, inf_to_nan)
    assert torch.equal(found.amax.cpu(), expected[2])
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert int((bits(a) != bits(b)).sum()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_triton_and_reference_agree_to_the_bit(format: Format, dtype: torch.dtype) -> None:
    assert unsupported_reasons(torch.ones(1, 1, device="cuda"), format) == []
    for shape in (*SHAPES, (128, 256), (300, 129)):
        x = with_specials(torch.randn(shape, device="cuda") * 100).to(dtype)
        for kind in KINDS:
            for _, view in memory_orders(x):
                same_bits(view, format, multipliers(kind, shape, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_triton_and_reference_agree_on_every_edge_and_on_ten_million_values(
    format: Format, dtype: torch.dtype, inf_to_nan: bool
) -> None:
    for x in (edge_matrix(format, dtype), random_bits((3163, 3163), dtype), torch.randn(3163, 3163).to(dtype)):
        for kind in ("row and column", "shared"):
            same_bits(x.cuda(), format, multipliers(kind, x.shape, "cuda"), inf_to_nan)


@pytest.mark.gpu
def test_triton_makes_nan_of_a_multiplier_that_is_no_number() -> None:
    m = torch.tensor(math.nan, device="cuda")
    row = torch.ones(300, 1, device="cuda")
    row[170] = math.inf
    for pair in ((m, m), (row, m), (row, None)):
        same_bits(torch.randn(300, 129, device="cuda").to(torch.bfloat16), E4M3, pair)
