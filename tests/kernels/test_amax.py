"""amax: against numpy, of the whole, in parts, by row and by column; compiled; and the Triton twin on a GPU."""

from __future__ import annotations

import importlib
import math

import numpy
import pytest
import torch
from tests.formats.edge_values import every_value, random_bits, special_float32
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from torch import Tensor

from octavo.kernels import amax, amax_by_row_and_column, partial_amax
from octavo.kernels.amax import amax_reference, unsupported_reasons
from octavo.scaling import BLOCK_1X128, COLUMN, ROW, TENSOR, Granularity

GRANULARITIES = [TENSOR, ROW, COLUMN]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def by_numpy(x: Tensor, granularity: Granularity) -> Tensor:
    """numpy's maximum over the finite magnitudes."""
    values = numpy.abs(x.float().numpy())
    values[~numpy.isfinite(values)] = 0
    axis = {TENSOR: None, ROW: 1, COLUMN: 0}[granularity]
    return torch.from_numpy(numpy.asarray(values.max(axis=axis, keepdims=axis is not None, initial=0)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_the_largest_finite_magnitude_is_numpys(
    granularity: Granularity, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = with_specials(torch.randn(shape) * 100).to(dtype)
    for _, view in memory_orders(x):
        found = amax(view, granularity)
        expected = by_numpy(x, granularity)
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_and_rows_and_columns_in_one_read_are_numpys(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = with_specials(torch.randn(shape) * 100).to(dtype)
    for _, view in memory_orders(x):
        check_parts(view, x)


def check_parts(view: Tensor, x: Tensor) -> None:
    """Of `view`, which may lie on a GPU, with the values of x."""
    partial = partial_amax(view)
    assert partial.dim() == 1
    assert partial.dtype == torch.float32
    assert torch.equal(partial.amax().cpu(), by_numpy(x, TENSOR))
    for row, column in ((True, True), (True, False), (False, True), (False, False)):
        found = amax_by_row_and_column(view, row, column)
        for wanted, one, granularity in ((row, found[0], ROW), (column, found[1], COLUMN)):
            assert (one is not None) == wanted
            if one is not None:
                expected = by_numpy(x, granularity)
                assert one.dtype == torch.float32
                assert one.shape == expected.shape
                assert one.is_contiguous()
                assert torch.equal(one.cpu(), expected)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_each_value_of_bf16_and_fp16_counts_unless_it_is_not_finite(granularity: Granularity) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = every_value(dtype)
        assert torch.equal(amax(x, granularity), by_numpy(x, granularity))
        single = x.reshape(-1, 1)
        assert torch.equal(amax(single, ROW), by_numpy(single, ROW))


def test_literal_amaxes() -> None:
    x = torch.tensor([[1.0, -3.0, math.nan], [-0.0, math.inf, 2.0]])
    assert amax(x).item() == 3.0
    assert amax(x, ROW).tolist() == [[3.0], [2.0]]
    assert amax(x, COLUMN).tolist() == [[1.0, 3.0, 2.0]]
    assert amax(torch.full((2, 2), math.nan)).item() == 0.0
    assert partial_amax(x).tolist() == [3.0]
    assert partial_amax(torch.full((2, 2), -math.inf)).tolist() == [0.0]
    by_row, by_column = amax_by_row_and_column(x)
    assert by_row is not None
    assert by_column is not None
    assert (by_row.tolist(), by_column.tolist()) == ([[3.0], [2.0]], [[1.0, 3.0, 2.0]])


def test_a_float64_that_float32_cannot_hold_is_left_out() -> None:
    x = torch.tensor([[1e300, 5.0]], dtype=torch.float64)
    assert amax(x).item() == 5.0
    assert partial_amax(x).max().item() == 5.0
    by_row, by_column = amax_by_row_and_column(x)
    assert by_row is not None
    assert by_column is not None
    assert (by_row.tolist(), by_column.tolist()) == ([[5.0]], [[0.0, 5.0]])


def test_what_is_no_matrix_or_no_granularity_of_the_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"floating-point matrix \[M, K\], found torch.float32 of shape \(2, 3, 4\)"):
        amax(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"found torch.int64 of shape \(2, 3\)"):
        amax(torch.ones(2, 3, dtype=torch.int64))
    for function in (partial_amax, amax_by_row_and_column):
        with pytest.raises(ValueError, match=r"floating-point matrix \[M, K\], found torch.float32 of shape \(3,\)"):
            function(torch.ones(3))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"found granularity 1x128: use scaling.block_amax"):
        amax(torch.ones(2, 3), BLOCK_1X128)


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_compiled_into_one_graph_it_gives_the_same(granularity: Granularity) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: amax(x * 2, granularity), fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((5, 7), (3, 9), (0, 9), (8, 0)):
        x = with_specials(torch.randn(shape))
        assert torch.equal(compiled(x), amax(x * 2, granularity))


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_compiled_into_one_graph_parts_and_both_are_the_same(wanted: tuple[bool, bool]) -> None:
    torch._dynamo.reset()

    def everything(x: Tensor) -> tuple[Tensor | None, ...]:
        return partial_amax(x * 2).amax(), *amax_by_row_and_column(x * 2, *wanted)

    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((5, 7), (3, 9), (0, 9), (8, 0)):
        x = with_specials(torch.randn(shape))
        for found, expected in zip(compiled(x), everything(x), strict=True):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert found.shape == expected.shape
                assert torch.equal(found, expected)


def test_the_operators_describe_themselves_rightly() -> None:
    for x in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(0, 5)):
        torch.library.opcheck(torch.ops.octavo.partial_amax.default, (x,))
        for row, column in ((True, True), (True, False), (False, True)):
            torch.library.opcheck(torch.ops.octavo.amax_by_row_and_column.default, (x, row, column))


def test_both_start_from_one_fill_and_in_an_operator_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from octavo.kernels.amax import triton_kernel

    for launcher in ("_launch_by_row_and_column", "_launch_packed"):
        monkeypatch.setattr(triton_kernel, launcher, lambda *_: None)
    for x in (torch.ones(37, 21), torch.ones(21, 37).t(), torch.ones(37, 42).bfloat16()):
        for apart in (False, True):
            by_row, by_column = triton_kernel.amax_by_row_and_column_triton(x, True, True, apart)
            assert by_row is not None
            assert by_column is not None
            assert (by_row.shape, by_column.shape) == ((37, 1), (1, x.shape[1]))
            assert not by_row.any()
            assert not by_column.any()
            memory = {by_row.untyped_storage().data_ptr(), by_column.untyped_storage().data_ptr()}
            assert len(memory) == 1 + apart
            assert by_row.data_ptr() % 16 == by_column.data_ptr() % 16 == 0
            by_row.fill_(1.0)
            assert not by_column.any()
        wanted = triton_kernel.amax_by_row_and_column_triton(x, True, False)
        assert (wanted[0] is None, wanted[1] is None) == (False, True)


def test_the_operator_asks_for_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def launch(x: Tensor, row: bool, column: bool, apart: bool = False) -> tuple[Tensor, Tensor]:
        asked.append(apart)
        return x.new_zeros(x.shape[0], 1), x.new_zeros(1, x.shape[1])

    module = importlib.import_module("octavo.kernels.amax")
    monkeypatch.setattr(module, "_launch_by_row_and_column", launch)
    torch.ops.octavo.amax_by_row_and_column(torch.ones(2, 3), True, True)
    amax_by_row_and_column(torch.ones(2, 3))
    assert asked == [True, False]


def test_a_tensor_off_the_gpu_takes_the_reference_and_says_why() -> None:
    assert unsupported_reasons(torch.ones(2, 2)) == ["the tensor is on cpu: Triton kernels need a CUDA device"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_triton_and_reference_agree_to_the_bit(granularity: Granularity, dtype: torch.dtype) -> None:
    assert unsupported_reasons(torch.ones(1, 1, device="cuda")) == []
    for shape in (*SHAPES, (257, 9000), (9000, 257)):
        x = with_specials(torch.randn(shape, device="cuda") * 100).to(dtype)
        for _, view in memory_orders(x):
            assert torch.equal(amax(view, granularity), amax_reference(view, granularity))
            check_parts(view, x.cpu())
    for x in (
        special_float32().reshape(3, 6),
        random_bits((3163, 3163), torch.float32),
        random_bits((64, 9), torch.bfloat16),
    ):
        assert torch.equal(amax(x.cuda(), granularity).cpu(), amax_reference(x, granularity))
