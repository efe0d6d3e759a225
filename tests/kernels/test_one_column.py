"""A matrix of one column takes the reference on every device, in every cast: see `one_column_reasons`.

Tensors say that they are on a GPU which runs the twins; the twins only say that they were called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.variants import launches_of
from torch import Tensor

pytest.importorskip("triton")

from octavo.formats import E4M3, E5M2
from octavo.kernels import ScaleRule
from octavo.kernels.activation_backward_cast import activation_backward_cast, activation_backward_output
from octavo.kernels.activation_cast import activation_cast, activation_output
from octavo.kernels.block_cast import block_cast
from octavo.kernels.block_cast import triton_kernel as block_kernels
from octavo.kernels.norm_cast import Norm, norm_cast, norm_output
from octavo.scaling import BLOCK_1X128, BLOCK_128X128

BF16 = torch.bfloat16
ONE = torch.ones(())
# Kernel, function that launches it, activation (None: x has as many columns as the result).
CASES: dict[str, tuple[str, str, str | None, Callable[[Tensor, Tensor], Any]]] = {
    "block_cast 1x128": (
        "block_cast", "block_cast_triton", None,
        lambda x, _: block_cast(x, E4M3, BLOCK_1X128, ScaleRule()),
    ),
    "block_cast 128x128": (
        "block_cast", "block_cast_triton", None,
        lambda x, _: block_cast(x, E4M3, BLOCK_128X128, ScaleRule(), True, False),
    ),
    "norm_cast": (
        "norm_cast", "norm_cast_triton", None,
        lambda x, _: norm_cast(x, Norm("layer"), None, None, E4M3, ONE),
    ),
    "norm_output": ("norm_cast", "norm_output_triton", None, lambda x, _: norm_output(x, Norm("rms"), None, None)),
    "activation_cast": (
        "activation_cast", "activation_cast_triton", "relu",
        lambda x, _: activation_cast(x, "relu", E4M3, ONE),
    ),
    "activation_cast, gated": (
        "activation_cast", "activation_cast_triton", "swiglu",
        lambda x, _: activation_cast(x, "swiglu", E4M3, ONE),
    ),
    "activation_output": (
        "activation_cast", "activation_output_triton", "relu",
        lambda x, _: activation_output(x, "relu", BF16),
    ),
    "activation_output, gated": (
        "activation_cast", "activation_output_triton", "swiglu",
        lambda x, _: activation_output(x, "swiglu", BF16),
    ),
    "activation_backward_cast": (
        "activation_backward_cast", "activation_backward_cast_triton", "relu",
        lambda x, grad: activation_backward_cast(grad, x, "relu", E5M2, ONE),
    ),
    "activation_backward_cast, gated": (
        "activation_backward_cast", "activation_backward_cast_triton", "swiglu",
        lambda x, grad: activation_backward_cast(grad, x, "swiglu", E5M2, ONE),
    ),
    "activation_backward_output": (
        "activation_backward_cast", "activation_backward_output_triton", "relu",
        lambda x, grad: activation_backward_output(grad, x, "relu", BF16),
    ),
    "activation_backward_output, gated": (
        "activation_backward_cast", "activation_backward_output_triton", "swiglu",
        lambda x, grad: activation_backward_output(grad, x, "swiglu", BF16),
    ),
}  # fmt: skip


class TwinCalled(Exception):
    """Instead of a launch."""


@pytest.mark.parametrize("case", CASES)
def test_one_column_takes_the_reference_and_two_the_twin(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    kernel, twin, activation, call = CASES[case]
    halves = 2 if activation == "swiglu" else 1

    def refuse(*_: Any) -> None:
        raise TwinCalled

    module = importlib.import_module(f"octavo.kernels.{kernel}")
    monkeypatch.setattr(importlib.import_module(f"octavo.kernels.{kernel}.triton_kernel"), twin, refuse)
    one, two = ((torch.randn(5, halves * columns), torch.randn(5, columns)) for columns in (1, 2))
    expected = call(*one)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
        for name in ("runs_on", "uses_triton"):
            if hasattr(module, name):
                on_a_gpu.setattr(module, name, lambda *_: True)
        found = call(*one)
        with pytest.raises(TwinCalled):
            call(*two)
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("case", CASES)
def test_the_reason_is_given(case: str) -> None:
    kernel, _, activation, _ = CASES[case]
    module = importlib.import_module(f"octavo.kernels.{kernel}")
    arguments = (E4M3,) if activation is None else (E4M3, activation)
    halves = 2 if activation == "swiglu" else 1
    for columns in (1, 2):
        reasons = module.unsupported_reasons(torch.ones(5, halves * columns), *arguments)
        assert any("one column" in reason for reason in reasons) == (columns == 1)


def test_a_row_with_gaps_is_not_made_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(333, 7)[:, :1].t()
    assert x.stride() == (1, 7)
    for granularity in (BLOCK_1X128, BLOCK_128X128):
        with monkeypatch.context() as patched:
            (launch,) = launches_of(
                patched,
                block_kernels,
                "_launch_general",
                lambda blocks=granularity: block_kernels.block_cast_triton(x, E4M3, blocks, ScaleRule()),
            )
        assert launch.numbers == (1, 333, 333)


@pytest.mark.parametrize(("shape", "by_inductor"), [((5, 1), False), ((1, 5), False), ((5, 2), True)], ids=str)
def test_inductor_launches_neither_one_column_nor_one_row(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], by_inductor: bool
) -> None:
    """Both would be constants of its variant."""
    module = importlib.import_module("octavo.kernels.block_cast")

    def refuse() -> None:
        raise TwinCalled

    x = torch.randn(shape)
    expected = block_cast(x, E4M3, BLOCK_1X128, ScaleRule())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(module, "_inductor_operator", refuse)
    monkeypatch.setattr(module, "runs_compiled", lambda *_: True)
    # What the operator asks itself when it runs.
    monkeypatch.setattr(module, "runs_on", lambda *_: False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    if by_inductor:
        with pytest.raises(TwinCalled):
            block_cast(x, E4M3, BLOCK_1X128, ScaleRule())
        return
    found = block_cast(x, E4M3, BLOCK_1X128, ScaleRule())
    assert found.codes is not None
    assert expected.codes is not None
    assert torch.equal(found.codes.float(), expected.codes.float())
