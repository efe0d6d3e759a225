"""Two matrices cast by one launch: bit for bit what two casts make of them, and which matrices take it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.kernels.agreement import assert_same
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import memory_orders, with_specials
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2
from octavo.kernels import CastOutput, ScaleRule
from octavo.kernels.block_cast import BlockCast, block_cast, block_cast_pair, block_cast_reference
from octavo.scaling import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, MX

# Of x and of w; of even widths, some of them one tile, some with tiles at each edge.
SHAPES = [
    ((1, 2), (1, 2)),
    ((1, 130), (300, 130)),
    ((257, 126), (6, 126)),
    ((129, 264), (130, 264)),
    ((16, 16), (640, 34)),
    ((260, 130), (1, 514)),
]
HALVES = [torch.bfloat16, torch.float16]
POWER_OF_TWO = ScaleRule(power_of_two=True)
# rowwise and columnwise of x, and of w
LAYOUTS = [
    ((True, True), (True, True)),
    ((True, False), (True, False)),
    ((True, True), (True, False)),
    ((True, False), (True, True)),
    ((False, True), (True, False)),
]


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers over many powers of two, of both signs; zeros of both signs, infinities, NaN; blocks of them alone."""
    x = with_specials(torch.randn(shape) * torch.exp2(torch.randint(-30, 9, shape).float()))
    x[-1:] = 0.0
    x[:, -1:] = float("inf")
    return x.to(dtype)


def of_input(x: Tensor, layouts: tuple[bool, bool] = (True, True)) -> BlockCast:
    return BlockCast(x, E4M3, BLOCK_1X128, POWER_OF_TWO, *layouts)


def of_weight(w: Tensor, layouts: tuple[bool, bool] = (True, True)) -> BlockCast:
    return BlockCast(w, E4M3, BLOCK_128X128, POWER_OF_TWO, *layouts)


def is_two_casts(found: tuple[Any, Any], x: BlockCast, w: BlockCast) -> None:
    for one, cast in zip(found, (x, w), strict=True):
        assert_same(one, block_cast_reference(*cast))


def by_one_launch(monkeypatch: pytest.MonkeyPatch, x: BlockCast, w: BlockCast) -> tuple[Any, Any]:
    from octavo.kernels.block_cast.pair_kernel import block_cast_pair_triton

    exact_conversions(monkeypatch)
    return block_cast_pair_triton(x, w)


@interpreted
@silent
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_pair_is_its_two_references(
    monkeypatch: pytest.MonkeyPatch, shapes: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype
) -> None:
    x, w = (matrix(shape, dtype) for shape in shapes)
    for of_x, of_w in LAYOUTS:
        pair = of_input(x, of_x), of_weight(w, of_w)
        is_two_casts(by_one_launch(monkeypatch, *pair), *pair)


@interpreted
@silent
def test_each_has_its_own_dtype_format_blocks_and_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ways in which two casts may differ, also the wrong way round: no number of one is taken for the other."""
    rules = [ScaleRule(), POWER_OF_TWO, ScaleRule((1e-3).hex()), ScaleRule((1e-3).hex(), True)]
    ways = [*product(HALVES, (E4M3, E5M2), (BLOCK_1X128, BLOCK_128X128))]
    for number, (one, other) in enumerate(product(ways, ways)):
        first = BlockCast(matrix((130, 34), one[0]), *one[1:], rules[number % 4])
        second = BlockCast(matrix((18, 140), other[0]), *other[1:], rules[number % 3])
        is_two_casts(by_one_launch(monkeypatch, first, second), first, second)


@interpreted
@silent
def test_rows_may_have_gaps_of_different_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, of_x, of_w in product(HALVES, (0, 2, 8), (0, 4, 16)):
        wide, tall = torch.full((40, 64 + of_x), 1e4, dtype=dtype), torch.full((33, 64 + of_w), 1e4, dtype=dtype)
        wide[:, :64], tall[:, :64] = matrix((40, 64), dtype), matrix((33, 64), dtype)
        pair = of_input(wide[:, :64]), of_weight(tall[:, :64])
        is_two_casts(by_one_launch(monkeypatch, *pair), *pair)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs each launch of a pair has had."""
    from octavo.kernels.block_cast import pair_kernel

    counted: list[int] = []
    launch = pair_kernel._launch_pair

    def counting(programs: int, *arguments: Any) -> Any:
        counted.append(programs)
        return launch(programs, *arguments)

    monkeypatch.setattr(pair_kernel, "_launch_pair", counting)
    return counted


