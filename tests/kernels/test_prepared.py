"""What is prepared for a call serves its like alone: eager calls in turn, by the interpreter.

What would go to a GPU goes to the twins here, through all that eager code goes through there, but for the entry in C.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import compiled_only, exact_conversions, interpreted, run_interpreted, silent
from tests.kernels.matrices import memory_orders, with_specials
from tests.kernels.sources import given
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2
from octavo.kernels import amax_by_row_and_column, cast_transpose, partial_amax
from octavo.kernels.amax import amax_by_row_and_column_reference, amax_reference
from octavo.kernels.cast_transpose import cast_transpose_reference
from octavo.kernels.launcher import Prepared
from octavo.scaling import TENSOR


@compiled_only
def test_the_rest_of_this_file_passes_under_the_interpreter() -> None:
    run_interpreted(str(Path(__file__)))


@compiled_only
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
def test_calls_in_turn_take_what_was_prepared_for_their_like(
    as_on_a_gpu: Callable[[bool], None],
) -> None:
    """Twice over: the second time everything is prepared, and nothing of one call serves another."""
    cases = [
        (view, kind, format, sums)
        for shape, dtype in (((17, 31), torch.bfloat16), ((17, 31), torch.float32), ((16, 32), torch.bfloat16))
        for _, view in memory_orders(matrix(shape, dtype))
        for kind, format, sums in (("shared", E4M3, False), ("row and column", E5M2, True), ("shared", E5M2, True))
    ]
    first: list[Any] = []
    for round in range(2):
        for number, (x, kind, format, sums) in enumerate(cases):
            pair, gathered, expected = given(kind, x), torch.zeros(()), torch.zeros(())
            found = cast_transpose(x, format, *pair, gathered=gathered, inf_to_nan=sums, column_sum=sums)
            wanted = cast_transpose_reference(x, format, *pair, None, expected, sums, False)
            assert_same((*found[:4], gathered), (*wanted[:4], expected))
            assert (found.column_sum is None) != sums
            first.append(found.codes)
            assert round == 0 or first[number].data_ptr() != found.codes.data_ptr(), "each call has codes of its own"


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
