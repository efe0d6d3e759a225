"""What Triton makes of the kernels for Ada, Hopper and Blackwell, without a device: the instructions the bits rest on.

Launches are those that the launchers make for a matrix in host memory, so flags, constants and what Triton specializes
are the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kernels.sources import KINDS, RULES, given, rule_of
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.variants import (
    ADA,
    BLACKWELL,
    HOPPER,
    Launch,
    compiled,
    launches_of,
    specialized,
    stack_and_local_bytes,
)

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.cast_transpose import launch as cast_kernels

CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Cast = Callable[..., Any]


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> Cast:
    """The compiled variant of one cast_transpose."""

    def variant(x: Tensor, format: Format, kind: str, capability: int = HOPPER, **flags: Any) -> Any:
        rule = rule_of(kind, flags.pop("rule", RULES[0]))
        with monkeypatch.context() as patched:
            (launch,) = launches_of(
                patched,
                cast_kernels,
                "_launch_kernel",
                lambda: cast_kernels.cast_transpose_triton(x, format, *given(kind, x), rule, **flags),
            )
        return compiled(cast_kernels.cast_transpose_kernel, launch, capability)

    return variant


def matrix(dtype: torch.dtype = torch.bfloat16, columns: int = 64) -> Tensor:
    return torch.ones(64, columns, dtype=dtype)


def everything() -> dict[str, Any]:
    return {"gathered": torch.zeros(()), "inf_to_nan": True, "column_sum": True, "rule": RULES[3]}


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def vectors(ptx: str) -> tuple[int, int]:
    """(loads, stores) of 16 bytes from and to global memory."""
    return count(r"ld\.global[.\w:]*\.v4\.b32", ptx), count(r"st\.global[.\w:]*\.v4\.b32", ptx)


@pytest.mark.parametrize("flags", [{}, everything()], ids=["nothing else", "everything at once"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_scale_compiles_and_keeps_all_in_registers(
    cast: Cast, kind: str, flags: dict[str, Any], tmp_path: Path
) -> None:
    """With and without all else that one read can give; both formats, one each; blocks small and large."""
    format = E5M2 if flags else E4M3
    variant = cast(matrix(), format, kind, **dict(flags))
    ptx = variant.asm["ptx"]
    assert (CONVERSION[format] in ptx) == (kind != "nothing")
    assert (count(r"\b(atom|red)\.global", ptx) > 0) == bool(flags)
    assert ".ftz" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("name", ["gathered", "inf_to_nan", "column_sum"])
@pytest.mark.parametrize("kind", ["shared", "row and column", "8 partial amaxes"])
def test_each_flag_compiles_alone(cast: Cast, kind: str, name: str, tmp_path: Path) -> None:
    plain, variant = (cast(matrix(), E4M3, kind, **flags) for flags in ({}, {name: everything()[name]}))
    assert variant.asm["ptx"] != plain.asm["ptx"]
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("kind", ["shared", "scalars", "row and column", "8 partial amaxes", "amax by row and column"])
def test_what_compiled_code_launches_keeps_all_in_registers(kind: str, tmp_path: Path) -> None:
    x = matrix()
    # No recipe asks for sums with scales given by row and column: of those ptxas keeps 8 bytes on the stack.
    sums, gathered = kind != "row and column", torch.zeros(())
    call = cast_kernels.prepare(x, E4M3, *given(kind, x), rule_of(kind), gathered, False, sums)
    launch = Launch(call.programs, None, call.tensors, call.numbers, call.constants, cast_kernels.WARPS)
    variant = compiled(cast_kernels.cast_transpose_kernel, launch)
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["shared", "row and column"])
def test_large_blocks_keep_all_in_registers(
    cast: Cast, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    monkeypatch.setattr(cast_kernels, "_LARGE", 1)
    variant = cast(matrix(dtype), E5M2, kind, **everything())
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_cast_is_one_multiplication_and_one_rounding_to_nearest(
    cast: Cast, dtype: torch.dtype, format: Format, capability: int
) -> None:
    ptx = cast(matrix(dtype), format, "shared", capability, gathered=torch.zeros(())).asm["ptx"]
    # A pair of values each: the codes and the words of the other layout.
    assert count(re.escape(CONVERSION[format]), ptx) > 0
    assert re.search(r"\bmul(\.rn)?\.f32(x2)?", ptx)
    # Nothing flushes subnormals, fuses the product with a sum, or goes through half precision.
    assert ".ftz" not in ptx
    assert "fma" not in ptx
    assert not re.search(r"cvt\.\w+(\.\w+)?\.f16(x2)?\.f32", ptx)


@pytest.mark.parametrize("capability", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", ["shared", "amax by row and column"])
def test_each_architecture_has_the_words_of_the_other_layout_from_the_same_instruction(
    cast: Cast, kind: str, capability: int
) -> None:
    for format in (E4M3, E5M2):
        ptx = cast(matrix(), format, kind, capability, **everything()).asm["ptx"]
        assert f".target sm_{capability}" in ptx
        assert CONVERSION[format] in ptx


def test_ada_rounds_single_codes_by_way_of_half_precision(cast: Cast) -> None:
    """Why Ada takes the reference: see `octavo.kernels.triton_support`."""
    ada, hopper = (cast(matrix(), E4M3, "codes only", capability).asm["ptx"] for capability in (ADA, HOPPER))
    assert CONVERSION[E4M3] not in ada
    assert "f16x2" in ada
    assert CONVERSION[E4M3] in hopper
    assert "f16x2" not in hopper


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("kind", ["one amax", "8 partial amaxes", "amax by row and column", "shared", "row and column"])
def test_divisions_of_a_scale_round_to_nearest(cast: Cast, kind: str, capability: int) -> None:
    ptx = cast(matrix(), E4M3, kind, capability).asm["ptx"]
    # An amax is divided into the multiplier, and that into the scale; a scale into the multiplier alone.
    assert count(r"div\.rn\.f32", ptx) >= (2 if "amax" in kind else 1)
    assert not re.search(r"div\.(full|approx)|rcp\.approx", ptx)
    assert ".ftz" not in ptx


def test_aligned_matrices_are_read_and_written_sixteen_bytes_at_a_time(cast: Cast) -> None:
    # 64 x 64 elements of two bytes among 128 threads are four loads of a thread; codes in two layouts two stores each.
    assert vectors(cast(matrix(), E4M3, "shared").asm["ptx"]) == (4, 4)
    assert vectors(cast(matrix(torch.float16), E5M2, "row and column").asm["ptx"])[0] >= 4
    assert vectors(cast(matrix(torch.float32), E4M3, "shared").asm["ptx"])[0] == 8
    # What is no multiple of 16 elements apart, or begins elsewhere, cannot be.
    assert vectors(cast(matrix()[:, 1:], E4M3, "shared").asm["ptx"])[0] == 0
    assert vectors(cast(matrix(columns=63), E4M3, "shared").asm["ptx"])[0] == 0


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
def test_rows_of_a_multiple_of_8_4_or_2_elements_are_read_as_many_bytes_at_a_time(cast: Cast, capability: int) -> None:
    """And no element alone; Triton by itself knows multiples of 16."""
    for columns, loads in ((72, "v4.b32"), (68, "v2.b32"), (66, "b32"), (65, "b16")):
        ptx = cast(matrix(columns=columns), E4M3, "shared", capability).asm["ptx"]
        read = re.findall(r"ld\.global\.(v4\.b32|v2\.b32|b32|b16)", ptx)
        # 64 x 64 elements among 128 threads, 32 each; and the scale, 4 bytes.
        each = {"v4.b32": 8, "v2.b32": 4, "b32": 2, "b16": 1}[loads]
        assert read.count(loads) - (loads == "b32") == 32 // each
        assert len(read) == 32 // each + 1
        # Codes lie in rows of a multiple of 16, and are written as ever.
        assert vectors(ptx)[1] == 4
    assert vectors(cast(matrix(torch.float32, 68), E4M3, "shared", capability).asm["ptx"])[0] == 8
    # Of a wider matrix both count, the columns and the stride.
    assert vectors(cast(matrix(columns=72)[:, :64], E4M3, "shared", capability).asm["ptx"])[0] == 4
    assert vectors(cast(matrix(columns=68)[:, :64], E4M3, "shared", capability).asm["ptx"])[0] == 0


def test_a_layout_that_nobody_wants_costs_no_store_and_no_shared_memory(cast: Cast) -> None:
    both, codes, transposed = (cast(matrix(), E4M3, kind) for kind in ("shared", "codes only", "transposed only"))
    stores = [vectors(variant.asm["ptx"])[1] for variant in (both, codes, transposed)]
    assert stores == [4, 2, 2]
    assert codes.metadata.shared == 0
    assert both.metadata.shared > 0
    assert transposed.metadata.shared > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_amax_reads_sixteen_bytes_at_a_time_and_flushes_nothing(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tmp_path: Path
) -> None:
    x = torch.ones(512, 64, dtype=dtype)
    (parts,) = launches_of(monkeypatch, amax_kernels, "_launch_partial", lambda: amax_kernels.partial_amax_triton(x))
    variant = compiled(amax_kernels.partial_amax_kernel, parts)
    ptx = variant.asm["ptx"]
    assert vectors(ptx)[0] == parts.arguments[-3] * dtype.itemsize // (16 * 32 * parts.warps)
    assert not count(r"\b(atom|red)\.global", ptx)
    assert ".ftz" not in ptx
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)], ids=str)
def test_amax_by_row_and_column_meets_in_atomic_maxima(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[bool, bool], tmp_path: Path
) -> None:
    # Of 16 bits what lies in words has a kernel of its own: see test_amax_packed.py.
    for dtype, columns in ((torch.float32, 64), (torch.float32, 68), (torch.bfloat16, 63), (torch.float16, 63)):
        x = torch.ones(512, columns, dtype=dtype)
        with monkeypatch.context() as patched:
            (launch,) = launches_of(
                patched,
                amax_kernels,
                "_launch_by_row_and_column",
                lambda x=x: amax_kernels.amax_by_row_and_column_triton(x, *wanted),
            )
        variant = compiled(amax_kernels.amax_by_row_and_column_kernel, launch)
        ptx = variant.asm["ptx"]
        assert (vectors(ptx)[0] > 0) == (dtype == torch.float32)
        # Of integers, one for each value; of floats there would be two, one for each sign.
        assert count(r"\b(atom|red)\.[.\w:]*max\.s32", ptx) >= sum(wanted)
        assert "min.u32" not in ptx
        assert ".ftz" not in ptx
        assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_tokens_are_no_constant_of_any_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even 1 and multiples of 16, for which Triton would compile anew."""
    for rows in (1, 16, 17):
        x = torch.ones(rows, 64, dtype=torch.bfloat16)
        for kernel, module, launcher, call in (
            (
                cast_kernels.cast_transpose_kernel,
                cast_kernels,
                "_launch_kernel",
                lambda x=x: cast_kernels.cast_transpose_triton(x, E4M3, *given("shared", x)),
            ),
            (
                amax_kernels.partial_amax_kernel,
                amax_kernels,
                "_launch_partial",
                lambda x=x: amax_kernels.partial_amax_triton(x),
            ),
            (
                amax_kernels.amax_by_row_and_column_kernel,
                amax_kernels,
                "_launch_by_row_and_column",
                lambda x=x: amax_kernels.amax_by_row_and_column_triton(x.float(), True, True),
            ),
            (
                amax_kernels.packed_amax_kernel,
                amax_kernels,
                "_launch_packed",
                lambda x=x: amax_kernels.amax_by_row_and_column_triton(x, True, True),
            ),
        ):
            with monkeypatch.context() as patched:
                (launch,) = launches_of(patched, module, launcher, call)
            assert specialized(kernel, launch)[kernel.arg_names.index("rows")] == ("i32", None)
