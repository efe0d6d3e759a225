"""normalise and its reference; the gradients are held to float64 in tests/kernels/test_norm_backward.py."""

from __future__ import annotations

import pytest
import torch

from octavo.functional.norm import normalise
from octavo.functional.reference import norm_reference
from octavo.kernels.norm_backward import norm_backward
from octavo.kernels.norm_cast import Norm, norm_output

BF16 = torch.bfloat16
KINDS = ("layer", "rms")


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_torchs(kind: str) -> None:
    x, weight, bias = torch.randn(5, 40).double(), torch.randn(40).double(), torch.randn(40).double()
    ours = norm_reference(x, Norm(kind, (1e-3).hex(), True), weight - 1, bias)
    if kind == "layer":
        theirs = torch.nn.functional.layer_norm(x, (40,), weight, bias, 1e-3)
    else:
        theirs = torch.nn.functional.rms_norm(x, (40,), weight, 1e-3) + bias
    assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_kernels(kind: str) -> None:
    """Through views too, whose rows do not lie side by side."""
    norm, weight = Norm(kind, through=BF16), torch.randn(8, requires_grad=True)
    x = torch.randn(8, 6, dtype=BF16).t().requires_grad_()
    dy = torch.randn(6, 8, dtype=BF16)
    dx, dweight = torch.autograd.grad(normalise(x, norm, weight, None), (x, weight), dy)
    rows = x.detach().contiguous()
    _, _, mean, rstd = norm_output(rows, norm, weight.detach(), None)
    expected = norm_backward(dy, rows, norm, weight.detach(), mean, rstd)
    assert torch.equal(dx, expected[0])
    assert torch.equal(dweight, expected[1])


def test_gradients_have_the_dtypes_of_their_leaves() -> None:
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, dtype=torch.float16, requires_grad=True)
    y = normalise(x, Norm("layer", through=torch.float16), weight, bias)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert [t.grad.dtype for t in (x, weight, bias)] == [BF16, torch.float32, torch.float16]
