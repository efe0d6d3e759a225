"""block_cast: its reference against octavo.quantize and by hand, and on a GPU both alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.formats.edge_values import edge_matrix
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

import octavo
from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule, padded
from octavo.kernels.block_cast import (
    block_cast,
    block_cast_reference,
    expanded,
    has_blocks,
    is_by_row,
    lay_out,
    scale_shape,
    unsupported_reasons,
    whole_blocks,
)
from octavo.scaling import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, Granularity

GRANULARITIES = [BLOCK_1X128, BLOCK_128X128]
LARGER = [(128, 128), (130, 300), (257, 127), (640, 33), (16, 1024)]
POWER_OF_TWO = ScaleRule(power_of_two=True)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    return with_specials(torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())).to(dtype)


def assert_bits(a: Tensor, b: Tensor) -> None:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    width = torch.uint8 if a.dtype.itemsize == 1 else torch.int32
    assert torch.equal(a.contiguous().view(width), b.contiguous().view(width))


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGER], ids=str)
def test_codes_and_scales_are_those_of_quantize(shape: tuple[int, int], dtype: torch.dtype, power_of_two: bool) -> None:
    """Both layouts of both granularities, bit for bit; what pads is the code zero, and the scale one."""
    x, (rows, columns) = matrix(shape, dtype), shape
    rule = ScaleRule(power_of_two=power_of_two)
    for granularity, across in ((BLOCK_1X128, BLOCK_128X1), (BLOCK_128X128, BLOCK_128X128)):
        codes, scale, codes_t, scale_t, _ = block_cast(x, E4M3, granularity, rule)
        assert codes is not None
        assert scale is not None
        assert codes_t is not None
        assert scale_t is not None
        q = octavo.quantize(x, E4M3, granularity, power_of_two=power_of_two)
        q_t = octavo.quantize(x, E4M3, across, power_of_two=power_of_two)
        assert_bits(codes[:rows, :columns], q.codes)
        assert_bits(codes_t[:columns, :rows], q_t.codes.t())
        for laid, expected in ((scale, q.scale), (scale_t, q_t.scale.t())):
            tall, wide = expected.shape
            own = laid[:wide, :tall].t() if granularity is BLOCK_1X128 else laid[:tall, :wide]
            assert_bits(own, expected)
        assert codes.shape == (padded(rows), whole_blocks(columns))
        assert codes_t.shape == (padded(columns), whole_blocks(rows))
        assert not codes.view(torch.uint8)[rows:].any()
        assert not codes.view(torch.uint8)[:, columns:].any()
        assert not codes_t.view(torch.uint8)[columns:].any()
        assert not codes_t.view(torch.uint8)[:, rows:].any()
        ones = scale[:, rows:] if granularity is BLOCK_1X128 else scale[:, (columns + 127) // 128 :]
        assert bool((ones == 1).all())
        assert all(out.is_contiguous() for out in (codes, scale, codes_t, scale_t))


def test_a_matrix_by_hand() -> None:
    """Rows of one value: 3 needs the multiplier 128 (448 / 3 = 149.3), 448 the multiplier 1, 500 one half."""
    x = torch.ones(3, 130) * torch.tensor([[3.0], [448.0], [500.0]])
    x[0, 129] = -0.75  # in a block of its own with one 3: still 128
    codes, scale, codes_t, scale_t, sums = block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, column_sum=True)
    assert codes is not None
    assert scale is not None
    assert codes_t is not None
    assert scale_t is not None
    assert sums is not None
    assert scale.tolist() == [[1 / 128, 1.0, 2.0, *[1.0] * 13]] * 2
    assert codes[:3, 0].float().tolist() == [384.0, 448.0, 256.0]  # 250 is nearer to 256 than to 240
    assert codes[0, 128:131].float().tolist() == [384.0, -96.0, 0.0]
    # Along columns the largest is 500 in every one: one half.
    assert scale_t[0, :130].eq(2.0).all()
    assert codes_t[129, :4].float().tolist() == [-0.375, 224.0, 256.0, 0.0]
    assert sums[[0, 129]].tolist() == [951.0, 947.25]
    square = block_cast(x, E4M3, BLOCK_128X128, POWER_OF_TWO)
    assert square.scale is not None
    assert square.scale_t is not None
    assert square.scale.tolist() == [[2.0, 2.0, 1.0, 1.0]]
    assert square.scale_t.tolist() == [[2.0, 1.0, 1.0, 1.0]] * 2


def test_blocks_of_a_weight_are_the_same_codes_in_both_layouts() -> None:
    codes, scale, codes_t, scale_t, _ = block_cast(matrix((300, 200)), E4M3, BLOCK_128X128, POWER_OF_TWO)
    assert codes is not None
    assert codes_t is not None
    assert scale is not None
    assert scale_t is not None
    assert_bits(codes[:300, :200], codes_t[:200, :300].t())
    assert torch.equal(scale[:, :2].t(), scale_t[:, :3])


def test_what_is_not_finite() -> None:
    """It decides no scale; NaN stays NaN, inf saturates, or in a gradient becomes NaN; sums see it as it is."""
    x = torch.ones(4, 256)
    x[0, 0], x[1, 1], x[2, 2] = float("inf"), -float("inf"), float("nan")
    for inf_to_nan in (False, True):
        cast = block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, inf_to_nan=inf_to_nan, column_sum=True)
        assert cast.codes is not None
        assert cast.codes_t is not None
        assert cast.column_sum is not None
        for codes in (cast.codes.float(), cast.codes_t.t().float()):
            found = [codes[0, 0].item(), codes[1, 1].item()]
            assert all(value != value for value in found) if inf_to_nan else found == [448.0, -448.0]
            assert codes[2, 2].isnan()
            assert codes[:, 3].tolist()[:4] == [256.0] * 4
        assert cast.column_sum[[0, 1]].tolist() == [float("inf"), -float("inf")]
        assert cast.column_sum[2].isnan()
        assert cast.column_sum[3] == 4.0


def test_only_what_is_asked_for() -> None:
    x = matrix((20, 40))
    whole = block_cast(x, E5M2, BLOCK_1X128, POWER_OF_TWO, column_sum=True)
    for rowwise, columnwise in ((True, False), (False, True), (False, False)):
        part = block_cast(x, E5M2, BLOCK_1X128, POWER_OF_TWO, rowwise, columnwise)
        assert part.column_sum is None
        for out, expected, wanted in zip(part[:4], whole[:4], [rowwise] * 2 + [columnwise] * 2, strict=True):
            assert (out is not None) == wanted
            if out is not None and expected is not None:
                assert_bits(out, expected)


def test_codes_share_no_memory_with_one_another() -> None:
    cast = block_cast(torch.randn(128, 128), E4M3, BLOCK_128X128, POWER_OF_TWO)
    assert len({out.data_ptr() for out in cast if out is not None}) == 4


def test_compiled_it_is_what_it_is() -> None:
    torch._dynamo.reset()

    def call(x: Tensor) -> Any:
        return block_cast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, inf_to_nan=True, column_sum=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for shape in ((40, 130), (56, 130), (5, 3)):
        x = matrix(shape)
        for a, b in zip(compiled(x), call(x), strict=True):
            assert_bits(a, b)


def test_layouts_are_told_by_their_shape() -> None:
    """Whatever the extents, a scale of 128x128 never looks like one of 1x128, nor either like one a row."""
    for rows in range(16, 1200, 16):
        for columns in range(128, 1300, 128):
            codes = torch.empty(rows, columns, dtype=E4M3.dtype, device="meta")
            by_row, square = (
                torch.empty(scale_shape(rows, columns, granularity), device="meta") for granularity in GRANULARITIES
            )
            assert is_by_row(by_row, codes)
            assert not is_by_row(square, codes)
            assert has_blocks(by_row, rows)
            assert not has_blocks(torch.empty(rows, 1, device="meta"), rows)
    assert not has_blocks(torch.ones(()), 16)


def test_expanded_scales_times_codes_are_the_values() -> None:
    x = torch.randn(150, 300)
    for granularity in GRANULARITIES:
        cast = block_cast(x, E4M3, granularity, ScaleRule())
        assert cast.codes is not None
        assert cast.scale is not None
        values = cast.codes.float() * expanded(cast.scale, cast.codes)
        assert torch.equal(values[:150, :300], octavo.quantize(x, E4M3, granularity).dequantize())


def test_bad_input_is_named() -> None:
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=r"floating-point matrix \[M, K\], found torch.int64 of shape \(4, 4\)"):
        block_cast(x.long(), E4M3, BLOCK_1X128, POWER_OF_TWO)
    with pytest.raises(ValueError, match=r"found torch.float32 of shape \(16,\)"):
        block_cast(x.flatten(), E4M3, BLOCK_1X128, POWER_OF_TWO)
    with pytest.raises(ValueError, match="granularity is 128x1: block-scaled products take 1x128, 128x128 or mx"):
        block_cast(x, E4M3, BLOCK_128X1, POWER_OF_TWO)
    with pytest.raises(ValueError, match="granularity is 128x1"):
        lay_out(x.to(E4M3.dtype), torch.ones(1, 4), BLOCK_128X1)
    assert "CUDA" in unsupported_reasons(x, E4M3)[0]
    assert "NVIDIA's conversion" in unsupported_reasons(x, octavo.E8M0)[1]


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_on_a_gpu_it_is_its_reference(format: Format, granularity: Granularity) -> None:
    rules = (POWER_OF_TWO, ScaleRule(), ScaleRule((1e-3).hex(), True))
    for number, dtype in enumerate(DTYPES):
        for shape in [shape for shape in (*SHAPES, *LARGER) if shape[0] and shape[1]]:
            x = matrix(shape, dtype).cuda()
            for _, view in list(memory_orders(x))[: None if shape == (17, 31) else 1]:
                arguments = (format, granularity, rules[number % 3], True, True)
                found = block_cast(view, *arguments, inf_to_nan=bool(number % 2))
                expected = block_cast_reference(view, *arguments, bool(number % 2))
                for a, b in zip(found[:4], expected[:4], strict=True):
                    assert a is not None
                    assert b is not None
                    assert_bits(a, b)
    edges = edge_matrix(format, torch.bfloat16).cuda()
    for a, b in zip(
        block_cast(edges, format, granularity, rules[0])[:4],
        block_cast_reference(edges, format, granularity, rules[0])[:4],
        strict=True,
    ):
        assert a is not None
        assert b is not None
        assert_bits(a, b)