def falls_back(device: str = "cpu") -> list[tuple[BlockCast, BlockCast]]:
    """Pairs of which one matrix at least is not what the one launch takes."""
    x, w = (matrix(shape, torch.bfloat16).to(device) for shape in ((40, 64), (48, 64)))
    flat = torch.zeros(40 * 64 + 1, dtype=torch.bfloat16, device=device)
    flat[1:] = x.flatten()
    others = [
        x.float(),
        x.double(),
        flat[1:].view(40, 64),
        x[:, :63],
        x.t().contiguous().t(),
        x[:, ::2],
        torch.zeros(40, 67, dtype=torch.bfloat16, device=device)[:, :66],
        x[:, :1],
        x[:0],
    ]
    pairs = [pair for other in others for pair in ((of_input(other), of_weight(w)), (of_input(w), of_weight(other)))]
    blocks = BlockCast(x, E4M3, MX, ScaleRule())
    return [
        *pairs,
        (blocks, of_weight(w)),
        (of_input(x), blocks),
        (of_input(x, (False, False)), of_weight(w)),
        (of_input(x), of_weight(w, (False, False))),
    ]


@interpreted
@silent
def test_what_the_launch_does_not_take_is_cast_apart(monkeypatch: pytest.MonkeyPatch, launches: list[int]) -> None:
    """All that a call goes through on a GPU, but for the entry in C."""
    exact_conversions(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(importlib.import_module("octavo.kernels.block_cast"), "runs_on", lambda *_: True)
    pairs = falls_back()
    for pair in pairs:
        is_two_casts(block_cast_pair(*pair), *pair)
    assert not launches
    x, w = matrix((130, 264), torch.bfloat16), matrix((257, 264), torch.float16)
    taken = of_input(x), of_weight(w, (True, False))
    found = block_cast_pair(*taken)
    assert launches == [2 * 3 + 3 * 3]
    assert all(isinstance(one, CastOutput) for one in found)
    is_two_casts(found, *taken)


def test_where_there_is_no_gpu_a_pair_is_two_casts() -> None:
    for dtype in (*HALVES, torch.float32):
        pair = of_input(matrix((40, 130), dtype)), of_weight(matrix((50, 130), dtype), (True, False))
        found = block_cast_pair(*pair)
        is_two_casts(found, *pair)
        assert found[1].codes_t is None


def test_compiled_a_pair_is_what_it_is() -> None:
    torch._dynamo.reset()

    def call(x: Tensor, w: Tensor) -> Any:
        return block_cast_pair(of_input(x), of_weight(w))

    x, w = torch.randn(40, 130), torch.randn(20, 130)
    compiled: Callable[..., Any] = torch.compile(call, backend="aot_eager", fullgraph=True)
    is_two_casts(compiled(x, w), of_input(x), of_weight(w))


def test_bad_input_is_named_by_either() -> None:
    x = torch.randn(4, 4)
    for bad, message in (
        (BlockCast(x.long(), E4M3, BLOCK_1X128, POWER_OF_TWO), "floating-point matrix"),
        (BlockCast(x.flatten(), E4M3, BLOCK_1X128, POWER_OF_TWO), r"of shape \(16,\)"),
        (BlockCast(x, E4M3, BLOCK_128X1, POWER_OF_TWO), "granularity is 128x1"),
    ):
        for pair in ((bad, of_weight(x)), (of_input(x), bad)):
            with pytest.raises(ValueError, match=message):
                block_cast_pair(*pair)


ON_A_GPU = [
    ((8192, 1280), (1280, 1280)),
    ((8200, 1280), (3848, 1280)),
    ((4096, 264), (130, 264)),
    ((33, 8190), (2, 8190)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [*product(HALVES, HALVES)], ids=str)
@pytest.mark.parametrize("shapes", [*SHAPES, *ON_A_GPU], ids=str)
def test_on_a_gpu_a_pair_is_two_casts(
    shapes: tuple[tuple[int, int], tuple[int, int]], dtypes: tuple[torch.dtype, torch.dtype], launches: list[int]
) -> None:
    x, w = (matrix(shape, dtype).cuda() for shape, dtype in zip(shapes, dtypes, strict=True))
    for rule, (of_x, of_w) in product((POWER_OF_TWO, ScaleRule()), LAYOUTS):
        launches.clear()
        first = of_input(x, of_x)._replace(rule=rule)
        second = of_weight(w, of_w)._replace(rule=rule, format=E5M2 if rule is POWER_OF_TWO else E4M3)
        one, other = block_cast_pair(first, second)
        assert len(launches) == 1
        assert_same(one, block_cast(*first))
        assert_same(other, block_cast(*second))


@pytest.mark.gpu
def test_on_a_gpu_other_matrices_are_cast_apart(launches: list[int]) -> None:
    for pair in falls_back("cuda"):
        for one, cast in zip(block_cast_pair(*pair), pair, strict=True):
            assert_same(one, block_cast(*cast))
    # On two devices nothing is one launch.
    here, there = matrix((40, 64), torch.bfloat16).cuda(), matrix((40, 64), torch.bfloat16)
    is_two_casts(block_cast_pair(of_input(here), of_weight(there)), of_input(here), of_weight(there))
    assert not launches


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_on_a_gpu_every_view_is_read(dtype: torch.dtype) -> None:
    for shape in ((17, 31), (34, 18), (130, 264)):
        for (_, x), (_, w) in product(memory_orders(matrix(shape, dtype).cuda()), repeat=2):
            is_two_casts(block_cast_pair(of_input(x), of_weight(w)), of_input(x), of_weight(w))
