"""cast_transpose: codes against ml_dtypes, in both layouts, from scales and from amaxes; compiled; Triton on a GPU."""

from __future__ import annotations

import math

import ml_dtypes
import numpy
import pytest
import torch
from tests.formats.edge_values import edge_matrix, random_bits
from tests.formats.oracles import ML_DTYPES
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from tests.kernels.sources import AMAX_KINDS, KINDS, RULES, Pair, given, on_cpu, rule_of
from torch import Tensor

from octavo.formats import E4M3, E4M3FNUZ, E5M2, Format
from octavo.kernels import CastOutput, ScaleRule, cast_transpose
from octavo.kernels.cast_transpose import cast_transpose_reference, unsupported_reasons
from octavo.scaling import multiplier_from_amax, scale_from_multiplier

FORMATS = [E4M3, E5M2]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ONE = torch.ones(())


def bits(codes: Tensor | None) -> Tensor:
    assert codes is not None
    assert codes.is_contiguous()
    return codes.view(torch.uint8).cpu()


def scale_bits(scale: Tensor | None) -> Tensor:
    assert scale is not None
    assert scale.dtype == torch.float32
    assert scale.is_contiguous()
    return scale.view(torch.int32).cpu()


def by_ml_dtypes(x: Tensor, format: Format, multiplier: Tensor, inf_to_nan: bool) -> Tensor:
    """Codes [M, K] by numpy and ml_dtypes: one float32 product, clipped, cast; NaN has one code."""
    values = x.float().numpy()
    with numpy.errstate(all="ignore"):
        product = values * multiplier.numpy()
        codes = numpy.clip(product, -format.max, format.max).astype(ML_DTYPES[format]).view(numpy.uint8)
    nan = numpy.isnan(product) | (numpy.isinf(values) if inf_to_nan else False)
    return torch.from_numpy(numpy.where(nan, numpy.uint8(format.nan_code), codes))


def expected_scale(source: Tensor, format: Format, rule: ScaleRule | None) -> tuple[Tensor, Tensor]:
    """(multiplier, scale), [] or a vector, by the rules of `octavo.scaling` and numpy's division."""
    if rule is None:
        with numpy.errstate(all="ignore"):
            return torch.from_numpy(numpy.asarray(numpy.float32(1) / source.numpy())), source
    whole = source if source.dim() == 2 else source.amax()
    multiplier = multiplier_from_amax(whole, format, epsilon=rule.epsilon, power_of_two=rule.power_of_two)
    return multiplier, scale_from_multiplier(multiplier)


