"""scaled_mm_by_group: products that write into one output, against `scaled_mm` and a concatenation.

torch multiplies codes on a CPU too, with one scale a tensor, so that the way of a GPU is gone here as well.
"""

from __future__ import annotations

import math

import pytest
import torch
from tests.measures import relative_error
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule, cast_transpose, grouped_mm, partial_amax, scaled_mm
from octavo.kernels.grouped_mm import Product, scaled_mm_by_group

N, K = 48, 64


def operand(rows: int, format: object = E4M3, columns: int = K) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, columns)
    amax = partial_amax(x)
    cast = cast_transpose(x, format, amax, None, rule=ScaleRule())
    return cast.row_wise


def products(splits: list[int], bias: bool, dtype: torch.dtype, columns: int = N) -> list[Product]:
    made: list[Product] = []
    for rows in splits:
        a, scale_a = operand(rows)
        b, scale_b = operand(columns)
        padded = b.shape[0]
        made.append((a, b, scale_a, scale_b, torch.randn(padded).to(dtype) if bias else None))
    return made


def one_by_one(made: list[Product], splits: list[int], columns: int, dtype: torch.dtype) -> Tensor:
    parts = [scaled_mm(*product, dtype, "precise")[:rows, :columns] for product, rows in zip(made, splits, strict=True)]
    return torch.cat(parts)


SPLITS = ([5, 0, 33], [0, 16, 1], [0, 0, 0], [32, 16, 16])


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("columns", [48, 41])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_of_each_product(splits: list[int], bias: bool, columns: int, dtype: torch.dtype) -> None:
    made = products(splits, bias, dtype, columns)
    found = scaled_mm_by_group(made, splits, columns, dtype, ["precise"] * 3)
    assert found.is_contiguous()
    assert torch.equal(found, one_by_one(made, splits, columns, dtype))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize(("bias", "dtype"), [(True, torch.bfloat16), (False, torch.bfloat16), (False, torch.float32)])
def test_the_library_writes_where_it_is_told_to(
    splits: list[int], bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = products(splits, bias, dtype)
    expected = one_by_one(made, splits, N, dtype)
    written = []
    real = torch._scaled_mm

    def noted(a: Tensor, *arguments: object, **options: object) -> Tensor:
        written.append(a.shape[0])
        return real(a, *arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", noted)
    monkeypatch.setattr(grouped_mm, "runs_natively", lambda *_: True)
    found = scaled_mm_by_group(made, splits, N, dtype, ["precise"] * 3)
    assert written == [rows for rows in splits if rows]
    # Both sum in float32, in another order: K roundings each, sqrt(K) 2^-24 of the result in the root mean square; and
    # then round once to the dtype.
    assert found.shape == expected.shape
    if found.numel():
        assert relative_error(expected, found) <= torch.finfo(dtype).eps + 2 * math.sqrt(K) * 2.0**-24


def test_a_product_over_no_rows_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of an expert without tokens: cuBLASLt takes no K of 0."""
    empty, scale = operand(N, E5M2, 0)
    monkeypatch.setattr(grouped_mm, "runs_natively", lambda *_: True)
    found = scaled_mm_by_group([(empty, empty, scale, scale, None)], [N], N, torch.float32, ["precise"])
    assert torch.equal(found, torch.zeros(N, N))
