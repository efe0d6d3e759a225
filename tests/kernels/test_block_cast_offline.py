"""What Triton makes of block_cast's two kernels, without a device; which launches are one variant of it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
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
from triton.runtime.errors import PTXASError

from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.block_cast import triton_kernel as kernels
from octavo.kernels.block_cast.packed_kernel import OPTIONS
from octavo.scaling import BLOCK_1X128, BLOCK_128X128, Granularity

GRANULARITIES = [BLOCK_1X128, BLOCK_128X128]
HALVES = [torch.bfloat16, torch.float16]
POWER_OF_TWO = ScaleRule(power_of_two=True)
# rowwise, columnwise, inf_to_nan, column_sum
FLAGS = [(True, True, False, False), (True, True, True, True), (True, False, False, False), (False, True, True, False)]
PACKED, GENERAL = kernels.packed_block_cast_kernel, kernels.block_cast_kernel
LAUNCHERS = {PACKED: "_launch_packed", GENERAL: "_launch_general"}


def one_launch(monkeypatch: pytest.MonkeyPatch, kernel: Any, x: Tensor, *arguments: Any) -> Launch:
    with monkeypatch.context() as patched:
        (launch,) = launches_of(patched, kernels, LAUNCHERS[kernel], lambda: kernels.block_cast_triton(x, *arguments))
    return launch


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def tool(name: str, option: str, variant: Any, folder: Path) -> str:
    """What one of NVIDIA's tools says of a variant."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(variant.asm["cubin"])
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, option, cubin], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_it_moves_sixteen_bytes_at_a_time_and_spills_little(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: torch.dtype,
    granularity: Granularity,
    flags: Any,
    capability: int,
) -> None:
    packed = dtype in HALVES
    kernel, x = PACKED if packed else GENERAL, torch.ones(256, 256, dtype=dtype)
    launch = one_launch(monkeypatch, kernel, x, E5M2 if flags[2] else E4M3, granularity, POWER_OF_TWO, *flags)
    variant = compiled(kernel, launch, capability)
    ptx, threads = variant.asm["ptx"], 32 * launch.warps
    # Words are read once for all. Of values another read is for the sums of a gradient, which keep the inf that its
    # codes lose.
    reads = 1 if packed else 1 + (flags[2] and flags[3])
    loads = count(r"ld\.global[.\w:]*\.v4\.b32", ptx)
    assert loads == reads * 128 * 128 * dtype.itemsize // (16 * threads)
    assert loads == count(r"ld\.global", ptx)
    assert count(r"st\.global[.\w:]*\.v4\.b32", ptx) == (flags[0] + flags[1]) * 128 * 128 // (16 * threads)
    assert ("e5m2x2" if flags[2] else "e4m3x2") in ptx
    assert ".ftz" not in ptx
    # Both layouts of 1x128 by 4 warps, 128 float32 values a thread, want more than its 255 registers: up to 16 of them
    # go to the stack. Words take half, and all of them fit.
    stack, local = stack_and_local_bytes(variant, tmp_path)
    assert stack <= (64 if granularity is BLOCK_1X128 and flags[0] and flags[1] and not packed else 0)
    assert local == 0


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_three_eager_programs_of_words_fit_on_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, granularity: Granularity, flags: Any
) -> None:
    launch = one_launch(monkeypatch, PACKED, torch.ones(256, 256, dtype=dtype), E4M3, granularity, POWER_OF_TWO, *flags)
    variant = compiled(PACKED, launch, **OPTIONS)
    (registers,) = re.findall(r"REG:(\d+)", tool("cuobjdump", "-res-usage", variant, tmp_path))
    assert 3 * 32 * launch.warps * int(registers) <= 65536
    # The sums of a gradient, which inf enters, want a few registers more.
    stack, local = stack_and_local_bytes(variant, tmp_path)
    assert stack <= (32 if flags[2] else 0)
    assert local == 0


