"""The Triton kernels themselves, run by Triton's interpreter, on a machine without a GPU.

The interpreter's own conversion to eight bits is none of the instructions': it neither rounds to nearest even nor
saturates to the largest value, and mistreats NaN. In its place stands Octavo's reference of that conversion, which
tests/formats holds to ml_dtypes; what the instruction does is for a GPU to show. Everything else is the kernel's own:
layouts, padding, strides, the product before the conversion, scales, amaxes, sums.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tests.formats.edge_values import edge_matrix, every_value, special_float32
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.matrices import SHAPES, memory_orders, with_specials
from tests.kernels.sources import KINDS, RULES, Pair, given, rule_of
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule
from octavo.kernels.amax import amax_by_row_and_column_reference, amax_reference
from octavo.kernels.cast_transpose import cast_transpose_reference
from octavo.scaling import TENSOR

# No point in interpreting what the launchers leave to the reference.
FULL_SHAPES = [shape for shape in SHAPES if shape[0] and shape[1]]


def matrix(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Numbers over several powers of two, of both signs; a few zeros of both signs, infinities and NaN."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, shape).float())
    return with_specials(x).to(dtype)


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
def kernels(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the kernels, under an interpreter whose conversion to eight bits is right."""
    from octavo.kernels.amax import triton_kernel as amax_kernels
    from octavo.kernels.cast_transpose import launch as cast_kernels

    exact_conversions(monkeypatch)
    return SimpleNamespace(amax=amax_kernels, cast=cast_kernels)


def cast_is_its_reference(
    kernels: SimpleNamespace,
    x: Tensor,
    format: Format,
    pair: Pair,
    rule: ScaleRule | None,
    inf_to_nan: bool = False,
    start: float = 0.0,
) -> None:
    """Codes, scales, and what is gathered beside `start`; without gathering too."""
    gathered, expected_gathered = torch.tensor(start), torch.tensor(start)
    expected = cast_transpose_reference(x, format, *pair, rule, expected_gathered, inf_to_nan)
    found = kernels.cast.cast_transpose_triton(x, format, *pair, rule, gathered, inf_to_nan)
    assert_same((*found, gathered), (*expected, expected_gathered))
    assert_same(kernels.cast.cast_transpose_triton(x, format, *pair, rule, None, inf_to_nan), expected)


@interpreted
@silent
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [*FULL_SHAPES, (128, 128)], ids=str)
def test_cast_transpose_is_its_reference(kernels: SimpleNamespace, shape: tuple[int, int], kind: str) -> None:
    cases: list[tuple[torch.dtype, Format, bool]] = [
        (torch.bfloat16, E4M3, False),
        (torch.float16, E5M2, True),
        (torch.float32, E4M3, True),
    ]
    for number, (dtype, format, inf_to_nan) in enumerate(cases):
        x = matrix(shape, dtype)
        pair = given(kind, x)
        # Memory orders differ in the addresses alone, so one dtype and two shapes show them.
        several = dtype == torch.bfloat16 and shape in ((17, 31), (16, 16))
        for _, view in list(memory_orders(x))[: None if several else 1]:
            cast_is_its_reference(kernels, view, format, pair, rule_of(kind, RULES[number]), inf_to_nan, 500.0 * number)


