"""LayerNormLinear and LayerNormMLP: the bits of the separate layers, whatever is switched on around them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.modules.compositions import (
    BF16,
    FEW,
    MAKERS,
    RECIPES,
    Composition,
    assert_same_steps,
    every_layer,
    jittered,
    state_of,
    steps,
    under,
)
from torch import Tensor

import octavo


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_bits_of_the_separate_layers(recipe: str, dtype: torch.dtype, kind: str) -> None:
    layer = jittered(MAKERS[kind](dtype=dtype))
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], steps(2, 7, 33, dtype=dtype))


@every_layer
@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize(
    "options",
    [
        {"normalization": "RMSNorm"},
        {"normalization": "RMSNorm", "zero_centered_gamma": True},
        {"zero_centered_gamma": True},
        {"elementwise_affine": False},
        {"norm_bias": False, "bias": False},
        {"eps": 0.3},
        {"return_layernorm_output": True},
        {"return_layernorm_output": True, "normalization": "RMSNorm", "dtype": BF16},
    ],
    ids=str,
)
def test_options_do_what_they_do_to_the_separate_layers(options: dict[str, Any], recipe: str, kind: str) -> None:
    layer = jittered(MAKERS[kind](**options))
    inputs = steps(21, 33, dtype=options.get("dtype", torch.float32))
    returns = options.get("return_layernorm_output", False)
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], inputs, returns)


@every_layer
@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize("shape", [(33,), (1, 33), (0, 33), (2, 0, 33), (3, 16, 33)], ids=str)
def test_any_number_of_tokens(shape: tuple[int, ...], recipe: str, kind: str) -> None:
    layer = MAKERS[kind]()
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], steps(*shape, number=2))


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(33, 20).t(),
    "strided": lambda: torch.randn(20, 66)[:, ::2],
    "batch second": lambda: torch.randn(4, 5, 33).transpose(0, 1),
    "expanded": lambda: torch.randn(1, 33).expand(20, 33),
}


@every_layer
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_non_contiguous_inputs(recipe: str, view: str, kind: str) -> None:
    layer, x = MAKERS[kind](return_layernorm_output=True), VIEWS[view]()
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], [x], True)
    outcomes = []
    for each, inputs in ((copy.deepcopy(layer), x), (layer, x.contiguous())):
        leaf = inputs.detach().requires_grad_()
        with under(RECIPES[recipe]):
            y, n = each(leaf)
        (y.square().sum() + n.pow(3).sum()).backward()
        outcomes.append([y, n, leaf.grad, *(p.grad for p in each.parameters()), *state_of(each)])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@every_layer
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 0.0])
@pytest.mark.parametrize("recipe", FEW)
def test_values_that_are_not_finite_or_all_zero(recipe: str, value: float, kind: str) -> None:
    layer = jittered(MAKERS[kind]())
    x = torch.zeros(5, 33) if value == 0 else torch.randn(5, 33)
    x[2, 4] = value
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], [x, torch.randn(5, 33)])


@every_layer
@pytest.mark.parametrize("recipe", FEW)
def test_a_nan_stays_in_its_row_and_leaves_the_scales_alone(recipe: str, kind: str) -> None:
    layer, x = MAKERS[kind](), torch.randn(5, 33)
    x[2, 4] = float("nan")
    with under(RECIPES[recipe]):
        y = layer(x)
    assert bool(y[2].isnan().all())
    assert bool(y[[0, 1, 3, 4]].isfinite().all())
    assert all(bool(value.isfinite().all()) for value in state_of(layer))


@every_layer
@pytest.mark.parametrize("recipe", FEW)
def test_an_infinite_gradient_is_seen_by_a_loss_scaler(recipe: str, kind: str) -> None:
    """As the separate layers' it becomes NaN, not the largest code; so does one that the activation makes infinite."""
    layer = jittered(MAKERS[kind]())
    composed, x = Composition(layer), torch.randn(5, 33)
    for size in (float("inf"), 3e38):
        gradients = []
        for model in (layer, composed):
            leaf = x.clone().requires_grad_()
            with under(RECIPES[recipe]):
                out = model(leaf)
            y = out[0] if isinstance(out, tuple) else out
            dy = torch.zeros_like(y)
            dy[1, 2:] = size
            y.backward(dy)
            gradients.append([leaf.grad, *(p.grad for p in model.parameters()), *state_of(model)])
            model.zero_grad()
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(*gradients, strict=True))
        if size == float("inf"):
            assert not bool(gradients[0][0][1].isfinite().any())
        assert bool(gradients[0][0][[0, 2, 3, 4]].isfinite().all())