def check(x: Tensor, format: Format, pair: Pair, rule: ScaleRule | None = None, inf_to_nan: bool = False) -> CastOutput:
    """Everything that a result must be, given what ml_dtypes makes of the same numbers."""
    gathered = torch.zeros(())
    output = cast_transpose(x, format, *pair, rule=rule, gathered=gathered, inf_to_nan=inf_to_nan)
    rows, columns = x.shape
    padded_rows, padded_columns = -(-rows // 16) * 16, -(-columns // 16) * 16
    both = ((output.codes, output.scale, pair[0], False), (output.codes_t, output.scale_t, pair[1], True))
    for codes, scale, source, transposed in both:
        if source is None:
            assert codes is None
            assert scale is None
            continue
        assert codes is not None
        assert codes.dtype == format.dtype
        multiplier, used = expected_scale(source, format, rule)
        expected = torch.zeros(padded_rows, padded_columns, dtype=torch.uint8)
        expected[:rows, :columns] = by_ml_dtypes(x, format, multiplier, inf_to_nan)
        assert torch.equal(bits(codes), expected.t() if transposed else expected)
        if source.dim() == 2:
            # What is filled up has scale 1.
            filled = torch.ones(padded_columns if transposed else padded_rows, 1)
            filled[: used.numel()] = used.reshape(-1, 1)
            used = filled
        else:
            used = used.reshape(())
        assert scale is not None
        assert scale.shape == used.shape
        assert torch.equal(scale_bits(scale), used.view(torch.int32))
    finite = x.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    assert gathered.item() == (finite.max().item() if x.numel() else 0.0)
    assert output.column_sum is None
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
            check(view, format, given(kind, x), rule_of(kind))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("kind", AMAX_KINDS)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_scales_come_from_amaxes_by_the_rule_given(format: Format, kind: str, rule: ScaleRule) -> None:
    """Of rows that are zero, below epsilon, subnormal, and near the largest float32 too."""
    x = torch.randn(21, 37)
    x[0], x[1], x[2], x[3], x[:, 5] = 0.0, x[1] * 1e-3, x[2] * 1e-41, x[3] * 5e37, -0.0
    check(x, format, given(kind, x), rule)
    check(x * 1e-30, format, given(kind, x * 1e-30), rule)


@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_every_16_bit_value_and_every_tie_is_cast_as_ml_dtypes_does(
    format: Format, dtype: torch.dtype, inf_to_nan: bool
) -> None:
    x = edge_matrix(format, dtype)
    check(x, format, (ONE, torch.tensor(2.7)), None, inf_to_nan)


def test_infinity_saturates_forward_and_is_nan_in_a_gradient() -> None:
    x = torch.tensor([[math.inf, -math.inf, math.nan, 1e30, -0.0]])
    assert bits(cast_transpose(x, E5M2, ONE, None).codes)[0, :5].tolist() == [0x7B, 0xFB, 0x7F, 0x7B, 0x80]
    gathered = torch.zeros(())
    gradient = cast_transpose(x, E5M2, ONE, ONE, gathered=gathered, inf_to_nan=True)
    assert bits(gradient.codes)[0, :5].tolist() == [0x7F, 0x7F, 0x7F, 0x7B, 0x80]
    assert bits(gradient.codes_t)[:5, 0].tolist() == [0x7F, 0x7F, 0x7F, 0x7B, 0x80]
    assert gathered.item() == torch.tensor(1e30).item()


def test_literal_scales_of_amaxes() -> None:
    x = torch.tensor([[448.0, -0.0, 224.0], [0.0, 0.0, -0.0]])
    rule = ScaleRule()
    by_row = cast_transpose(x, E4M3, torch.tensor([[448.0], [0.0]]), torch.tensor([[448.0, 0.0, 224.0]]), rule=rule)
    # An amax of 0 has scale 1: zeros stay exact zeros, and keep their sign.
    assert by_row.scale is not None
    assert by_row.scale.tolist() == [[1.0]] * 16
    assert bits(by_row.codes)[:2, :3].tolist() == [[0x7E, 0x80, 0x76], [0x00, 0x00, 0x80]]
    assert by_row.scale_t is not None
    assert by_row.scale_t[:3].tolist() == [[1.0], [1.0], [0.5]]
    assert bits(by_row.codes_t)[:3, :2].tolist() == [[0x7E, 0x00], [0x80, 0x00], [0x7E, 0x80]]
    whole = cast_transpose(x, E4M3, torch.tensor([3.0, 896.0, 5.0]), None, rule=rule)
    assert whole.scale is not None
    assert whole.scale.shape == ()
    assert whole.scale.item() == 2.0
    assert bits(whole.codes)[0, :3].tolist() == [0x76, 0x80, 0x6E]
    # 448 / 5 = 89.6: the power of two below is 64, and 5 * 64 = 320 = 1.25 * 2^8.
    power = cast_transpose(torch.full((1, 1), 5.0), E4M3, torch.tensor(5.0), None, rule=ScaleRule(power_of_two=True))
    assert power.scale is not None
    assert power.scale.item() == 1 / 64
    assert bits(power.codes)[0, 0] == 0x7A


def test_a_product_is_rounded_to_float32_before_the_cast() -> None:
    # x * m lies above the tie 1.0625 between 1 and 1.125 by less than float32 sees: on the tie it goes to 1.
    x, m = torch.tensor([[1 + 2.0**-12]]), torch.tensor(1.0625 * (1 - 2.0**-12) + 2.0**-23)
    exact = float(x) * float(m)
    product = x * m
    assert exact != product.item()
    # The scale whose reciprocal is m to the bit.
    scale = 1 / m
    assert (1 / scale).item() == m.item()
    expected = numpy.float32(product.item()).astype(ml_dtypes.float8_e4m3fn)
    found = bits(cast_transpose(x, E4M3, scale, None).codes)[0, 0]
    assert found == expected.view(numpy.uint8)


def test_subnormal_inputs_are_multiplied_and_not_flushed() -> None:
    x, scale, gathered = torch.tensor([[2.0**-140, -(2.0**-149)]]), torch.tensor(2.0**-126), torch.zeros(())
    output = cast_transpose(x, E4M3, scale, None, gathered=gathered)
    # 2^-14 and 2^-23 lie below half the least subnormal: zeros that keep their sign.
    assert bits(output.codes)[0, :2].tolist() == [0x00, 0x80]
    large = cast_transpose(x * 2.0**14, E4M3, scale, None)
    assert bits(large.codes)[0, 0] == bits(cast_transpose(torch.ones(1, 1), E4M3, ONE, None).codes)[0, 0]
    assert gathered.item() == 2.0**-140


def test_float64_is_rounded_to_float32_first() -> None:
    x = torch.randn(5, 7, dtype=torch.float64)
    s = torch.tensor(0.6)
    found = cast_transpose(x, E4M3, s, s, column_sum=True)
    expected = cast_transpose(x.float(), E4M3, s, s, column_sum=True)
    for a, b in ((found.codes, expected.codes), (found.codes_t, expected.codes_t)):
        assert torch.equal(bits(a), bits(b))
    assert found.column_sum is not None
    assert torch.equal(found.column_sum, expected.column_sum)
    gathered = torch.zeros(())
    cast_transpose(torch.tensor([[1e300, 2.0]], dtype=torch.float64), E4M3, s, None, gathered=gathered)
    assert gathered.item() == 2.0


@pytest.mark.parametrize("kind", ["shared", "row and column", "nothing", "8 partial amaxes"])
def test_the_amax_joins_what_is_gathered_by_max_in_place(kind: str) -> None:
    x = torch.tensor([[1.0, -3.0, math.nan], [math.inf, 2.0, -math.inf]])
    for start, end in ((0.0, 3.0), (2.5, 3.0), (3.0, 3.0), (7.0, 7.0)):
        gathered = torch.tensor(start)
        address = gathered.data_ptr()
        for _ in range(2):
            cast_transpose(x, E4M3, *given(kind, x), rule=rule_of(kind), gathered=gathered)
            assert gathered.item() == end
        assert gathered.data_ptr() == address
    for nothing in (torch.full((2, 3), math.nan), torch.full((2, 3), -math.inf), torch.zeros(2, 3), torch.ones(0, 3)):
        for start in (0.0, 5.0):
            gathered = torch.tensor(start)
            cast_transpose(nothing, E4M3, *given(kind, nothing), rule=rule_of(kind), gathered=gathered)
            assert gathered.item() == start


def test_scales_by_row_and_by_column_come_out_as_tensors_of_their_own() -> None:
    """Whatever becomes of those given. (One scale of the whole may come out as it is: see the module.)"""
    x, row, column = torch.randn(16, 16), torch.full((16, 1), 0.7), torch.full((1, 16), 0.3)
    output = cast_transpose(x, E4M3, row, column)
    row.fill_(9.0)
    column.fill_(9.0)
    assert output.scale is not None
    assert output.scale_t is not None
    assert torch.equal(output.scale, torch.full((16, 1), 0.7))
    assert torch.equal(output.scale_t, torch.full((16, 1), 0.3))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_column_sums_are_float32_sums_of_what_came_in(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Small integers to the bit; normal data within d 2^-24 of the sum of magnitudes, d < M additions to each term."""
    whole, x = torch.randint(-8, 9, shape).to(dtype), (torch.randn(shape) * 3).to(dtype)
    for kind in ("shared", "row and column", "nothing", "amax by row and column"):
        for _, view in memory_orders(whole):
            found = cast_transpose(view, E5M2, *given(kind, whole), rule=rule_of(kind), column_sum=True).column_sum
            assert found is not None
            assert found.dtype == torch.float32
            assert torch.equal(found, whole.double().sum(0).float())
    found = cast_transpose(x, E5M2, ONE, ONE, column_sum=True).column_sum
    assert found is not None
    exact = x.float().double()
    assert bool(((found.double() - exact.sum(0)).abs() <= shape[0] * 2.0**-24 * exact.abs().sum(0)).all())


def test_column_sums_are_those_of_infinities_too() -> None:
    """Of what came in, not of its codes: a loss scaler sees the overflow in the gradient of the bias."""
    x = torch.tensor([[math.inf, math.inf, math.nan, 1e5, -0.0], [1.0, -math.inf, 1.0, 1e5, -0.0]])
    found = cast_transpose(x, E5M2, ONE, ONE, inf_to_nan=True, column_sum=True).column_sum
    assert found is not None
    assert [str(value) for value in found.tolist()] == ["inf", "nan", "nan", "200000.0", "0.0"] or (
        [str(value) for value in found.tolist()] == ["inf", "nan", "nan", "200000.0", "-0.0"]
    )


def test_layouts_scales_and_input_share_no_memory() -> None:
    for shape in ((16, 16), (1, 1), (16, 1), (1, 16)):
        x = torch.randn(shape)
        for pair in ((ONE, ONE), (torch.ones(shape[0], 1), torch.ones(1, shape[1]))):
            output = cast_transpose(x, E4M3, *pair, column_sum=True)
            owned = {id(t): t for t in (output.codes, output.codes_t, output.scale, output.scale_t, output.column_sum)}
            given_vectors = [source for source in pair if source.dim() == 2]
            addresses = [t.untyped_storage().data_ptr() for t in (x, *given_vectors, *owned.values()) if t is not None]
            assert len(set(addresses)) == len(addresses)
            # One scale of both layouts is one tensor.
            assert (output.scale is output.scale_t) == (pair[0] is pair[1])


def test_the_input_and_the_scales_are_left_alone() -> None:
    x, scale = torch.tensor([[math.inf, math.nan, 1e9]]), torch.tensor(0.7)
    before = x.clone()
    cast_transpose(x, E5M2, scale, scale, gathered=torch.zeros(()), inf_to_nan=True, column_sum=True)
    assert torch.equal(x.view(torch.int32), before.view(torch.int32))
    assert scale.item() == torch.tensor(0.7).item()


@pytest.mark.parametrize("scale", [math.nan, 0.0, math.inf])
def test_a_scale_that_is_no_positive_number_leaves_padding_zero(scale: float) -> None:
    """NaN makes NaN; 0 has multiplier inf, so everything saturates but 0, which is NaN; inf has 0: signed zeros."""
    x = torch.tensor([[1.0, -2.0, 0.0], [-0.0, 3.0, math.nan]])
    nan = E4M3.nan_code
    expected = {
        "nan": [[nan, nan, nan], [nan, nan, nan]],
        "0.0": [[0x7E, 0xFE, nan], [nan, 0x7E, nan]],
        "inf": [[0x00, 0x80, 0x00], [0x80, 0x00, nan]],
    }[str(scale)]
    s = torch.tensor(scale)
    for pair in ((s, s), (s, s.clone()), (s.expand(2, 1), s.expand(1, 3))):
        output = cast_transpose(x, E4M3, *pair)
        assert bits(output.codes)[:2, :3].tolist() == expected
        assert bits(output.codes_t)[:3, :2].t().tolist() == expected
        for codes in (output.codes, output.codes_t):
            assert bits(codes).count_nonzero() == sum(code != 0 for row in expected for code in row)
        for used, extent in ((output.scale, 2), (output.scale_t, 3)):
            assert used is not None
            real, filled = (used[:extent], used[extent:]) if used.dim() == 2 else (used.reshape(1), None)
            assert torch.equal(real.nan_to_num(-1.0, posinf=-2.0), s.nan_to_num(-1.0, posinf=-2.0).expand_as(real))
            assert filled is None or bool((filled == 1).all())


def test_a_matrix_of_zeros_has_scale_one_and_keeps_its_signs() -> None:
    x = torch.zeros(3, 5)
    x[1] = -0.0
    for kind in AMAX_KINDS:
        rowwise, columnwise = given(kind, x)
        output = cast_transpose(x, E4M3, rowwise, columnwise, rule=ScaleRule())
        for codes, scale in ((output.codes, output.scale), (output.codes_t, output.scale_t)):
            assert (codes is None) == (scale is None)
            if codes is not None and scale is not None:
                assert bool((scale == 1).all())
                assert bits(codes).unique().tolist() == [0x00, 0x80]
                assert int((bits(codes) == 0x80).sum()) == 5


def test_fnuz_formats_take_the_reference_everywhere_and_say_why() -> None:
    reasons = unsupported_reasons(torch.ones(2, 2), E4M3FNUZ)
    assert "format E4M3FNUZ: NVIDIA's conversion instructions write E4M3 and E5M2" in reasons
    assert unsupported_reasons(torch.ones(2, 2), E4M3) == ["the tensor is on cpu: Triton kernels need a CUDA device"]
    x = with_specials(torch.randn(20, 30) * 100)
    for kind in ("shared", "amax by row and column"):
        check(x, E4M3FNUZ, given(kind, x), rule_of(kind))


def test_what_cannot_be_cast_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floating-point matrix \[M, K\], found torch.float32 of shape \(3,\)"):
        cast_transpose(torch.ones(3), E4M3, ONE, None)
    with pytest.raises(ValueError, match=r"found torch.int32 of shape \(2, 2\)"):
        cast_transpose(torch.ones(2, 2, dtype=torch.int32), E4M3, ONE, None)
    x = torch.ones(4, 6)
    for rule in (None, ScaleRule()):
        with pytest.raises(
            ValueError, match=r"rowwise has shape \(1, 6\); for x of shape \(4, 6\) it takes \[4, 1\], or \[\]"
        ):
            cast_transpose(x, E4M3, torch.ones(1, 6), None, rule=rule)
        with pytest.raises(ValueError, match=r"columnwise has shape \(4, 1\); .* it takes \[1, 6\], or \[\]"):
            cast_transpose(x, E4M3, None, torch.ones(4, 1), rule=rule)


def same_bits(x: Tensor, format: Format, kind: str, inf_to_nan: bool = False, rule: ScaleRule = RULES[0]) -> None:
    """Triton's outputs on the device and the reference's on the CPU."""
    pair, gathered, on_host = given(kind, x), torch.zeros((), device=x.device), torch.zeros(())
    found = cast_transpose(x, format, *pair, rule=rule_of(kind, rule), gathered=gathered, inf_to_nan=inf_to_nan)
    expected = cast_transpose_reference(x.cpu(), format, *on_cpu(pair), rule_of(kind, rule), on_host, inf_to_nan)
    assert torch.equal(gathered.cpu(), on_host)
    for a, b, width in zip(found[:4], expected[:4], (bits, scale_bits) * 2, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape
            assert int((width(a) != width(b)).sum()) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_triton_and_reference_agree_to_the_bit(format: Format, dtype: torch.dtype) -> None:
    assert unsupported_reasons(torch.ones(1, 1, device="cuda"), format) == []
    for shape in (*SHAPES, (128, 256), (300, 129)):
        x = with_specials(torch.randn(shape, device="cuda") * 100).to(dtype)
        for kind in KINDS:
            for _, view in memory_orders(x):
                same_bits(view, format, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("inf_to_nan", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS, ids=repr)
def test_triton_and_reference_agree_on_every_edge_and_on_ten_million_values(
    format: Format, dtype: torch.dtype, inf_to_nan: bool
) -> None:
    for x in (edge_matrix(format, dtype), random_bits((3163, 3163), dtype), torch.randn(3163, 3163).to(dtype)):
        for kind in ("row and column", "shared", "amax by row and column"):
            same_bits(x.cuda(), format, kind, inf_to_nan)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_triton_makes_the_scales_of_the_rule(rule: ScaleRule) -> None:
    x = torch.randn(300, 129, device="cuda")
    x[0], x[1], x[2], x[3], x[:, 5] = 0.0, x[1] * 1e-3, x[2] * 1e-41, x[3] * 5e37, -0.0
    for kind in AMAX_KINDS:
        for format in FORMATS:
            same_bits(x, format, kind, rule=rule)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [math.nan, 0.0, math.inf])
def test_triton_takes_a_scale_that_is_no_positive_number(scale: float) -> None:
    s = torch.tensor(scale)
    row = torch.ones(300, 1)
    row[170] = scale
    x = torch.randn(300, 129).to(torch.bfloat16)
    for pair in ((s, s), (row, s), (row, None)):
        moved = tuple(None if t is None else t.cuda() for t in pair)
        on_device = (moved[0], moved[0]) if pair[0] is pair[1] else moved
        found = cast_transpose(x.cuda(), E4M3, *on_device)
        expected = cast_transpose_reference(x, E4M3, *pair)
        for a, b in zip(found[:4], expected[:4], strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_triton_sums_columns(dtype: torch.dtype) -> None:
    """Small integers to the bit; normal data within M 2^-24 of the sum of magnitudes."""
    for shape in (*SHAPES, (300, 129), (5000, 70)):
        whole, x = torch.randint(-8, 9, shape).to(dtype), (torch.randn(shape) * 3).to(dtype)
        for _, view in memory_orders(whole.cuda()):
            found = cast_transpose(view, E5M2, *given("shared", view), column_sum=True).column_sum
            assert found is not None
            assert torch.equal(found.cpu(), whole.double().sum(0).float())
        found = cast_transpose(x.cuda(), E5M2, *given("row and column", x.cuda()), column_sum=True).column_sum
        assert found is not None
        exact = x.float().double()
        assert bool(((found.cpu().double() - exact.sum(0)).abs() <= shape[0] * 2.0**-24 * exact.abs().sum(0)).all())
