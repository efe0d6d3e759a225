"""The Triton kernels of block_cast, run by Triton's interpreter, against its reference, bit for bit."""

from __future__ import annotations

import math
from itertools import product

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
from octavo.kernels.amax.packed_kernel import is_packed
from octavo.kernels.block_cast import block_cast_reference
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity

GRANULARITIES = [BLOCK_1X128, BLOCK_128X128]
# Of an even width 16-bit elements lie in words, see `packed`.
EVEN = [(1, 2), (1, 130), (129, 2), (6, 12), (16, 16), (128, 128), (130, 300), (257, 126), (640, 34)]
ODD = [(1, 1), (1, 129), (129, 1), (5, 7), (257, 127), (640, 33)]
RULES = [ScaleRule(), ScaleRule(power_of_two=True), ScaleRule((1e-3).hex()), ScaleRule((1e-3).hex(), True)]
HALVES = [torch.bfloat16, torch.float16]
LAYOUTS = [(True, True), (True, False), (False, True)]


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers over many powers of two, of both signs; zeros of both signs, infinities, NaN; blocks of them alone."""
    x = with_specials(torch.randn(shape) * torch.exp2(torch.randint(-30, 9, shape).float()))
    x[-1:] = 0.0
    x[:, -1:] = float("inf")
    return x.to(dtype)


def is_its_reference(
    monkeypatch: pytest.MonkeyPatch,
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    *flags: bool,
    packed: bool | None = None,
) -> None:
    """packed: whether it is the kernel of words that runs; None: either."""
    from octavo.kernels.block_cast import triton_kernel

    if packed is not None:
        assert is_packed(x) == packed
    exact_conversions(monkeypatch)
    found = triton_kernel.block_cast_triton(x, format, granularity, rule, *flags)
    assert_same(found, block_cast_reference(x, format, granularity, rule, *flags))


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("shape", [*EVEN, *ODD], ids=str)
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
        x, packed = matrix(shape, dtype), shape in EVEN and dtype in HALVES
        for layouts in LAYOUTS:
            is_its_reference(monkeypatch, x, format, granularity, rule, *layouts, inf_to_nan, packed=packed)


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_words_are_cast_by_every_rule_into_each_layout(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, granularity: Granularity
) -> None:
    x = matrix((18, 142), dtype)
    for format, rule, layouts, inf_to_nan in product((E4M3, E5M2), RULES, LAYOUTS, (False, True)):
        is_its_reference(monkeypatch, x, format, granularity, rule, *layouts, inf_to_nan, packed=True)


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_words_of_one_value_alone_are_cast(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, granularity: Granularity
) -> None:
    """Blocks without a number in them, and blocks of nothing but the largest or the least."""
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4]
    for value, rule in product(values, RULES):
        for inf_to_nan in (False, True):
            x = torch.full((3, 34), value, dtype=dtype)
            is_its_reference(monkeypatch, x, E4M3, granularity, rule, True, True, inf_to_nan, packed=True)


@interpreted
@silent
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_words_are_read_from_within_a_wider_matrix(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """And what lies beside it is in no amax; from an address between words elements are read one by one."""
    wide = torch.full((37, 160), 1e4, dtype=dtype)
    for first, width, packed in ((0, 126, True), (8, 130, True), (2, 130, False), (1, 130, False), (0, 127, False)):
        x = wide[:, first : first + width]
        x.copy_(matrix((37, width), dtype))
        for granularity in GRANULARITIES:
            is_its_reference(monkeypatch, x, E4M3, granularity, RULES[0], packed=packed)
        x.fill_(1e4)


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_every_memory_order_is_read(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    for shape, dtype in product(((17, 31), (16, 144), (34, 18)), HALVES):
        for _, view in memory_orders(matrix(shape, dtype)):
            is_its_reference(monkeypatch, view, E4M3, granularity, RULES[1])


@interpreted
@silent
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
def test_every_16_bit_value_and_every_tie_is_cast(monkeypatch: pytest.MonkeyPatch, granularity: Granularity) -> None:
    for format in (E4M3, E5M2):
        for dtype, rule in product((*HALVES, torch.float32), RULES[:2]):
            x = edge_matrix(format, dtype)
            is_its_reference(monkeypatch, x, format, granularity, rule, packed=dtype in HALVES)
            if dtype in HALVES:
                # By the kernel of single elements too, from an odd column on.
                beside = torch.cat([x[:, :1], x], 1)[:, 1:]
                is_its_reference(monkeypatch, beside, format, granularity, rule, packed=False)


@interpreted
@silent
def test_column_sums_of_integers_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 sums of small integers are, in any order; inf is in them as inf."""
    for shape, dtype in product(((1, 1), (130, 142), (129, 127)), HALVES):
        x = torch.randint(-4, 5, shape).to(dtype)
        x[0, 0] = float("inf")
        for name, view in memory_orders(x):
            packed = shape[1] == 142 if name == "contiguous" else None
            flags = (True, True, True, True)
            is_its_reference(monkeypatch, view, E5M2, BLOCK_1X128, RULES[1], *flags, packed=packed)
