"""stochastic_cast: the layouts and scales of the nearest casts, codes by chance, the same in both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format, decode
from octavo.kernels import ScaleRule, block_cast, cast_transpose, expanded, has_blocks, partial_amax, stochastic_cast
from octavo.kernels.amax import amax_by_row_and_column
from octavo.kernels.cast_transpose import CastOutput
from octavo.kernels.stochastic_cast import stochastic_cast_reference
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, COLUMN, MX, PRODUCT_BLOCKS, ROW, TENSOR, Granularity

GRANULARITIES = [TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, MX]
SHAPES = [(24, 40), (16, 128), (130, 33), (1, 1)]


def matrix(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape) * torch.logspace(-3, 2, shape[1])
    x[0, 0] = 0.0
    return x.to(dtype)


def nearest(x: Tensor, format: Format, granularity: Granularity, rule: ScaleRule, **options: Any) -> CastOutput:
    if granularity in PRODUCT_BLOCKS:
        return block_cast(x, format, granularity, rule, **options)
    one = partial_amax(x)
    by_row, by_column = (one, one) if granularity is TENSOR else amax_by_row_and_column(x)
    return cast_transpose(x, format, by_row, by_column, rule=rule, **options)


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Of every code."""
    return decode(codes, torch.float64) * (expanded(scale, codes) if has_blocks(scale, codes.shape[0]) else scale)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scales_and_sums_are_those_of_the_nearest_cast_and_codes_are_neighbours(
    shape: tuple[int, int], granularity: Granularity, format: Format
) -> None:
    x, rule = matrix(shape), ScaleRule(power_of_two=True)
    near = nearest(x, format, granularity, rule, column_sum=True)
    by_chance = stochastic_cast(x, format, granularity, rule=rule, column_sum=True)
    assert torch.equal(near.scale.float(), by_chance.scale.float())
    assert torch.equal(near.scale_t.float(), by_chance.scale_t.float())
    assert torch.equal(near.column_sum, by_chance.column_sum)
    for one, other in ((near.codes, by_chance.codes), (near.codes_t, by_chance.codes_t)):
        assert one.shape == other.shape
        # Codes of one sign are numbered in order: a neighbour's number differs by one.
        distance = (one.view(torch.uint8).int() & 0x7F) - (other.view(torch.uint8).int() & 0x7F)
        assert distance.abs().max() <= 1
        assert x.numel() < 512 or distance.any()


@pytest.mark.parametrize("granularity", [TENSOR, BLOCK_128X128], ids=repr)
def test_under_one_scale_both_layouts_hold_the_same_codes(granularity: Granularity) -> None:
    made = stochastic_cast(matrix((48, 160)), E5M2, granularity, rule=ScaleRule())
    assert torch.equal(made.codes[:48, :160].view(torch.uint8), made.codes_t[:160, :48].t().view(torch.uint8))


