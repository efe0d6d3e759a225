"""What is prepared for a call serves its like alone: eager calls in turn, by the interpreter.

What would go to a GPU goes to the twins here, through all that eager code goes through there, but for the entry in C.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import memory_orders, with_specials
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule, amax_by_row_and_column, cast_transpose, partial_amax
from octavo.kernels.amax import amax_by_row_and_column_reference, amax_reference
from octavo.kernels.cast_transpose import cast_transpose_reference
from octavo.kernels.launcher import Prepared
from octavo.scaling import TENSOR


def test_what_is_prepared_does_not_grow_without_end() -> None:
    prepared = Prepared()
    for key in range(3000):
        assert prepared.keep(key, -key) == -key
        assert prepared.get(key) == -key
        assert len(prepared) <= 1024


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers over several powers of two, of both signs; a few zeros of both signs, infinities and NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())
    return with_specials(x).to(dtype)


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            width = torch.uint8 if a.dtype.itemsize == 1 else torch.int32
            assert torch.equal(a.reshape(-1).view(width), b.reshape(-1).view(width))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Eager calls take the twins, through what is prepared for them; the function says whether a graph is captured."""
    exact_conversions(monkeypatch)
    capturing = [False]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for name, runs in (("cast_transpose", "runs_on"), ("amax", "uses_triton")):
        module = importlib.import_module(f"octavo.kernels.{name}")
        monkeypatch.setattr(module, runs, lambda *_: True)
        monkeypatch.setattr(module, "_PREPARED", Prepared())
    return lambda captured: capturing.__setitem__(0, captured)


@interpreted
@silent
def test_calls_in_turn_take_what_was_prepared_for_their_like(as_on_a_gpu: Callable[[bool], None]) -> None:
    """Each differs from the first in one thing alone. Twice over: the second time everything is prepared."""
    x, one, two = matrix((17, 31), torch.bfloat16), torch.tensor(0.5), torch.tensor(3.0)
    row, column = torch.rand(17, 1) + 0.5, torch.rand(1, 31) + 0.5
    plain: dict[str, Any] = {"rule": None, "gathers": True, "inf_to_nan": False, "column_sum": False}
    cases: list[tuple[Tensor, Format, Tensor | None, Tensor | None, dict[str, Any]]] = [(x, E4M3, one, one, {})]
    views = x[:9], x[:, :9], x.float(), x.t().contiguous().t(), torch.cat([x, x], 1)[:, :31], x.double()
    cases += [(view, E4M3, one, one, {}) for view in views]
    cases += [(x, E5M2, one, one, {}), (x, E4M3, one, None, {}), (x, E4M3, None, one, {}), (x, E4M3, one, two, {})]
    cases += [(x, E4M3, row, one, {}), (x, E4M3, one, column, {}), (x, E4M3, torch.rand(17, 2)[:, :1] + 1, one, {})]
    cases += [(x, E4M3, one, one, {name: not plain[name]}) for name in ("gathers", "inf_to_nan", "column_sum")]
    cases += [(x, E4M3, one, one, {"rule": rule}) for rule in (ScaleRule(), ScaleRule(power_of_two=True))]
    first: list[Tensor | None] = []
    for round in range(2):
        for number, (matrix_, format, rowwise, columnwise, changed) in enumerate(cases):
            rule, gathers, inf_to_nan, sums = (plain | changed).values()
            gathered, expected = (torch.zeros(()) if gathers else None for _ in range(2))
            found = cast_transpose(
                matrix_, format, rowwise, columnwise,
                rule=rule, gathered=gathered, inf_to_nan=inf_to_nan, column_sum=sums,
            )  # fmt: skip
            wanted = cast_transpose_reference(matrix_, format, rowwise, columnwise, rule, expected, inf_to_nan)
            assert_same((*found[:4], gathered), (*wanted[:4], expected))
            assert (found.column_sum is not None) == sums
            first.append(found.codes)
            before = first[number]
            assert round == 0 or before is None or before is not found.codes, "each call has codes of its own"


@interpreted
@silent
def test_a_prepared_cast_into_a_graph_gives_out_a_scale_of_its_own(
    as_on_a_gpu: Callable[[bool], None],
) -> None:
    x, scale = matrix((17, 31), torch.bfloat16), torch.tensor(0.5)
    for captured in (False, True, False, True):
        as_on_a_gpu(captured)
        assert (cast_transpose(x, E4M3, scale, scale).scale is scale) != captured


@interpreted
@silent
def test_amaxes_in_turn_take_what_was_prepared_for_their_like(
    as_on_a_gpu: Callable[[bool], None],
) -> None:
    for _ in range(2):
        for shape in ((17, 31), (16, 32)):
            for dtype in (torch.bfloat16, torch.float64):
                for _, x in memory_orders(matrix(shape, dtype)):
                    assert torch.equal(partial_amax(x).amax(), amax_reference(x, TENSOR))
                    for row, column in ((True, True), (True, False), (False, True)):
                        found = amax_by_row_and_column(x, row, column)
                        assert_same(found, amax_by_row_and_column_reference(x, row, column))
