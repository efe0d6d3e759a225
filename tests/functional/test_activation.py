"""activate: the kernels' functions under autograd, and an input kept as codes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octavo
from octavo.functional.activation import activate, decoded, stored
from octavo.kernels.activation_backward_cast import activation_backward_output
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.activations import ACTIVATIONS, GATED

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_are_the_kernels(activation: str, dtype: torch.dtype) -> None:
    z = torch.randn(3, 5, 14).to(dtype).requires_grad_()
    a = activate(z, activation)
    da = torch.randn_like(a)
    a.backward(da)
    width = 7 if activation in GATED else 14
    rows, grads = z.detach().reshape(15, 14), da.reshape(15, width)
    assert torch.equal(a, activation_output(rows, activation, dtype).output.reshape(3, 5, width))
    expected = activation_backward_output(grads, rows, activation, dtype).output.reshape(3, 5, 14)
    assert torch.equal(z.grad, expected)
    with torch.no_grad():
        assert torch.equal(activate(z, activation), a)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float64_stays_float64_and_gradients_are_right(activation: str) -> None:
    z = torch.randn(3, 6, dtype=torch.float64)
    z = torch.where(z.abs() < 0.1, 0.5, z).requires_grad_()  # away from kinks
    assert activate(z, activation).dtype == torch.float64
    assert torch.autograd.gradcheck(lambda z: activate(z, activation), (z,))


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 16), (0, 16)], ids=str)
def test_an_input_kept_as_codes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The gradient is that at the values of E4M3 codes with one scale a row."""
    z = torch.randn(shape).to(dtype).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        a = activate(z, "silu", True)
    assert torch.equal(a, activate(z, "silu"))
    assert {t.dtype for t in kept} == {torch.float8_e4m3fn, torch.float32}
    a.sum().backward()
    rows = z.detach().reshape(-1, shape[-1])
    values = octavo.quantize(rows, octavo.E4M3, granularity="row").dequantize(torch.float32).to(dtype)
    ones = torch.ones_like(rows)
    expected = activation_backward_output(ones, values, "silu", dtype).output
    assert torch.equal(z.grad, expected.reshape(shape))


def test_codes_hold_nan_and_saturate_infinity() -> None:
    z = torch.tensor([[1.0, float("nan")], [2.0, float("inf")], [0.0, 0.0]])
    values = decoded(*stored(z), (3, 2), torch.float32)
    assert values[0, 0] == 1.0
    assert bool(values[0, 1].isnan())
    assert values[1].tolist() == [2.0, 2.0], "the largest value of that row's scale"
    assert values[2].tolist() == [0.0, 0.0]


def test_gradients_of_gradients_are_refused() -> None:
    z = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True asks for the gradient of the gradient of silu"):
        torch.autograd.grad(activate(z, "silu").sum(), z, create_graph=True)