@pytest.mark.parametrize("granularity", [ROW, BLOCK_1X128, MX], ids=repr)
def test_an_element_has_one_random_number_for_both_layouts(granularity: Granularity) -> None:
    # Of a matrix of one magnitude, all scales are one.
    x = torch.where(torch.rand(48, 160) < 0.5, 1.0, 0.3)
    x[:, ::16], x[::16] = 1.0, 1.0
    made = stochastic_cast(x, E4M3, granularity, rule=ScaleRule(power_of_two=True))
    assert torch.equal(made.codes[:48, :160].view(torch.uint8), made.codes_t[:160, :48].t().view(torch.uint8))


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_the_seed_decides_and_the_reference_says_how(granularity: Granularity) -> None:
    x, rule = matrix((32, 64), torch.bfloat16), ScaleRule()
    torch.manual_seed(5)
    first = stochastic_cast(x, E4M3, granularity, rule=rule)
    second = stochastic_cast(x, E4M3, granularity, rule=rule)
    torch.manual_seed(5)
    again = stochastic_cast(x, E4M3, granularity, rule=rule)
    assert torch.equal(first.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert not torch.equal(first.codes.view(torch.uint8), second.codes.view(torch.uint8))
    torch.manual_seed(5)
    uniform = torch.rand(32, 64, dtype=torch.float64)
    reference = stochastic_cast_reference(x, E4M3, granularity, rule, None, uniform)
    assert torch.equal(reference[0].view(torch.uint8), first.codes.view(torch.uint8))
    assert torch.equal(reference[2].view(torch.uint8), first.codes_t.view(torch.uint8))


def test_one_layout_alone_is_rounded_as_both_are() -> None:
    x, casts = matrix((32, 48)), []
    for rowwise, columnwise in ((True, True), (True, False), (False, True)):
        torch.manual_seed(2)
        casts.append(stochastic_cast(x, E4M3, ROW, rule=ScaleRule(), rowwise=rowwise, columnwise=columnwise))
    both, row, column = casts
    assert torch.equal(both.codes.view(torch.uint8), row.codes.view(torch.uint8))
    assert torch.equal(both.codes_t.view(torch.uint8), column.codes_t.view(torch.uint8))
    assert row.codes_t is column.codes is None


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_the_mean_is_the_value(granularity: Granularity) -> None:
    n, x = 400, matrix((16, 32))
    total = torch.zeros(16, 32, dtype=torch.float64)
    for _ in range(n):
        made = stochastic_cast(x, E4M3, granularity, rule=ScaleRule(power_of_two=True), columnwise=False)
        total += values(made.codes, made.scale)[:16, :32]
    # The mean of n draws between neighbours of distance d lies within 6 standard deviations, at most d / 2 / sqrt(n)
    # each; rounding to nearest would miss by up to d / 2.
    scale = values(torch.ones(made.codes.shape).to(E4M3.dtype), made.scale)[:16, :32]
    exponent = torch.floor(torch.log2((x.double().abs() / scale).clamp(min=E4M3.min_normal)))
    distance = torch.exp2(exponent - E4M3.mantissa_bits) * scale
    assert ((total / n - x.double()).abs() <= 3 * distance / n**0.5).all()


def test_what_is_not_finite_is_as_in_the_nearest_cast() -> None:
    x = torch.ones(16, 16)
    x[0, :4] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    for inf_to_nan in (False, True):
        near = nearest(x, E5M2, TENSOR, ScaleRule(), inf_to_nan=inf_to_nan)
        made = stochastic_cast(x, E5M2, TENSOR, rule=ScaleRule(), inf_to_nan=inf_to_nan)
        assert torch.equal(made.codes[0, :4].view(torch.uint8), near.codes[0, :4].view(torch.uint8))


def test_a_given_scale_is_taken_and_given_back() -> None:
    scale = torch.tensor(0.37)
    made = stochastic_cast(matrix((16, 16)), E4M3, TENSOR, scale=scale)
    assert torch.equal(made.scale, scale)
    assert made.scale is not scale


def test_an_empty_matrix_has_no_codes() -> None:
    made = stochastic_cast(torch.empty(0, 16), E4M3, TENSOR, rule=ScaleRule())
    assert made.codes.shape == (0, 16)
    assert made.codes_t.shape == (16, 0)


@pytest.mark.parametrize(
    ("x", "granularity", "options", "message"),
    [
        (torch.ones(2, 2, dtype=torch.int32), TENSOR, {"rule": ScaleRule()}, "floating-point matrix"),
        (torch.ones(2), TENSOR, {"rule": ScaleRule()}, "floating-point matrix"),
        (torch.ones(2, 2), COLUMN, {"rule": ScaleRule()}, "granularity is column"),
        (torch.ones(2, 2), TENSOR, {}, "give a rule, or one scale"),
        (torch.ones(2, 2), ROW, {"scale": torch.ones(())}, "give a rule, or one scale"),
    ],
)
def test_what_does_not_fit_is_refused(x: Tensor, granularity: Granularity, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stochastic_cast(x, E4M3, granularity, **options)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("layouts", [(True, True), (True, False), (False, True)], ids=str)
def test_compiled_code_makes_the_same_codes_of_the_same_seed(
    granularity: Granularity, layouts: tuple[bool, bool]
) -> None:
    x = matrix((24, 40))

    def cast(x: Tensor) -> CastOutput:
        return stochastic_cast(
            x, E5M2, granularity, rule=ScaleRule(), rowwise=layouts[0], columnwise=layouts[1], column_sum=True
        )

    torch._dynamo.reset()
    torch.manual_seed(3)
    expected = cast(x)
    compiled = torch.compile(cast, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    for one, other in zip(expected, compiled(x), strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(decode(one), decode(other))


def test_the_compiler_knows_that_it_draws() -> None:
    assert torch.Tag.nondeterministic_seeded in torch.ops.octavo.stochastic_cast.default.tags
    arguments = (torch.randn(16, 16), "E4M3", "row", None, *ScaleRule(), True, True, True, True)
    torch.library.opcheck(
        torch.ops.octavo.stochastic_cast.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_a_gpu_makes_the_codes_that_the_same_numbers_make_on_a_cpu(granularity: Granularity) -> None:
    x, uniform = matrix((48, 160)), torch.rand(48, 160, dtype=torch.float64)
    expected = stochastic_cast_reference(x, E5M2, granularity, ScaleRule(), None, uniform)
    found = stochastic_cast_reference(x.cuda(), E5M2, granularity, ScaleRule(), None, uniform.cuda())
    for one, other in zip(expected[:4], found[:4], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(decode(one), decode(other.cpu()))


@pytest.mark.gpu
def test_each_replay_of_a_cuda_graph_draws_anew_and_the_seed_decides() -> None:
    x = matrix((48, 160)).cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stochastic_cast(x, E5M2, TENSOR, rule=ScaleRule())
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = stochastic_cast(x, E5M2, TENSOR, rule=ScaleRule())
    seen = []
    for seed in (1, None, 1):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        seen.append(decode(made.codes).clone())
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