@interpreted
@silent
@pytest.mark.parametrize("kind", ["shared", "row and column", "8 partial amaxes", "amax by row and column"])
def test_large_blocks_are_as_small_ones(kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(kernels.cast, "_LARGE", 1)
    for shape in ((130, 70), (16, 16), (1, 1)):
        x = matrix(shape, torch.bfloat16)
        cast_is_its_reference(kernels, x, E4M3, given(kind, x), rule_of(kind))


@interpreted
@silent
def test_cast_transpose_converts_float64_first_and_takes_a_scale_that_is_no_positive_number(
    kernels: SimpleNamespace,
) -> None:
    nan, zero, inf = torch.tensor(math.nan), torch.tensor(0.0), torch.tensor(math.inf)
    row = torch.ones(33, 1)
    row[20], row[21], row[22] = math.inf, math.nan, 0.0
    for dtype, pair in (
        (torch.float64, (row, row.new_tensor(2.0))),
        (torch.bfloat16, (nan, nan)),
        (torch.bfloat16, (zero, inf)),
        (torch.float32, (row, nan)),
        (torch.float32, (inf, row.new_ones(1, 18) * math.nan)),
    ):
        cast_is_its_reference(kernels, matrix((33, 18), dtype), E4M3, pair, None)


@interpreted
@silent
def test_every_16_bit_value_and_every_tie_is_cast_in_both_layouts(kernels: SimpleNamespace) -> None:
    for format in (E4M3, E5M2):
        for dtype in (torch.bfloat16, torch.float32):
            for inf_to_nan in (False, True):
                x, one = edge_matrix(format, dtype), torch.ones(())
                cast_is_its_reference(kernels, x, format, (one, torch.tensor(2.7)), None, inf_to_nan)


@interpreted
@silent
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
def test_scales_of_amaxes_are_those_of_the_rule(kernels: SimpleNamespace, format: Format, rule: ScaleRule) -> None:
    """One amax a row, one a column, and the largest of partial ones: zero, subnormal, largest."""
    special = special_float32().abs()
    amaxes = torch.cat([special[special.isfinite()], torch.rand(86).pow(20), torch.tensor([3.0, 1e-37, 3e38, 448.0])])
    x = matrix((len(amaxes), 3), torch.bfloat16)
    cast_is_its_reference(kernels, x, format, (amaxes[:, None], amaxes[:3].reshape(1, 3)), rule)
    cast_is_its_reference(kernels, x.t().contiguous(), format, (amaxes[:3, None], amaxes[None, :]), rule)
    for largest in amaxes[::7]:
        partial = torch.rand(16) * largest
        partial[11] = largest
        cast_is_its_reference(kernels, x, format, (partial, partial[:13]), rule)


@interpreted
@silent
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_column_sums_of_integers_are_exact(kernels: SimpleNamespace, dtype: torch.dtype) -> None:
    """float32 sums of small integers are, in any order; and the codes are what they are without sums."""
    one = torch.ones(())
    for shape in (*FULL_SHAPES, (200, 130)):
        x = torch.randint(-4, 5, shape).to(dtype)
        for _, view in memory_orders(x):
            *found, sums = kernels.cast.cast_transpose_triton(view, E5M2, one, one, None, None, True, True)
            assert_same((sums,), (x.double().sum(0).float(),))
            assert_same(tuple(found), cast_transpose_reference(view, E5M2, one, one, None, None, True)[:4])
    x = torch.zeros(40, 5, dtype=torch.float32)
    x[3, 0], x[4, 1], x[5, 1], x[39, 2], x[38, 4] = math.inf, math.inf, -math.inf, math.nan, 1.0
    sums = kernels.cast.cast_transpose_triton(x, E5M2, one, None, None, None, True, True)[4]
    assert sums.nan_to_num(-1.0, posinf=-2.0).tolist() == [-2.0, -1.0, -1.0, 0.0, 1.0]


@interpreted
@silent
@pytest.mark.parametrize("kind", ["shared", "scalars", "row and column", "8 partial amaxes", "amax by row and column"])
def test_traced_a_launch_gives_no_output_that_is_an_input(kernels: SimpleNamespace, kind: str) -> None:
    """What compiled code launches: every scale is new, one of the whole matrix [1]."""
    for shape in ((1, 1), (17, 31), (130, 70)):
        x = matrix(shape, torch.bfloat16)
        pair, rule, gathered, expected_gathered = given(kind, x), rule_of(kind), torch.zeros(()), torch.zeros(())
        call = kernels.cast.prepare(x, E4M3, *pair, rule, gathered, False, False)
        kernels.cast.cast_transpose_kernel[(call.programs,)](*call.tensors, *call.numbers, *call.constants)
        expected = cast_transpose_reference(x, E4M3, *pair, rule, expected_gathered)
        outputs = [out if out is None or out.shape != (1,) else out.reshape(()) for out in call.outputs]
        assert_same((*outputs, gathered), (*expected, expected_gathered))
        inputs = {source.data_ptr() for source in (x, *pair) if source is not None}
        assert not inputs & {out.data_ptr() for out in call.outputs if out is not None}


@interpreted
@silent
@pytest.mark.parametrize("shape", [(1, 1), (17, 31), (2, 264), (300, 64), (300, 2)], ids=str)
def test_amax_is_its_reference(kernels: SimpleNamespace, shape: tuple[int, int]) -> None:
    for _, view in memory_orders(matrix(shape, torch.bfloat16)):
        amaxes_are_their_reference(kernels, view)


@interpreted
@silent
def test_amax_of_rows_longer_than_half_a_block_is_its_reference(kernels: SimpleNamespace) -> None:
    """By row and column in one memory order: of programs there are many here, of kinds no more than above."""
    x = matrix((2, 8200), torch.bfloat16)
    amaxes_are_their_reference(kernels, x)
    for _, view in memory_orders(x):
        partial_amaxes_are_their_reference(kernels, view)


@interpreted
@silent
def test_amax_of_every_16_bit_value_of_float64_and_of_one_value_is_its_reference(kernels: SimpleNamespace) -> None:
    for _, view in memory_orders(matrix((5, 7), torch.float64)):
        amaxes_are_their_reference(kernels, view)
    for x in (every_value(torch.bfloat16), every_value(torch.float16), special_float32().reshape(3, 6)):
        amaxes_are_their_reference(kernels, x)
    for value in (math.nan, math.inf, -0.0):
        amaxes_are_their_reference(kernels, torch.full((40, 70), value))


def amaxes_are_their_reference(kernels: SimpleNamespace, x: Tensor) -> None:
    """In parts, by row, by column, and both in one read."""
    partial_amaxes_are_their_reference(kernels, x)
    for wanted in ((True, True), (True, False), (False, True)):
        found = kernels.amax.amax_by_row_and_column_triton(x, *wanted)
        assert_same(found, amax_by_row_and_column_reference(x, *wanted))


def partial_amaxes_are_their_reference(kernels: SimpleNamespace, x: Tensor) -> None:
    partial = kernels.amax.partial_amax_triton(x)
    # As cast_transpose reads them.
    assert partial.numel() & (partial.numel() - 1) == 0
    assert_same((partial.amax(),), (amax_reference(x, TENSOR),))


@interpreted
@silent
def test_programs_stride_through_a_matrix_of_more_blocks_than_partial_maxima(
    kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels.amax, "_BLOCK", 256)
    monkeypatch.setattr(kernels.amax, "_MOST_PARTIALS", 4)
    for shape in ((70, 96), (33, 130), (2000, 1), (1, 2000)):
        x = torch.zeros(shape)
        # The largest, in turn, in every block's corner and at the very end.
        for row in range(0, shape[0], 7):
            for column in {0, shape[1] // 2, shape[1] - 1}:
                x[row, column] = 1.0 + row + column / 10_000
        x[-1, -1] = 1e6
        partial = kernels.amax.partial_amax_triton(x)
        assert partial.shape == (4,)
        assert partial.amax().item() == 1e6
        x[-1, -1] = 0.0
        assert kernels.amax.partial_amax_triton(x).amax().item() == x.max().item()
