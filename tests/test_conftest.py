"""The tests' own machinery: memory nobody wrote is visible, seeds follow the test's id, measures measure."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests import conftest
from tests.measures import relative_error, sqnr_db

# Compiled with the name of a file of Octavo's, which is what the fixture goes by.
OCTAVO_SOURCE = """
import torch

def unwritten(dtype, shape=(3, 5)):
    like = torch.zeros(shape, dtype=dtype)
    return [torch.empty(shape, dtype=dtype), torch.empty_like(like), like.new_empty(shape), like.new_empty(*shape),
            torch.empty_strided(shape, (1, 8), dtype=dtype)]

def written(x):
    parts = [torch.empty(x.shape), torch.empty_like(x), x.new_empty(x.shape), torch.empty_strided(x.shape, x.stride())]
    return sum(part.copy_(x) for part in parts)
"""


def module_in_octavo() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "src" / "octavo" / "not_a_file.py"
    module = ModuleType("octavo_source_of_a_test")
    exec(compile(OCTAVO_SOURCE, str(path), "exec"), module.__dict__)
    return module


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_unwritten_floats_are_nan(dtype: torch.dtype) -> None:
    for tensor in module_in_octavo().unwritten(dtype):
        assert tensor.isnan().all()


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
    ids=str,
)
def test_unwritten_codes_are_nan(dtype: torch.dtype) -> None:
    for tensor in module_in_octavo().unwritten(dtype):
        assert tensor.float().isnan().all()


def test_unwritten_integers_are_conspicuous() -> None:
    for tensor in module_in_octavo().unwritten(torch.int32):
        assert (tensor == 0x7F7F7F7F).all()
    for tensor in module_in_octavo().unwritten(torch.uint8):
        assert tensor.view(torch.float8_e4m3fn).float().isnan().all()


def test_only_calls_from_octavo_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    monkeypatch.setitem(torch.empty.__globals__, "fill_unwritten", filled.append)
    stranger = ModuleType("stranger")
    exec(compile(OCTAVO_SOURCE, "stranger.py", "exec"), stranger.__dict__)
    stranger.unwritten(torch.float32)
    assert len(filled) == 0
    module_in_octavo().unwritten(torch.float32)
    assert len(filled) == 5


@pytest.mark.real_empty
def test_the_marker_leaves_torch_alone() -> None:
    assert torch.empty.__module__ != "tests.conftest"
    assert type(torch.empty).__name__ == "builtin_function_or_method"


def test_device_contexts_still_redirect_factories() -> None:
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in module_in_octavo().unwritten(torch.float32))


def test_compiled_code_keeps_its_graph() -> None:
    graphs = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    torch._dynamo.reset()
    x = torch.randn(4, 4)
    torch.testing.assert_close(torch.compile(module_in_octavo().written, fullgraph=True, backend=record)(x), 4 * x)
    assert len(graphs) == 1
    assert "fill" not in graphs[0]
    assert "conftest" not in graphs[0]


def test_seed_follows_the_tests_id(seed: int, request: pytest.FixtureRequest) -> None:
    assert seed == zlib.crc32(request.node.nodeid.encode()) == torch.initial_seed()


def test_threads_are_one_under_xdist() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        pytest.skip("not under xdist")
    assert torch.get_num_threads() == 1


def test_where_triton_interprets_the_tests_for_that_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(__file__).resolve().parent
    interpreting, other = folder / "kernels" / "test_sum_kernel.py", folder / "test_import.py"
    markers = ["interpreted", "gpu", None, "interpreted"]
    given = [SimpleNamespace(get_closest_marker=lambda name, own=own: own if own == name else None) for own in markers]
    deselected: list[object] = []
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)))
    for interprets, kept in ((False, [0, 1, 2, 3]), (True, [0, 3])):
        monkeypatch.setattr(conftest, "INTERPRETS", interprets)
        items = list(given)
        conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
        assert items == [given[number] for number in kept]
        assert bool(conftest.pytest_ignore_collect(other)) == interprets
        assert not any(conftest.pytest_ignore_collect(path) for path in (interpreting, folder, folder / "__init__.py"))
    assert deselected == given[1:3]


def test_sqnr_of_a_known_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert sqnr_db(reference, reference + torch.tensor([0.0, 0.5])) == pytest.approx(20.0)  # 25 / 0.25 = 100
    assert sqnr_db(reference, reference) == math.inf
    assert sqnr_db(torch.zeros(2), reference) == -math.inf


def test_relative_error_of_a_known_error() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference, reference + torch.tensor([0.0, 0.5])) == pytest.approx(0.1)
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.zeros(2), reference) == math.inf


@pytest.mark.parametrize("measure", [sqnr_db, relative_error])
def test_measures_refuse_what_would_pass_by_accident(measure: Callable[..., float]) -> None:
    with pytest.raises(AssertionError, match="shapes differ"):
        measure(torch.ones(2, 2), torch.ones(2))
    with pytest.raises(AssertionError, match="value has 1 values that are not finite"):
        measure(torch.ones(2), torch.tensor([1.0, math.nan]))