@every_layer
@pytest.mark.parametrize("input_dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast(recipe: str, input_dtype: torch.dtype, kind: str) -> None:
    layer = jittered(MAKERS[kind](return_layernorm_output=True))
    composed = Composition(layer)
    with torch.autocast("cpu", BF16):
        assert_same_steps(layer, composed, RECIPES[recipe], steps(9, 33, dtype=input_dtype), True)
        y, n = layer(torch.randn(9, 33))
    assert y.dtype == n.dtype == BF16


@every_layer
@pytest.mark.parametrize("recipe", FEW)
@pytest.mark.parametrize(
    "frozen", [("layer_norm",), ("weight",), ("fc1_weight",), ("fc2_weight",), ("bias",), ("layer_norm", "weight")]
)
def test_frozen_parameters(frozen: tuple[str, ...], recipe: str, kind: str) -> None:
    layer = MAKERS[kind]()
    for name, parameter in layer.named_parameters():
        norm = name.startswith("layer_norm")
        parameter.requires_grad_(not any(n in name and (norm == (n == "layer_norm")) for n in frozen))
    assert_same_steps(layer, Composition(layer), RECIPES[recipe], steps(9, 33))


@every_layer
@pytest.mark.parametrize("recipe", FEW)
def test_products_that_nobody_needs_are_not_computed(recipe: str, kind: str) -> None:
    layer = MAKERS[kind]().requires_grad_(False)
    composed, x = Composition(layer), torch.randn(9, 33)
    counts: list[Counter[tuple[str, str]]] = []
    for model in (layer, composed):
        with octavo.count_gemms() as counted, under(RECIPES[recipe]):
            model(x.clone().requires_grad_())[0].sum().backward()
        counts.append(Counter())
        for (_, gemm, precision), number in counted.entries.items():
            counts[-1][gemm, precision] += number
    assert counts[0] == counts[1]
    assert not any(gemm == "wgrad" for gemm, _ in counts[0])


@every_layer
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_evaluation_gives_the_same_output_and_changes_nothing(recipe: str, mode: Callable[[], Any], kind: str) -> None:
    layer, x = jittered(MAKERS[kind](return_layernorm_output=True)), torch.randn(2, 5, 33)
    with under(RECIPES[recipe]):
        layer(x)[0].sum().backward()
    before = copy.deepcopy(layer).state_dict()
    layer.eval()
    with mode(), under(RECIPES[recipe]):
        y, n = layer(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
    with under(RECIPES[recipe]):
        trained = layer(x)
    assert torch.equal(y, trained[0])
    assert torch.equal(n, trained[1])


@every_layer
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_output_may_be_changed_in_place(recipe: str, kind: str) -> None:
    layer = MAKERS[kind]()
    x = torch.randn(7, 33, requires_grad=True)
    with under(RECIPES[recipe]):
        y = layer(x)
    y.mul_(2).sum().backward()
    doubled, layer.grad, x.grad = x.grad, None, None
    with under(RECIPES[recipe]):
        (layer(x) * 2).sum().backward()
    # Delayed scaling has updated its scales in between; the others give the same bits.
    if RECIPES[recipe] is None or RECIPES[recipe].delayed is None:
        assert torch.equal(doubled, x.grad)
    assert bool((doubled != 0).any())


@every_layer
@pytest.mark.parametrize("recipe", FEW)
def test_only_the_norm_output_is_used(recipe: str, kind: str) -> None:
    layer = jittered(MAKERS[kind](return_layernorm_output=True))
    composed = Composition(layer)
    for model in (layer, composed):
        with under(RECIPES[recipe]):
            model(torch.ones(4, 33).cumsum(0).cumsum(1).sin())[1].pow(3).sum().backward()
    expected = [p.grad for p in composed.parameters()]
    for (name, parameter), gradient in zip(layer.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) == (gradient is None), name
        assert gradient is None or torch.equal(parameter.grad, gradient), name
