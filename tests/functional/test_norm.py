"""norm_backward and norm_reference against autograd in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octavo.functional.norm import norm_backward, normalise
from octavo.functional.reference import norm_reference
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


def exact_gradients(dy: Tensor, x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    """(dx, dweight, dbias) by autograd in float64, those that exist."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    y = norm_reference(leaves[0], norm, leaves[1], leaves[2])
    return list(torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], dy.double()))


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_autograd_in_float64(kind: str, dtype: torch.dtype, zero_centered: bool) -> None:
    for rows, columns in ((33, 96), (1, 7), (200, 3)):
        norm = Norm(kind, (1e-3).hex(), zero_centered, dtype)
        x, dy = (torch.randn(rows, columns) * 3 + 1).to(dtype), torch.randn(rows, columns).to(dtype)
        weight, bias = torch.randn(columns) + 2, torch.randn(columns)
        _, _, mean, rstd = norm_output(x, norm, weight, bias)
        found = norm_backward(dy, x, norm, weight, mean, rstd, (True, True, True))
        # Sums of n terms in float32, n u of the sum of magnitudes; six more roundings; dx to its dtype.
        unit = (max(rows, columns) + 6) * 2.0**-24
        final = 2.0**-8 if dtype == BF16 else 0.0
        for place, (value, exact) in enumerate(zip(found, exact_gradients(dy, x, norm, weight, bias), strict=True)):
            # Magnitudes of what is summed: |dy| |xhat| rstd and gamma, of order 10 here at most.
            size = exact.abs() + 10 * (rstd.max() if place == 0 else rows**0.5)
            assert bool(((value.double() - exact).abs() <= 8 * unit * size + final * exact.abs()).all())
        assert found[0].dtype == dtype
        assert found[1].dtype == found[2].dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_is_needed(kind: str) -> None:
    norm, x, dy = Norm(kind, through=torch.float32), torch.randn(4, 8), torch.randn(4, 8)
    weight = torch.randn(8)
    _, _, mean, rstd = norm_output(x, norm, weight, None)
    whole = norm_backward(dy, x, norm, weight, mean, rstd, (True, True, True))
    for needs in itertools.product((True, False), repeat=3):
        part = norm_backward(dy, x, norm, weight, mean, rstd, needs)
        for needed, a, b in zip(needs, part, whole, strict=True):
            assert (a is not None) == needed
            assert a is None or torch.equal(a, b)


def test_gradients_have_the_dtypes_of_their_leaves() -> None:
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, dtype=torch.float16, requires_grad=True)
    y = normalise(x, Norm("layer", through=torch.float16), weight, bias)
    y.sum().backward()
    assert y.dtype == torch.float16
    assert [t.grad.dtype for t in (x, weight, bias)] == [BF16, torch.float32, torch.float16]
