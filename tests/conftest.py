"""What holds in every test: its seed, its threads, and memory that nobody wrote being visible as such."""

from __future__ import annotations

import gc
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy
import pytest
import torch

# Both read names such as `torch.empty` once and remember the function they found: Dynamo's table of what may stay in a
# graph, and the list of factories that `with torch.device(...)` redirects. They must find the real ones, so they are
# filled before any test replaces one. (Private names, pinned by test_conftest.py.)
import torch._dynamo.trace_rules
import torch.utils._device

torch.utils._device._device_constructors()

SOURCE = str(Path(__file__).resolve().parent.parent / "src" / "octavo") + os.sep

# Triton decides at import. One process interprets and runs the tests marked `interpreted`; another runs all others.
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"

# Bytes that decode to NaN in each eight-bit format; every other one-byte type and the integers get 0x7F as well, which
# is NaN when read as E4M3 or E5M2 codes and a conspicuous number otherwise.
NAN_BYTES = {torch.float8_e8m0fnu: 0xFF, torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}
UNWRITTEN_BYTE = 0x7F

hypothesis.settings.register_profile("octavo", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("octavo")


def pytest_configure(config: pytest.Config) -> None:
    """One thread a worker, so that workers do not fight over the cores that they share."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where Triton interprets, a file that has no test for that is not even imported."""
    name = collection_path.name
    if INTERPRETS and name.startswith("test_") and name.endswith(".py"):
        return True if "interpreted" not in collection_path.read_text(encoding="utf-8") else None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where Triton interprets, tests marked `interpreted` alone."""
    if INTERPRETS:
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("interpreted")])
        items[:] = [item for item in items if item.get_closest_marker("interpreted")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if item.get_closest_marker("interpreted"):
        if not INTERPRETS:
            pytest.skip("needs a process with TRITON_INTERPRET=1, which `./dev test` starts as well")
        pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed every generator from the test's id: the same numbers alone, in any order and on any worker."""
    value = zlib.crc32(request.node.nodeid.encode())
    random.seed(value)
    numpy.random.seed(value)
    torch.manual_seed(value)
    return value


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_device() -> Iterator[None]:
    """Waiting for the device is allowed again; no dead CUDA graph is left, to be freed while another is captured."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.set_sync_debug_mode("default")
        gc.collect()


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what Octavo's files get from `torch.empty` and its kin, so that an unwritten output cannot pass by luck.

    Only calls from files of src/octavo are touched. While Dynamo traces, the real function goes into the graph. Opt out
    with `@pytest.mark.real_empty`.
    """
    if not request.node.get_closest_marker("real_empty"):
        for owner, name, replacement in REPLACEMENTS:
            monkeypatch.setattr(owner, name, replacement)


def fill_unwritten(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh tensor's whole storage, gaps between strides included, with NaN or the unwritten byte."""
    if type(tensor) is not torch.Tensor or tensor.device.type == "meta" or tensor.layout is not torch.strided:
        return tensor  # fake, wrapped or without memory: there is nothing to fill
    wide = (tensor.dtype.is_floating_point or tensor.dtype.is_complex) and tensor.dtype.itemsize > 1
    with torch.no_grad():
        flat = REAL_EMPTY(0, dtype=tensor.dtype if wide else torch.uint8, device=tensor.device)
        flat.set_(tensor.untyped_storage())
        if wide:
            flat.fill_(float("nan"))
        else:
            flat.fill_(1 if tensor.dtype is torch.bool else NAN_BYTES.get(tensor.dtype, UNWRITTEN_BYTE))
    return tensor


def filling(real: Callable[..., torch.Tensor], traced: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`real` with its result filled where one of Octavo's files called it; `traced` is what a compiled graph gets."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        # First and alone: Dynamo knows the answer and drops the rest of this function, which it could not trace.
        if torch.compiler.is_compiling():
            return traced(*args, **kwargs)
        result = real(*args, **kwargs)
        called_by_octavo = sys._getframe(1).f_code.co_filename.startswith(SOURCE)
        return fill_unwritten(result) if called_by_octavo else result

    return empty


def traceable_new_empty(tensor: torch.Tensor, *size: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.new_empty` as Dynamo can call it: once wrapped, the method of the C base class is opaque to it."""
    shape = size if len(size) != 1 or isinstance(size[0], int) else size[0]
    return torch.ops.aten.new_empty(tensor, shape, **kwargs)


REAL_EMPTY = torch.empty
# What `octavo.kernels.allocation` takes instead on a GPU; never traced.
QUICK = torch._C._dynamo.guards
REPLACEMENTS = [
    (QUICK, "_empty_strided_cuda", filling(QUICK._empty_strided_cuda, QUICK._empty_strided_cuda)),
    (torch, "empty", filling(torch.empty, torch.empty)),
    (torch, "empty_like", filling(torch.empty_like, torch.empty_like)),
    (torch, "empty_strided", filling(torch.empty_strided, torch.empty_strided)),
    (torch.Tensor, "new_empty", filling(torch.Tensor.new_empty, traceable_new_empty)),
]
