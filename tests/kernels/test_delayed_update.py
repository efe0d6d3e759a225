"""delayed_update: the Triton twins against the reference, bit for bit; what falls back, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import interpreted, silent
from torch import Tensor

from octavo.kernels.delayed_update import (
    delayed_update,
    delayed_update_in_place,
    delayed_update_reference,
    unsupported_reasons,
)
from octavo.kernels.delayed_update.in_place import addresses_of

pytest.importorskip("triton")

LENGTHS = [1, 2, 3, 16, 100, 1024]
CASES = [(0, (448.0, 448.0), 32), (3, (57344.0, 448.0), 32), (-2, (448.0, 57344.0), 0), (1, (448.0, 57344.0), 19)]
LASTS = [0.0, 1.0, 3.5, 1e-30, 3e38, math.inf, math.nan, 5e-324]


def operands(length: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """(history, scale, last): every kind of newest amax, over pasts of numbers, of zeros, with inf and with NaN."""
    pasts = [torch.rand(length) * 10, torch.zeros(length), torch.rand(length), torch.rand(length)]
    pasts[2][-1], pasts[3][length // 2] = math.inf, math.nan
    rows = [past for past in pasts for _ in LASTS]
    history, last = torch.stack(rows), torch.tensor(LASTS * len(pasts))
    return history.to(device), (torch.rand(len(rows)) + 0.1).to(device), last.to(device)


def agree(length: int, device: str, strided: bool) -> None:
    from octavo.kernels.delayed_update.triton_kernel import delayed_update_triton

    history, scale, last = operands(length, device)
    given = torch.stack([scale] * 4, 1)[:, 0] if strided else scale
    before = history.clone()
    for algorithm in ("max", "most_recent"):
        for margin, maxima, first in CASES:
            expected = delayed_update_reference(history, scale, last, maxima, first, margin, algorithm)  # type: ignore[arg-type]
            found = delayed_update_triton(history, given, last, maxima, first, margin, algorithm)
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a.contiguous().view(torch.int32), b.view(torch.int32))
            assert found[1].stride(0) * found[1].element_size() == 16
    assert torch.equal(history.view(torch.int32), before.view(torch.int32)), "nothing is written in place"


def agree_in_place(length: int, device: str, launched: bool) -> None:
    """Histories of tensors of their own and of rows of a table; the next call sees what the last one wrote."""
    history, scale, last = operands(length, device)
    table, scales, gathered = history.clone(), list(scale.clone()), list(last.clone())
    histories = [row if number % 2 else row.clone() for number, row in enumerate(table)]
    for algorithm in ("max", "most_recent"):
        for margin, maxima, first in CASES:
            rule: Any = (maxima, first, margin, algorithm)
            if launched:
                from octavo.kernels.delayed_update.triton_kernel import in_place_launch

                addresses = addresses_of(histories, scales, gathered)
                update = in_place_launch(addresses, length, maxima, first, margin, algorithm)
            else:
                update = delayed_update_in_place(histories, scales, gathered, *rule)
            for newest in (last, last.flip(0)):
                torch._foreach_copy_(gathered, list(newest))
                history, scale = delayed_update_reference(history, scale, newest, *rule)
                update()
                assert torch.equal(torch.stack(histories).view(torch.int32), history.view(torch.int32))
                assert torch.equal(torch.stack(scales).view(torch.int32), scale.view(torch.int32))
                assert not torch.stack(gathered).any()


@pytest.mark.parametrize("length", [1, 16])
def test_in_place_it_is_the_reference_to_the_bit(length: int) -> None:
    agree_in_place(length, "cpu", launched=False)


@silent
@interpreted
@pytest.mark.parametrize("length", LENGTHS)
def test_interpreted_in_place_it_is_the_reference_to_the_bit(length: int) -> None:
    agree_in_place(length, "cpu", launched=True)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [*LENGTHS, 16384])
def test_on_a_gpu_in_place_it_is_the_reference_to_the_bit(length: int) -> None:
    agree_in_place(length, "cuda", launched=False)


def test_in_place_writes_go_past_autograd() -> None:
    history, scale, gathered = torch.zeros(4), torch.ones(()), torch.tensor(2.0)
    update = delayed_update_in_place([history], [scale], [gathered], (448.0, 448.0), 1, 0, "max")
    update()
    assert (history._version, scale._version, gathered._version) == (0, 0, 0)
    assert history.tolist() == [0, 0, 0, 2]
    assert scale.item() == torch.tensor(2.0).div(448).item()


@silent
@interpreted
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_interpreted_it_is_the_reference_to_the_bit(length: int, strided: bool) -> None:
    agree(length, "cpu", strided)


@pytest.mark.gpu
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_on_a_gpu_it_is_the_reference_to_the_bit(length: int, strided: bool) -> None:
    agree(length, "cuda", strided)


def test_what_the_reference_takes_over_is_said() -> None:
    history = torch.zeros(2, 4)
    assert "function" in unsupported_reasons(history, lambda window: window.max())[-1]
    assert "0 windows" in unsupported_reasons(history[:0], "max")[-1]
    assert "16385" in unsupported_reasons(torch.zeros(1, 16385), "max")[-1]
    assert unsupported_reasons(history, "max") == ["the tensor is on cpu: Triton kernels need a CUDA device"]
    new_history, scale = delayed_update(history, torch.ones(2), torch.tensor([2.0, 0.0]), (448.0, 448.0), 2, 0, "max")
    assert new_history.tolist() == [[0, 0, 0, 2], [0, 0, 0, 0]]
    assert scale.tolist() == [torch.tensor(2.0).div(448).item(), 1.0]


def compiled_for_hopper(kernel: Any, types: dict[str, str], length: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {"MOST_RECENT": False, "HEADROOM": 1.0, "FIRST_MAX": 448.0, "OTHER_MAX": 57344.0}
    constants |= {"SMALLEST": 2.0**-126, "LARGEST": 2.0**126, "GAP": 4, "BLOCK": length}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
    )
    ptx: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return ptx


@pytest.mark.parametrize("length", [1, 1024, 16384])
def test_it_compiles_for_hopper_and_divides_exactly(length: int) -> None:
    from octavo.kernels.delayed_update.triton_kernel import delayed_update_kernel as kernel

    types = dict.fromkeys(kernel.arg_names[:5], "*fp32") | dict.fromkeys(("length", "stride_scale", "first"), "i32")
    ptx = compiled_for_hopper(kernel, types, length)
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx


@pytest.mark.parametrize("length", [1, 1024, 16384])
def test_in_place_all_is_read_before_a_barrier_and_written_behind_it(length: int) -> None:
    from octavo.kernels.delayed_update.triton_kernel import delayed_update_in_place_kernel as kernel

    ptx = compiled_for_hopper(kernel, {"addresses": "*i64", "length": "i32", "first": "i32"}, length)
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
    last_read, first_written = ptx.rindex("ld.global"), ptx.index("st.global")
    assert "bar.sync" in ptx[last_read:first_written]