@pytest.mark.parametrize("capability", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_amaxes_of_words_are_compared_two_at_a_time_and_converted_last(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: torch.dtype,
    granularity: Granularity,
    flags: Any,
    capability: int,
) -> None:
    launch = one_launch(monkeypatch, PACKED, torch.ones(256, 256, dtype=dtype), E4M3, granularity, POWER_OF_TWO, *flags)
    variant = compiled(PACKED, launch, capability)
    ptx = variant.asm["ptx"]
    # 64 words a thread: their amaxes by column, or by row, or both, are one comparison for each word but the last few.
    directions = 1 if granularity is BLOCK_128X128 else flags[0] + flags[1]
    assert count(r"max\.s16x2", ptx) >= directions * 56
    assert "VIMNMX.S16x2" in tool("cuobjdump", "-sass", variant, tmp_path)
    # float32 has the amaxes alone, of the 128 elements of a thread at most these.
    assert count(r"max\.f32", ptx) < 32
    # fp16 becomes float32 by an instruction (of bf16 the bits are): each element for its codes, once more where inf
    # becomes NaN and its sum has seen inf, and the amaxes.
    elements = 128 * (1 + (flags[2] and flags[3]))
    conversions = count(r"cvt\.f32\.f16", ptx)
    assert conversions == 0 if dtype == torch.bfloat16 else elements < conversions < elements + 32


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_rows_of_a_multiple_of_8_4_or_2_elements_are_read_as_many_bytes_at_a_time(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tmp_path: Path
) -> None:
    """No element alone, and no register spills."""
    for columns, loads, words in ((264, "v4.b32", 4), (260, "v2.b32", 2), (258, "b32", 1)):
        for granularity in GRANULARITIES:
            x = torch.ones(256, columns, dtype=dtype)
            variant = compiled(PACKED, one_launch(monkeypatch, PACKED, x, E5M2, granularity, ScaleRule(), *FLAGS[1]))
            read = re.findall(r"ld\.global\.(v4\.b32|v2\.b32|b32|b16)", variant.asm["ptx"])
            # 64 words of each thread.
            assert read == [loads] * (64 // words)
            assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(PACKED, torch.bfloat16), (GENERAL, torch.float32)], ids=["packed", "general"]
)
def test_several_tiles_fit_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kernel: Any, dtype: torch.dtype
) -> None:
    """So that one tile's arithmetic covers another one's loads: of 65536 registers."""
    for granularity in GRANULARITIES:
        for flags in FLAGS:
            x = torch.ones(256, 256, dtype=dtype)
            launch = one_launch(monkeypatch, kernel, x, E4M3, granularity, POWER_OF_TWO, *flags)
            listing = tool("cuobjdump", "-res-usage", compiled(kernel, launch), tmp_path)
            (registers,) = re.findall(r"REG:(\d+)", listing)
            both = flags[0] and flags[1]
            # Of words those of one layout, or of weights, without the sums that these never have.
            tiles = 2 if kernel is GENERAL or (both and (granularity is BLOCK_1X128 or flags[3])) else 3
            assert tiles * 32 * launch.warps * int(registers) <= 65536


@pytest.mark.parametrize("rule", [ScaleRule(), POWER_OF_TWO], ids=str)
def test_scales_that_are_no_powers_of_two_are_divisions_rounded_to_nearest(
    monkeypatch: pytest.MonkeyPatch, rule: ScaleRule
) -> None:
    for kernel, dtype in ((PACKED, torch.bfloat16), (GENERAL, torch.float32)):
        x = torch.ones(256, 256, dtype=dtype)
        ptx = compiled(kernel, one_launch(monkeypatch, kernel, x, E4M3, BLOCK_1X128, rule)).asm["ptx"]
        assert (count(r"div\.rn\.f32", ptx) > 0) == (not rule.power_of_two)
        assert not re.search(r"div\.(full|approx)|rcp\.approx|fma\.rn", ptx)


def test_neither_kernel_of_words_is_one_for_ada(monkeypatch: pytest.MonkeyPatch) -> None:
    """max.s16x2 begins with sm_90. Nor does Ada run any other twin: see `octavo.kernels.triton_support`."""
    x = torch.ones(256, 256, dtype=torch.bfloat16)
    with monkeypatch.context() as patched:
        (amaxes,) = launches_of(
            patched,
            amax_kernels,
            "_launch_packed",
            lambda: amax_kernels.amax_by_row_and_column_triton(x, True, True),
        )
    cast = one_launch(monkeypatch, PACKED, x, E4M3, BLOCK_1X128, POWER_OF_TWO)
    for kernel, launch in ((amax_kernels.packed_amax_kernel, amaxes), (PACKED, cast)):
        with pytest.raises(PTXASError, match=r"'max.s16x2' requires .target sm_90"):
            compiled(kernel, launch, ADA)
        compiled(kernel, launch, HOPPER)


