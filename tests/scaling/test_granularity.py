"""Which elements share a scale, and the amax of each block against a loop that anyone can check."""

from __future__ import annotations

import math
import pickle

import hypothesis
import pytest
import torch
from hypothesis import strategies
from torch import Tensor

from octavo.scaling import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    COLUMN,
    MX,
    ROW,
    TENSOR,
    Granularity,
    as_matrix,
    block_amax,
    expand_scale,
    granularity_named,
)
from octavo.scaling.granularity import GRANULARITIES

SHAPES = [(1, 1), (5, 7), (32, 32), (128, 128), (130, 257), (1, 300), (300, 1), (129, 31)]


def block_of(granularity: Granularity, row: int, column: int) -> tuple[int, int]:
    """Which block an element belongs to."""
    return (
        0 if granularity.rows is None else row // granularity.rows,
        0 if granularity.columns is None else column // granularity.columns,
    )


def amax_by_loop(x: Tensor, granularity: Granularity) -> dict[tuple[int, int], float]:
    found: dict[tuple[int, int], float] = {}
    for row, values in enumerate(x.double().tolist()):
        for column, value in enumerate(values):
            block = block_of(granularity, row, column)
            magnitude = abs(value) if math.isfinite(value) else 0.0
            found[block] = max(found.get(block, 0.0), magnitude)
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_the_amax_of_each_block_is_that_of_a_loop(granularity: Granularity, shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    x[torch.rand(shape) < 0.2] = 0
    special = torch.rand(shape)
    x[special < 0.05] = math.nan
    x[special > 0.95] = -math.inf
    x[special > 0.98] = math.inf
    found = block_amax(x, granularity)
    expected = amax_by_loop(x, granularity)
    assert found.shape == granularity.scale_shape(shape)
    assert found.dtype == torch.float32
    assert found.numel() == len(expected)
    for (row, column), value in expected.items():
        assert found[row, column].item() == value


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_a_block_without_a_finite_value_has_amax_zero(granularity: Granularity) -> None:
    for value in (0.0, -0.0, math.inf, -math.inf, math.nan):
        found = block_amax(torch.full((3, 130), value), granularity)
        assert (found == 0).all()
        assert not found.signbit().any()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_an_empty_matrix_has_zeros_of_the_right_shape(granularity: Granularity, shape: tuple[int, int]) -> None:
    found = block_amax(torch.ones(shape), granularity)
    assert found.shape == granularity.scale_shape(shape)
    assert found.dtype == torch.float32
    assert (found == 0).all()


def test_the_smallest_and_largest_float32_survive() -> None:
    for value in (2.0**-149, torch.finfo(torch.float32).max):
        assert block_amax(torch.tensor([[0.0, -value]]), TENSOR).item() == value


def test_a_float64_beyond_float32_counts_as_infinite() -> None:
    x = torch.tensor([[1e300, 2.0, -3.0]], dtype=torch.float64)
    assert block_amax(x, TENSOR).item() == 3.0


def test_scale_shapes_count_partial_blocks() -> None:
    shapes = {g: g.scale_shape((130, 257)) for g in GRANULARITIES}
    assert shapes[TENSOR] == (1, 1)
    assert shapes[ROW] == (130, 1)
    assert shapes[COLUMN] == (1, 257)
    assert shapes[BLOCK_1X128] == (130, 3)
    assert shapes[BLOCK_128X1] == (2, 257)
    assert shapes[BLOCK_128X128] == (2, 3)
    assert shapes[MX] == (130, 9)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_an_expanded_scale_gives_each_element_its_own_blocks(granularity: Granularity, shape: tuple[int, int]) -> None:
    tall, wide = granularity.scale_shape(shape)
    scale = torch.arange(float(tall * wide)).reshape(tall, wide)
    expanded = expand_scale(scale, granularity, shape).expand(shape)
    rows = torch.arange(shape[0]) // (granularity.rows or shape[0])
    columns = torch.arange(shape[1]) // (granularity.columns or shape[1])
    assert torch.equal(expanded, scale[rows][:, columns])


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_transposing_the_matrix_transposes_the_blocks(granularity: Granularity) -> None:
    x = torch.randn(130, 257)
    assert torch.equal(block_amax(x.t(), granularity.transposed), block_amax(x, granularity).t())
    assert granularity.transposed.transposed is granularity


@hypothesis.given(
    shape=strategies.lists(strategies.integers(0, 4), min_size=0, max_size=4),
)
def test_any_tensor_is_seen_as_the_matrix_of_its_last_dimension(shape: list[int]) -> None:
    x = torch.arange(float(math.prod(shape))).reshape(shape)
    matrix = as_matrix(x)
    assert matrix.shape == (math.prod(shape[:-1]), shape[-1] if shape else 1)
    assert torch.equal(matrix.flatten(), x.flatten())


def test_granularities_have_the_names_and_extents_that_users_write() -> None:
    expected = {
        "tensor": TENSOR, "row": ROW, "column": COLUMN, "mx": MX,
        (1, 128): BLOCK_1X128, (128, 1): BLOCK_128X1, (128, 128): BLOCK_128X128,
    }  # fmt: skip
    for name, granularity in expected.items():
        assert granularity_named(name) is granularity  # type: ignore[arg-type]
        assert granularity_named(granularity) is granularity
        assert pickle.loads(pickle.dumps(granularity)) is granularity


@pytest.mark.parametrize("unknown", ["token", (1, 64), (1, 32), (128,), 128], ids=str)
def test_an_unknown_granularity_is_refused_with_the_known_ones(unknown: object) -> None:
    with pytest.raises(ValueError, match=r"unknown granularity .*'tensor', 'row', 'column', 'mx', \(1, 128\)"):
        granularity_named(unknown)  # type: ignore[arg-type]
