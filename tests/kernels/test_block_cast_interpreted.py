"""The Triton kernel of block_cast, run by Triton's interpreter, against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from tests.formats.edge_values import edge_matrix
from tests.kernels.agreement import assert_same
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import memory_orders, with_specials
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import block_cast_reference
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity

GRANULARITIES = [BLOCK_1X128, BLOCK_128X128]
SHAPES = [(1, 1), (1, 129), (129, 1), (5, 7), (16, 16), (128, 128), (130, 300), (257, 127), (640, 33)]
RULES = [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule((1e-3).hex()), ScaleRule((1e-3).hex(), True)]
LAYOUTS = [(True, True), (True, False), (False, True)]


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers over many powers of two, of both signs; zeros of both signs, infinities, NaN; blocks of them alone."""
    x = with_specials(torch.randn(shape) * torch.exp2(torch.randint(-30, 9, shape).float()))
    x[-1:] = 0.0
    x[:, -1:] = float("inf")
    return x.to(dtype)


def is_its_reference(
    monkeypatch: pytest.MonkeyPatch, x: Tensor, format: Format, granularity: Granularity, rule: ScaleRule, *flags: bool
) -> None:
    from octavo.kernels.block_cast.triton_kernel import block_cast_triton

    exact_conversions(monkeypatch)
    found = block_cast_triton(x, format, granularity, rule, *flags)
    assert_same(found, block_cast_reference(x, format, granularity, rule, *flags))


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_block_cast_is_its_reference(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], granularity: Granularity
) -> None:
    cases: list[tuple[torch.dtype, Format, bool]] = [
        (torch.bfloat16, E4M3, False),
        (torch.float16, E5M2, True),
        (torch.float32, E4M3, True),
        (torch.float64, E4M3, False),
    ]
    for (dtype, format, inf_to_nan), rule in zip(cases, RULES, strict=True):
        x = matrix(shape, dtype)
        for layouts in LAYOUTS:
            is_its_reference(monkeypatch, x, format, granularity, rule, *layouts, inf_to_nan)


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_every_memory_order_is_read(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    for shape in ((17, 31), (16, 144)):
        for _, view in memory_orders(matrix(shape, torch.bfloat16)):
            is_its_reference(monkeypatch, view, E4M3, granularity, RULES[1])


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_every_16_bit_value_and_every_tie_is_cast(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    for format in (E4M3, E5M2):
        for dtype, rule in ((torch.bfloat16, RULES[0]), (torch.bfloat16, RULES[1]), (torch.float32, RULES[1])):
            is_its_reference(monkeypatch, edge_matrix(format, dtype), format, granularity, rule)


@interpreted
@silent
def test_column_sums_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 sums of small integers are, in any order; inf is in them as inf."""
    for shape in ((1, 1), (130, 300), (257, 127)):
        x = torch.randint(-4, 5, shape).to(torch.bfloat16)
        x[0, 0] = float("inf")
        for _, view in memory_orders(x):
            is_its_reference(monkeypatch, view, E5M2, BLOCK_1X128, RULES[1], True, True, True, True)