def test_what_is_not_in_words_takes_the_general_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.ones(40, 66, dtype=torch.bfloat16)
    for x in (wide, wide[:, :64], wide[:, :2], wide[::3], wide.half(), wide.t(), wide[:1]):
        for granularity in GRANULARITIES:
            one_launch(monkeypatch, PACKED, x, E4M3, granularity, POWER_OF_TWO)
    # Elements of 32 and 64 bits; an odd width, an odd stride, addresses that are no multiple of 16 bytes; one row of a
    # transposed matrix, the stride of which is that of its columns.
    others = (wide.float(), wide.double(), wide[:, :65], torch.ones(40, 67).half()[:, :66], wide[:, 1:65], wide[:, 4:])
    for x in (*others, torch.ones(66, 7, dtype=torch.bfloat16)[:, :3].t()):
        for granularity in GRANULARITIES:
            one_launch(monkeypatch, GENERAL, x, E4M3, granularity, POWER_OF_TWO)


def views(shape: tuple[int, int], dtype: torch.dtype) -> Iterator[Tensor]:
    rows, columns = shape
    yield torch.ones(shape, dtype=dtype)
    yield torch.ones(rows, columns + 16, dtype=dtype)[:, :columns]
    yield torch.ones(rows, columns + 2, dtype=dtype)[:, :columns]
    yield torch.ones(rows, columns + 1, dtype=dtype)[:, 1:]
    yield torch.ones(columns, rows, dtype=dtype).t()


SHAPES = [(1, 1), (1, 2), (1, 16), (16, 1), (2, 2), (7, 13), (6, 12), (17, 32), (300, 130), (4096, 64), (3, 8188)]


def all_launches(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> dict[Any, list[Launch]]:
    """Those of each kernel for matrices of every shape, every view, every granularity, format, rule and flag."""
    found: dict[Any, list[Launch]] = {PACKED: [], GENERAL: []}
    for kernel, launcher in LAUNCHERS.items():
        monkeypatch.setattr(
            kernels, launcher, lambda *arguments, kernel=kernel: found[kernel].append(Launch(*arguments))
        )
    monkeypatch.setattr("octavo.kernels.sum_kernel._launch_join", lambda *_: None)
    for shape, granularity, (number, flags) in product(SHAPES, GRANULARITIES, enumerate(FLAGS)):
        rule = ScaleRule((number / 8).hex(), bool(number % 2))
        for x in views(shape, dtype):
            for format in (E4M3, E5M2):
                kernels.block_cast_triton(x, format, granularity, rule, *flags)
    return found


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_launches_with_equal_keys_are_one_variant_of_tritons(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    found = all_launches(monkeypatch, dtype)
    for kernel, launches in found.items():
        variants: dict[Any, Any] = {}
        for launch in launches:
            variant = specialized(kernel, launch)
            assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
        if kernel is PACKED and dtype in HALVES:
            # Of each granularity and format one for each common alignment and set of flags. (The transposed problem
            # exchanges the layouts and has its sums from elsewhere: of three sets that is another one.)
            assert {launch.constants[0] for launch in launches} == {1, 2, 4, 8, 16}
            assert 2 * 2 * 5 * len(FLAGS) <= len(variants) <= 2 * 2 * 5 * (len(FLAGS) + 3)
        else:
            assert bool(variants) == (kernel is GENERAL)


@pytest.mark.parametrize(
    ("kernel", "dtype"), [(PACKED, torch.bfloat16), (GENERAL, torch.float32)], ids=["packed", "general"]
)
def test_the_number_of_tokens_makes_no_variant(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, dtype: torch.dtype
) -> None:
    keys, kinds = set(), set()
    for rows in (1, 2, 15, 16, 17, 128, 4096):
        launch = one_launch(monkeypatch, kernel, torch.ones(rows, 64, dtype=dtype), E4M3, BLOCK_1X128, POWER_OF_TWO)
        keys.add(launch.key)
        kinds.add(specialized(kernel, launch)[kernel.arg_names.index("rows")])
    assert len(keys) == 1
    assert kinds == {("i32", None)}
