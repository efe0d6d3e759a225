"""What Triton makes of grouped_cast's kernels for Hopper, without a device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.variants import Launch, compiled, stack_and_local_bytes

from octavo.formats import E4M3, E5M2, Format
from octavo.kernels.grouped_cast import groups_of, triton_kernel

CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}


def variant_of(monkeypatch: pytest.MonkeyPatch, call: Any) -> Any:
    launched: list[Any] = []
    monkeypatch.setattr(triton_kernel, "_launch", lambda *arguments: launched.append(arguments))
    call()
    ((kernel, _, tensors, numbers, constants),) = launched
    return compiled(kernel, Launch(0, None, tensors, numbers, constants, triton_kernel.WARPS))


@pytest.mark.parametrize(("by_row", "by_column"), [(True, 256), (True, 1), (True, 0), (False, 256)])
@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
def test_casts_keep_all_in_registers_and_convert_in_pairs(
    by_row: bool, by_column: int, format: Format, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x, groups = torch.ones(64, 256, dtype=torch.bfloat16), groups_of(torch.tensor([20, 44]), 64)
    rows = torch.ones(64, 1) if by_row else None
    columns = torch.ones(2, by_column) if by_column else None
    variant = variant_of(
        monkeypatch, lambda: triton_kernel.grouped_cast_triton(x, groups, format, rows, columns, format is E5M2)
    )
    ptx = variant.asm["ptx"]
    assert CONVERSION[format] in ptx
    assert ".ftz" not in ptx
    assert re.search(r"st\.global[.\w:]*\.v4\.b32", ptx)
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]


def test_column_amax_keeps_all_in_registers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, groups = torch.ones(64, 256, dtype=torch.bfloat16), groups_of(torch.tensor([20, 44]), 64)
    variant = variant_of(monkeypatch, lambda: triton_kernel.column_amax_triton(x, groups))
    assert re.search(r"\b(atom|red)\.[\w.]*global", variant.asm["ptx"])
    assert stack_and_local_bytes(variant, tmp_path) == [0, 0]
