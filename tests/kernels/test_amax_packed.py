"""amax by row and column of 16-bit elements in pairs: when, whether as its reference, and what it compiles to."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.formats.edge_values import every_value
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.variants import BLACKWELL, HOPPER, Launch, compiled, launches_of, specialized, stack_and_local_bytes

from octavo.kernels.amax import amax_by_row_and_column_reference, packed_kernel
from octavo.kernels.amax import triton_kernel as amax_kernels

HALVES = [torch.bfloat16, torch.float16]
WANTED = [(True, True), (True, False), (False, True)]


def assert_is_reference(x: Tensor) -> None:
    assert packed_kernel.is_packed(x)
    for wanted in WANTED:
        expected = amax_by_row_and_column_reference(x, *wanted)
        for found, one in zip(amax_kernels.amax_by_row_and_column_triton(x, *wanted), expected, strict=True):
            assert (found is None) == (one is None)
            if found is not None and one is not None:
                assert found.shape == one.shape
                assert torch.equal(found.view(torch.int32), one.view(torch.int32))


@interpreted
@silent
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_two_at_a_time_the_largest_finite_magnitudes_are_the_references(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    exact_conversions(monkeypatch)
    for rows, columns in ((1, 2), (1, 300), (45, 80), (33, 258), (130, 70)):
        x = torch.randn(rows, columns) * torch.exp2(torch.randint(-14, 14, (rows, columns)).float())
        x[rows // 2 : rows // 2 + 4] = torch.tensor([math.nan, -math.inf, -0.0, 1e-7])[: rows - rows // 2, None]
        x[:, columns - 2], x[:, columns // 2] = math.nan, math.inf
        assert_is_reference(x.to(dtype))
        wider = torch.full((rows, columns + 6), 1e4, dtype=dtype)
        wider[:, :columns] = x
        assert_is_reference(wider[:, :columns])
    for value in (math.nan, math.inf, -math.inf, -0.0):
        assert_is_reference(torch.full((33, 34), value, dtype=dtype))


@interpreted
@silent
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_each_16_bit_value_counts_as_in_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Alone in its row: all 65536 of them, beside a zero."""
    exact_conversions(monkeypatch)
    values = every_value(dtype).flatten()[::7]
    x = torch.zeros(2, len(values), dtype=dtype)
    x[0] = values
    _, found = amax_kernels.amax_by_row_and_column_triton(x[:, : len(values) // 2 * 2].contiguous(), False, True)
    _, expected = amax_by_row_and_column_reference(x[:, : len(values) // 2 * 2], False, True)
    assert found is not None
    assert expected is not None
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@interpreted
@silent
def test_blocks_one_below_the_other_leave_no_row_out(monkeypatch: pytest.MonkeyPatch) -> None:
    exact_conversions(monkeypatch)
    monkeypatch.setattr(packed_kernel, "_PROGRAMS", 1)
    monkeypatch.setattr(packed_kernel, "_BLOCK_ROWS", 4)
    for rows, blocks in ((4, 1), (8, 2), (19, 4), (33, 8)):
        x = torch.arange(1.0, 2 * rows + 1).reshape(rows, 2).to(torch.bfloat16)
        programs, numbers, _ = packed_kernel.packed_arguments(x, True, True)
        assert numbers[-1] == blocks
        assert programs == -(-rows // (4 * blocks))
        assert_is_reference(x)


def one_launch(monkeypatch: pytest.MonkeyPatch, x: Tensor, wanted: tuple[bool, bool] = (True, True)) -> Launch:
    with monkeypatch.context() as patched:
        (launch,) = launches_of(
            patched,
            amax_kernels,
            "_launch_packed",
            lambda: amax_kernels.amax_by_row_and_column_triton(x, *wanted),
        )
    return launch


def test_what_is_not_in_words_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.ones(40, 66, dtype=torch.bfloat16)
    for x in (wide, wide[:, :64], wide.half(), wide.t()):
        one_launch(monkeypatch, x)
    # Elements of 32 bits; an odd width, an odd stride, an address between words; rows and strides beyond 31 bits.
    long = torch.empty_strided((2, 2), (2**26, 1), dtype=torch.bfloat16, device="meta")
    for x in (wide.float(), wide[:, :65], torch.ones(40, 67).half()[:, :66], wide[:, 1:65]):
        (launch,) = launches_of(
            monkeypatch,
            amax_kernels,
            "_launch_by_row_and_column",
            lambda x=x: amax_kernels.amax_by_row_and_column_triton(x, True, True),
        )
        assert launch.tensors[0] is x
    assert not packed_kernel.is_packed(long)
    assert not packed_kernel.is_packed(wide[:1, :2].expand(2**31, 2))
    assert not packed_kernel.is_packed(torch.empty_strided((2, 2**31), (0, 1), dtype=torch.bfloat16, device="meta"))


def test_equal_keys_are_one_variant_of_tritons_and_the_number_of_rows_makes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variants: dict[object, list[tuple[str, object]]] = {}
    for dtype in HALVES:
        for rows in (1, 2, 16, 17, 4096):
            for columns in (2, 6, 8, 16, 32, 48, 64, 8188):
                for extra in (0, 2, 16):
                    x = torch.ones(rows, columns + extra, dtype=dtype)[:, :columns]
                    launch = one_launch(monkeypatch, x)
                    variant = specialized(packed_kernel.packed_amax_kernel, launch)
                    assert variants.setdefault(launch.key, variant) == variant, launch.key
    # Of each dtype one for each common alignment: 1, 2, 4, 8 and 16.
    assert len(variants) == 2 * 5


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("wanted", WANTED, ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_pairs_are_compared_by_one_instruction_and_read_sixteen_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: tuple[bool, bool], capability: int, tmp_path: Path
) -> None:
    for columns, loads in ((8192, "v4"), (8184, "v4"), (8188, "v2"), (8190, None)):
        x = torch.ones(1, columns, dtype=dtype).expand(64, columns).contiguous()
        variant = compiled(packed_kernel.packed_amax_kernel, one_launch(monkeypatch, x, wanted), capability)
        ptx = variant.asm["ptx"]
        assert ("ld.global.v4.b32" in ptx, "ld.global.v2.b32" in ptx) == (loads == "v4", loads == "v2")
        assert "max.s16x2" in ptx
        assert ptx.count("atom.global") + ptx.count("red.global") >= sum(wanted)
        assert ".ftz" not in ptx
        assert "max.f32" not in ptx
        if capability == HOPPER:
            assert stack_and_local_bytes(variant, tmp_path) == [0, 0]
