"""delayed_update: the Triton twin against the reference, bit for bit; what falls back, and why."""

from __future__ import annotations

import math

import pytest
import torch
from tests.kernels.interpreting import interpreted, silent
from torch import Tensor

from octavo.kernels.delayed_update import delayed_update, delayed_update_reference, unsupported_reasons

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


@pytest.mark.parametrize("length", [1, 1024, 16384])
def test_it_compiles_for_hopper_and_divides_exactly(length: int) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from octavo.kernels.delayed_update.triton_kernel import delayed_update_kernel as kernel

    names = kernel.arg_names
    types = dict.fromkeys(names[:5], "*fp32") | dict.fromkeys(("length", "stride_scale", "first"), "i32")
    constants = {"MOST_RECENT": False, "HEADROOM": 1.0, "FIRST_MAX": 448.0, "OTHER_MAX": 57344.0}
    constants |= {"SMALLEST": 2.0**-126, "LARGEST": 2.0**126, "GAP": 4, "BLOCK": length}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "div.full" not in ptx
