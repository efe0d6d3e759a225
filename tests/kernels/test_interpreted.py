"""The Triton kernels themselves, run by Triton's interpreter, on a machine without a GPU.

The interpreter's conversion to eight bits does not round to nearest even and mistreats subnormals, so every product
here is a normal number of its format or saturates: then layouts, padding, strides, saturation, NaN and amax are tested
to the bit, and rounding is not tested at all. That is for a GPU.

Triton decides at import whether it interprets, so the tests of this file run in a process of their own, which the first
of them starts.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.formats.edge_values import every_value, special_float32
from tests.kernels.matrices import SHAPES, memory_orders
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2, Format, decode
from octavo.kernels.amax import amax_reference
from octavo.kernels.cast_transpose import cast_transpose_reference
from octavo.kernels.scale_from_amax import scale_from_amax_reference
from octavo.scaling import COLUMN, ROW, TENSOR, Granularity

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter computes in numpy, which warns of what a GPU does in silence.
interpreted = pytest.mark.skipif(not INTERPRETED, reason="run by the first test, with TRITON_INTERPRET=1")
silent = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
# No point in interpreting what the launchers leave to the reference.
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


@pytest.mark.skipif(INTERPRETED, reason="this is the other process")
def test_the_rest_of_this_file_passes_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def exact_matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers that E4M3 and E5M2 both hold, a few zeros of both signs, infinities and NaN."""
    codes = (torch.randint(0x10, 0x38, shape) * 2).to(torch.uint8)
    x = decode(codes.view(E4M3.dtype)) * torch.randint(-1, 2, shape)
    draw = torch.rand(shape)
    for low, value in ((0.8, math.inf), (0.85, -math.inf), (0.9, math.nan), (0.95, -0.0)):
        x[draw > low] = value
    return x.to(dtype)


def multipliers(kind: str, shape: tuple[int, int]) -> tuple[Tensor | None, Tensor | None]:
    """Powers of two, so that products stay in the format; some saturate."""
    quarter, four = torch.tensor(0.25), torch.tensor(4.0)
    row, column = (torch.exp2(torch.randint(-2, 4, size).float()) for size in ((shape[0], 1), (1, shape[1])))
    return {
        "shared": (quarter, quarter),
        "codes only": (four, None),
        "transposed only": (None, four),
        "amax only": (None, None),
        "row and column": (row, column),
        "scalar and column": (quarter, column),
    }[kind]


KINDS = ["shared", "codes only", "transposed only", "amax only", "row and column", "scalar and column"]


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert a.is_contiguous()
            width = torch.uint8 if a.dtype.itemsize == 1 else torch.int32
            assert torch.equal(a.reshape(-1).view(width), b.reshape(-1).view(width))


@pytest.fixture
def kernels() -> dict[str, Callable[..., object]]:
    from octavo.kernels.amax.triton_kernel import amax_triton
    from octavo.kernels.cast_transpose.triton_kernel import cast_transpose_triton
    from octavo.kernels.scale_from_amax.triton_kernel import scale_from_amax_triton

    return {"amax": amax_triton, "cast_transpose": cast_transpose_triton, "scale_from_amax": scale_from_amax_triton}


@interpreted
@silent
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*FULL_SHAPES, (128, 128)], ids=str)
def test_cast_transpose_is_its_reference(
    kernels: dict[str, Callable[..., object]], shape: tuple[int, int], kind: str
) -> None:
    cases: list[tuple[torch.dtype, Format, bool]] = [
        (torch.bfloat16, E4M3, False),
        (torch.float16, E5M2, True),
        (torch.float32, E4M3, True),
    ]
    for dtype, format, inf_to_nan in cases:
        x, pair = exact_matrix(shape, dtype), multipliers(kind, shape)
        # Memory orders differ in the addresses alone, so one dtype and two shapes show them.
        several = dtype == torch.bfloat16 and shape in ((17, 31), (16, 16))
        for _, view in list(memory_orders(x))[: None if several else 1]:
            expected = cast_transpose_reference(view, format, *pair, inf_to_nan)
            assert_same(kernels["cast_transpose"](view, format, *pair, inf_to_nan), expected)  # type: ignore[arg-type]


@interpreted
@silent
def test_cast_transpose_converts_float64_first_and_takes_a_multiplier_that_is_no_number(
    kernels: dict[str, Callable[..., object]],
) -> None:
    nan = torch.tensor(math.nan)
    row = torch.ones(33, 1)
    row[20] = math.inf
    for dtype, pair in (
        (torch.float64, (row, row.new_tensor(2.0))),
        (torch.bfloat16, (nan, nan)),
        (torch.float32, (row, nan)),
    ):
        x = exact_matrix((33, 18), dtype)
        expected = cast_transpose_reference(x, E4M3, *pair, False)
        assert_same(kernels["cast_transpose"](x, E4M3, *pair, False), expected)  # type: ignore[arg-type]


@interpreted
@pytest.mark.parametrize("granularity", [TENSOR, ROW, COLUMN], ids=repr)
def test_amax_is_its_reference(kernels: dict[str, Callable[..., object]], granularity: Granularity) -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for shape in ((1, 1), (17, 31), (2, 8200)) if dtype == torch.bfloat16 else ((5, 7),):
            for _, view in memory_orders(exact_matrix(shape, dtype)):
                assert_same((kernels["amax"](view, granularity),), (amax_reference(view, granularity),))  # type: ignore[arg-type]
    for x in (every_value(torch.bfloat16), every_value(torch.float16), special_float32().reshape(3, 6)):
        assert_same((kernels["amax"](x, granularity),), (amax_reference(x, granularity),))  # type: ignore[arg-type]


@interpreted
@silent
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
def test_scale_from_amax_is_its_reference(
    kernels: dict[str, Callable[..., object]], epsilon: float, power_of_two: bool
) -> None:
    special = special_float32().abs()
    for amax in (special[special.isfinite()], torch.rand(1000).pow(20), torch.tensor(3.0), torch.rand(5, 1)):
        for format in (E4M3, E5M2):
            expected = scale_from_amax_reference(amax, format, epsilon, power_of_two)
            assert_same(kernels["scale_from_amax"](amax, format, epsilon, power_of_two), expected)  # type: ignore[arg-type]
