"""`octavo.count_gemms`: which products ran, and in what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
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


def test_a_count_of_nothing_says_why() -> None:
    with octavo.count_gemms() as counted:
        nn.Linear(16, 16)(torch.randn(4, 16))
    assert str(counted) == (
        "0 FP8 products, 0 in high precision: no Octavo layer under a recipe ran here in eager code: convert the model,"
        " or give a recipe (compiled code and replays of CUDA graphs are not counted)"
    )


def test_one_counter_object_within_itself() -> None:
    layer, x = octavo.Linear(16, 16, recipe=CurrentScaling()), torch.randn(4, 16)
    context = octavo.count_gemms()
    with context as outer:
        with context as inner:
            layer(x)
        layer(x)
    layer(x)
    assert (outer.fp8, inner.fp8) == (1, 1)


def converted(layers: int = 2) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    octavo.convert(model, CurrentScaling())
    return model


def test_what_runs_wholly_in_high_precision_is_not_counted() -> None:
    x, model = torch.randn(4, 16, requires_grad=True), converted()
    with octavo.count_gemms() as counted:
        with octavo.autocast(enabled=False):
            model(x).sum().backward()
        octavo.Linear(16, 16)(x).sum().backward()
        nn.Linear(16, 16)(x).sum().backward()
        q = octavo.quantize(torch.randn(16, 16), octavo.E4M3)
        octavo.scaled_mm(q, octavo.quantize(torch.randn(16, 16), octavo.E4M3))
    assert not counted.entries
    with octavo.count_gemms() as counted, octavo.autocast(recipe=CurrentScaling(overrides={"^1$": None})):
        model(x)
    assert counted.by_layer() == {"0": {FPROP: 1}}


def test_calls_without_tokens_or_gradients_count_and_layers_without_a_name_share_that_of_their_class() -> None:
    one, other = (octavo.Linear(16, 16, recipe=CurrentScaling()) for _ in range(2))
    with octavo.count_gemms() as counted:
        one(torch.zeros(0, 16))
        with torch.no_grad():
            other(torch.zeros(4, 16))
    assert counted.by_layer() == {"Linear": {FPROP: 2}}


def test_a_backward_counts_where_its_forward_ran_whenever_and_wherever_it_runs() -> None:
    x, model = torch.randn(4, 16), converted(1)
    y = model(x).sum()
    with octavo.count_gemms() as inside:
        y.backward()
        y = model(x).sum()
    assert inside.by_layer() == {"0": {FPROP: 1}}
    backward = threading.Thread(target=y.backward)
    backward.start()
    backward.join()
    assert inside.by_layer() == {"0": {FPROP: 1, WGRAD: 1}}
    with octavo.count_gemms() as mine:
        forward = threading.Thread(target=lambda: model(x))
        forward.start()
        forward.join()
    assert not mine.entries, "each thread has its own"


def test_compiled_code_is_not_counted() -> None:
    compiled: Any = torch.compile(converted(1), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 16, requires_grad=True)
    for _ in range(2):
        with octavo.count_gemms() as counted:
            compiled(x).sum().backward()
        assert not counted.entries
    part = nn.Sequential(converted(1), compiled)
    with octavo.count_gemms() as counted:
        part(x).sum().backward()
    assert counted.by_layer() == {"0": {FPROP: 1, DGRAD: 1, WGRAD: 1}}


def test_frozen_layers_count_the_products_of_their_forward() -> None:
    for scheme in ("row", "block128"):
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        octavo.freeze(model, scheme)
        with octavo.count_gemms() as counted, torch.no_grad():
            model(torch.randn(4, 16))
        assert counted.by_layer() == {"0": {FPROP: 1}, "1": {FPROP: 1}}


def in_this_thread(function: Callable[[], Any]) -> None:
    function()


def in_another_thread(function: Callable[[], Any]) -> None:
    """As autograd runs a backward on a GPU."""
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


RUNS = [in_this_thread, in_another_thread]
# (fprops, dgrads): of the forward, and of the recompute as torch's checkpoint lets it be seen.
TORCH = {(False, RUNS[0]): (2, 1), (False, RUNS[1]): (1, 1), (True, RUNS[0]): (2, 1), (True, RUNS[1]): (1, 0)}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_counts_its_forward_again(reentrant: bool, run: Callable[..., None]) -> None:
    model, x = converted(1), torch.randn(4, 16, requires_grad=True)
    with octavo.count_gemms() as counted:
        y = octavo.checkpoint(model, x, use_reentrant=reentrant).sum()
        run(y.backward)
        y = octavo.checkpoint(model, x, use_reentrant=reentrant).sum()
    with octavo.count_gemms() as later:
        run(y.backward)
    assert counted.by_layer() == {"0": {FPROP: 4, DGRAD: 2, WGRAD: 2}}
    assert not later.entries
    with octavo.count_gemms() as counted:
        run(torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant).sum().backward)
    fprops, gradients = TORCH[reentrant, run]
    assert counted.entries["0", "fprop", "fp8 emulated"] == fprops
    assert [counted.entries["0", gemm, "fp8 emulated"] for gemm in ("dgrad", "wgrad")] == [gradients] * 2


def test_who_counts_is_as_before_after_a_recompute_that_fails() -> None:
    class Fails(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("on purpose")
            return x.sin()

    y = octavo.checkpoint(Fails(), torch.ones(3, requires_grad=True)).sum()
    model = converted(1)
    with octavo.count_gemms() as counted:
        with pytest.raises(RuntimeError, match="on purpose"):
            y.backward()
        model(torch.randn(4, 16))
    assert counted.fp8 == 1
