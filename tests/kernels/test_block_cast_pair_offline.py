"""What Triton makes of the kernel that casts two matrices, without a device; which launches are one variant of it."""

from __future__ import annotations

import re
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from tests.kernels.variants import HOPPER, Launch, compiled, launches_of, specialized, stack_and_local_bytes

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels import ScaleRule
from octavo.kernels.block_cast import BlockCast, pair_kernel
from octavo.kernels.block_cast import triton_kernel as kernels
from octavo.kernels.block_cast.packed_kernel import OPTIONS
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

KERNEL = pair_kernel.packed_pair_cast_kernel
HALVES = [torch.bfloat16, torch.float16]
POWER_OF_TWO = ScaleRule(power_of_two=True)
# rowwise and columnwise of x, and of w: of a training, of a frozen weight, of what needs no gradient.
LAYOUTS = [((True, True), (True, True)), ((True, True), (True, False)), ((True, False), (True, False))]


def casts(
    x: Tensor,
    w: Tensor,
    rule: ScaleRule = POWER_OF_TWO,
    layouts: tuple[tuple[bool, bool], tuple[bool, bool]] = LAYOUTS[0],
    format: Format = E4M3,
) -> tuple[BlockCast, BlockCast]:
    return (
        BlockCast(x, format, BLOCK_1X128, rule, *layouts[0]),
        BlockCast(w, E4M3, BLOCK_128X128, rule, *layouts[1]),
    )


def one_launch(monkeypatch: pytest.MonkeyPatch, *of: Any) -> Launch:
    with monkeypatch.context() as patched:
        (launch,) = launches_of(
            patched, pair_kernel, "_launch_pair", lambda: pair_kernel.block_cast_pair_triton(*casts(*of))
        )
    return launch


def matrices(dtype: torch.dtype, columns: int = 256) -> tuple[Tensor, Tensor]:
    return torch.ones(256, columns, dtype=dtype), torch.ones(128, columns, dtype=dtype)


def registers_of(variant: Any, folder: Path) -> int:
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(variant.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    listing = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    (registers,) = re.findall(r"REG:(\d+)", listing)
    return int(registers)


@pytest.mark.parametrize("layouts", LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", [POWER_OF_TWO, ScaleRule()], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_three_programs_fit_on_a_multiprocessor_and_nothing_is_spilled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, rule: ScaleRule, layouts: Any
) -> None:
    """So many as of a launch for one matrix: w costs x's programs no place."""
    for columns in (256, 264):
        launch = one_launch(monkeypatch, *matrices(dtype, columns), rule, layouts)
        variant = compiled(KERNEL, launch, HOPPER, **OPTIONS)
        assert 3 * 32 * launch.warps * registers_of(variant, tmp_path) <= 65536
        assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_of_rows_that_are_no_multiple_of_four_elements_little_is_spilled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for dtype, columns in product(HALVES, (260, 258)):
        launch = one_launch(monkeypatch, *matrices(dtype, columns))
        stack, local = stack_and_local_bytes(compiled(KERNEL, launch, HOPPER, **OPTIONS), tmp_path)
        assert stack <= (32 if columns == 258 else 0)
        assert local == 0


def test_its_loads_and_stores_are_those_of_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = matrices(torch.bfloat16)
    pair = compiled(KERNEL, one_launch(monkeypatch, x, w)).asm["ptx"]
    with monkeypatch.context() as patched:
        apart = launches_of(
            patched,
            kernels,
            "_launch_packed",
            lambda: [kernels.block_cast_triton(*cast) for cast in casts(x, w)],
        )
    texts = [compiled(kernels.packed_block_cast_kernel, launch).asm["ptx"] for launch in apart]
    for pattern in (
        r"ld\.global[.\w:]*\.v4\.b32",
        r"ld\.global",
        r"st\.global[.\w:]*\.v4\.b32",
        r"st\.global",
        "cvt.*e4m3x2",
    ):
        assert len(re.findall(pattern, pair)) == sum(len(re.findall(pattern, text)) for text in texts) > 0


def test_programs_of_the_weight_follow_those_of_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = one_launch(monkeypatch, torch.ones(8192, 1280).bfloat16(), torch.ones(1280, 1280).bfloat16())
    assert launch.programs == 640 + 100
    assert launch.numbers == (8192, 40, 40, 1280, 40, 40)
    assert [tuple(tensor.shape) for tensor in (launch.tensors[0], launch.tensors[6])] == [(8192, 1280), (1280, 1280)]
    assert launch.constants[0] == launch.constants[14] == 16
    half = len(launch.constants) // 2
    place = KERNEL.arg_names.index("X_SQUARE") - KERNEL.arg_names.index("X_ALIGN")
    assert (launch.constants[place], launch.constants[half + place]) == (False, True)


def test_it_has_the_arguments_of_a_tile_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each under its own name: what is handed over by place comes where it belongs."""
    of_tile = kernels.packed_block_cast_kernel.arg_names
    twice = [
        *of_tile[:6],
        *of_tile[:6],
        *of_tile[6:9],
        *of_tile[6:9],
        *of_tile[9:],
        *of_tile[9:],
    ]
    assert of_tile[6:10] == ["rows", "words", "stride_row", "ALIGN"]
    stripped = [name[2:] if name[:2] in ("x_", "w_", "X_", "W_") else "x" for name in KERNEL.arg_names]
    assert stripped == twice


SHAPES = [(1, 2), (1, 16), (2, 2), (6, 12), (17, 32), (300, 130), (4096, 64), (3, 8188)]


def views(shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    rows, columns = shape
    return [
        torch.ones(shape, dtype=dtype),
        torch.ones(rows, columns + 16, dtype=dtype)[:, :columns],
        torch.ones(rows, columns + 2, dtype=dtype)[:, :columns],
    ]


@pytest.mark.parametrize("dtypes", [*product(HALVES, HALVES)], ids=str)
def test_launches_with_equal_keys_are_one_variant_of_tritons(
    monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    xs, ws = ([x for shape in SHAPES for x in views(shape, dtype)] for dtype in dtypes)
    # Each with several of the others, not with all.
    pairs = [(x, ws[(5 * number + step) % len(ws)]) for number, x in enumerate(xs) for step in range(4)]

    def call() -> None:
        for number, (x, w) in enumerate(pairs):
            for format, layouts in product((E4M3, E5M2), LAYOUTS):
                rule = ScaleRule((number % 2 / 8).hex(), bool(number % 3))
                pair_kernel.block_cast_pair_triton(*casts(x, w, rule, layouts, format))

    launches = launches_of(monkeypatch, pair_kernel, "_launch_pair", call)
    variants: dict[Any, Any] = {}
    for launch in launches:
        variant = specialized(KERNEL, launch)
        assert variants.setdefault((launch.key, launch.warps), variant) == variant, launch.key
    # Other alignments, formats and layouts are other variants.
    assert len({str(variant) for variant in variants.values()}) == len(variants) > 2 * len(LAYOUTS)


def test_the_number_of_tokens_makes_no_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    w, keys, kinds = torch.ones(48, 64, dtype=torch.bfloat16), set(), set()
    for rows in (1, 2, 15, 16, 17, 128, 4096):
        launch = one_launch(monkeypatch, torch.ones(rows, 64, dtype=torch.bfloat16), w)
        keys.add(launch.key)
        kinds.add(specialized(KERNEL, launch)[KERNEL.arg_names.index("x_rows")])
    assert len(keys) == 1
    assert kinds == {("i32", None)}
