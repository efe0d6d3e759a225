"""The Triton kernels of grouped_cast, run by Triton's interpreter, against their references, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.test_grouped_cast import SIZES, bits, matrix
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.grouped_cast import column_amax_reference, grouped_cast_reference, groups_of


def multipliers(*shape: int) -> Tensor:
    return torch.exp2(torch.randn(shape) * 3)


@interpreted
@silent
@pytest.mark.parametrize("sizes", [*SIZES[:5], [70, 1, 90]], ids=str)
@pytest.mark.parametrize("columns", [37, 144])
@pytest.mark.parametrize(("format", "inf_to_nan"), [(E4M3, False), (E5M2, True)], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes(
    sizes: list[int],
    columns: int,
    format: Format,
    inf_to_nan: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.kernels.grouped_cast.triton_kernel import grouped_cast_triton

    exact_conversions(monkeypatch)
    rows = sum(sizes)
    x, groups = matrix(rows, columns, dtype), groups_of(torch.tensor(sizes), rows)
    for by_row, by_column in (
        (multipliers(rows, 1), multipliers(3, columns)),
        (multipliers(rows, 1), multipliers(3, 1)),
        (multipliers(rows, 1), None),
        (None, multipliers(3, columns)),
    ):
        found = grouped_cast_triton(x, groups, format, by_row, by_column, inf_to_nan)
        expected = grouped_cast_reference(x, groups, format, by_row, by_column, inf_to_nan)
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.shape == other.shape
                assert torch.equal(bits(one), bits(other))


@interpreted
@silent
def test_rows_apart_from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.grouped_cast.triton_kernel import grouped_cast_triton

    exact_conversions(monkeypatch)
    wide, groups = matrix(38, 80), groups_of(torch.tensor([5, 33]), 38)
    by_row, by_column = multipliers(38, 1), multipliers(2, 40)
    for x in (wide[:, 7:47], wide[:, ::2], wide.t().contiguous().t()[:, :40]):
        found = grouped_cast_triton(x, groups, E4M3, by_row, by_column, False)
        expected = grouped_cast_reference(x, groups, E4M3, by_row, by_column, False)
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(bits(one), bits(other))


@interpreted
@silent
@pytest.mark.parametrize("sizes", [*SIZES[:5], [70, 1, 90]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_column_amax(sizes: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.grouped_cast.triton_kernel import column_amax_triton

    exact_conversions(monkeypatch)
    rows = sum(sizes)
    x, groups = matrix(rows, 150, dtype), groups_of(torch.tensor(sizes), rows)
    assert torch.equal(column_amax_triton(x, groups), column_amax_reference(x, groups))


@pytest.mark.gpu
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("sizes", [*SIZES[:5], [70, 1, 90], [3000, 0, 1234]], ids=str)
def test_on_a_gpu(sizes: list[int], format: Format) -> None:
    from octavo.kernels.grouped_cast.triton_kernel import column_amax_triton, grouped_cast_triton

    rows = sum(sizes)
    for columns in (37, 144, 2048):
        x, splits = matrix(rows, columns, torch.bfloat16).cuda(), torch.tensor(sizes, device="cuda")
        groups = groups_of(splits, rows)
        by_row, by_column = multipliers(rows, 1).cuda(), multipliers(3, columns).cuda()
        found = grouped_cast_triton(x, groups, format, by_row, by_column, False)
        expected = grouped_cast_reference(x, groups, format, by_row, by_column, False)
        for one, other in zip(found, expected, strict=True):
            assert one is not None
            assert other is not None
            assert torch.equal(bits(one), bits(other))
        assert torch.equal(column_amax_triton(x, groups), column_amax_reference(x, groups))
