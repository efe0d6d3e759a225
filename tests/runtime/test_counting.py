"""`octavo.count_gemms`: which products ran, and in what."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling


def products(layer: nn.Module, x: torch.Tensor, recipe: octavo.recipes.Recipe | None) -> dict[str, int]:
    with octavo.count_gemms() as counted:
        with octavo.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x)
        if y.requires_grad:
            y.sum().backward()
    return {f"{gemm} {precision}": n for (_, gemm, precision), n in counted.entries.items()}


FPROP, DGRAD, WGRAD = ("fprop fp8 emulated", "dgrad fp8 emulated", "wgrad fp8 emulated")


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling()])
@pytest.mark.parametrize(
    ("x_grad", "w_grad", "bias_grad", "expected"),
    [
        (True, True, True, {FPROP: 1, DGRAD: 1, WGRAD: 1}),
        (False, True, True, {FPROP: 1, WGRAD: 1}),
        (True, False, False, {FPROP: 1, DGRAD: 1}),
        (True, False, True, {FPROP: 1, DGRAD: 1}),
        (False, False, True, {FPROP: 1}),
        (False, False, False, {FPROP: 1}),
    ],
)
def test_frozen_parts_cost_no_product(
    recipe: octavo.recipes.Recipe, x_grad: bool, w_grad: bool, bias_grad: bool, expected: dict[str, int]
) -> None:
    layer = octavo.Linear(16, 32)
    layer.weight.requires_grad_(w_grad)
    layer.bias.requires_grad_(bias_grad)
    x = torch.randn(8, 16, requires_grad=x_grad)
    assert products(layer, x, recipe) == expected
    assert (x.grad is not None) is x_grad
    assert (layer.weight.grad is not None) is w_grad
    assert (layer.bias.grad is not None) is bias_grad
    if bias_grad:
        assert torch.equal(layer.bias.grad, torch.full((32,), 8.0))


def test_products_in_high_precision_say_so() -> None:
    layer, x = octavo.Linear(16, 32), torch.randn(8, 16, requires_grad=True)
    high = CurrentScaling(backward="high_precision")
    assert products(layer, x, high) == {FPROP: 1, "dgrad high precision": 1, "wgrad high precision": 1}
    assert products(layer, x, RowwiseScaling(high_precision_wgrad=True)) == {
        FPROP: 1,
        DGRAD: 1,
        "wgrad high precision": 1,
    }


def test_counts_are_by_layer_and_print() -> None:
    model = nn.Sequential(octavo.Linear(16, 16), octavo.Linear(16, 16))
    octavo.convert(model)
    with octavo.count_gemms() as counted:
        model(torch.randn(4, 16)).sum().backward()
        with octavo.count_gemms() as inner:
            model(torch.randn(4, 16))
    assert counted.by_layer() == {
        "0": {FPROP: 1, WGRAD: 1},
        "1": {FPROP: 1, DGRAD: 1, WGRAD: 1},
    }
    assert counted.fp8 == 5
    assert counted.high_precision == 0
    assert inner.fp8 == 2
    assert str(counted).splitlines()[0] == "5 FP8 products, 0 in high precision"
    assert "  1: fprop fp8 emulated x1" in str(counted)


def test_one_counter_object_within_itself() -> None:
    layer, x = octavo.Linear(16, 16, recipe=CurrentScaling()), torch.randn(4, 16)
    context = octavo.count_gemms()
    with context as outer:
        with context as inner:
            layer(x)
        layer(x)
    layer(x)
    assert (outer.fp8, inner.fp8) == (1, 1)
