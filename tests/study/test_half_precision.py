from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octavo.study import half_precision
from octavo.study.half_precision import half_products

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def always_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_precision, "needs_fp32_products", lambda device, dtype: True)


def run(dtype: torch.dtype, mode: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(96, 64)
    x = torch.randn(40, 96, requires_grad=True)
    with torch.autocast("cpu", dtype), half_products(CPU, dtype) if mode else torch.autocast("cpu", dtype):
        y = layer(x)
    y.float().square().sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    return [y, x.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_linear_layer_and_its_gradients_are_those_of_autocast(dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for mine, torchs in zip(run(dtype, True), run(dtype, False), strict=True):
        assert mine.dtype == torchs.dtype
        # Both round an fp32 sum (or a sum of rounded parts) to 16 bits: they differ by a few units in the last place
        # of the largest element.
        bound = 4 * eps * torchs.float().abs().max().item()
        torch.testing.assert_close(mine.float(), torchs.float(), rtol=0, atol=bound)


def test_the_operands_are_rounded() -> None:
    x = torch.full((1, 1), 1.0 + 2.0**-12)
    weight = torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16), half_products(CPU, torch.bfloat16):
        y = F.linear(x, weight)
    assert y.item() == 1.0
    assert y.dtype == torch.bfloat16


def test_attention_is_that_of_autocast_within_its_roundings() -> None:
    q, k, v = (torch.randn(2, 3, 16, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with half_products(CPU, torch.bfloat16):
            mine = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert mine.dtype == torch.bfloat16
    torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=4 * 2**-8 * v.abs().max().item())


def test_what_is_not_16_bit_stays_untouched() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with half_products(CPU, torch.bfloat16):
        assert F.linear(x, weight).equal(x @ weight.t())
