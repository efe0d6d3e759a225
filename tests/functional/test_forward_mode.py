"""Forward-mode derivatives: refused where the tangent would be lost without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import octavo
from octavo.functional.activation import activate
from octavo.recipes import CurrentScaling, DelayedScaling


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(32, 32))
    octavo.freeze(model)
    return model


def grouped() -> Callable[[Tensor], Tensor]:
    layer = octavo.GroupedLinear(2, 32, 32)
    return lambda x: layer(x, [3, x.shape[0] - 3])


def grouped_on_device() -> Callable[[Tensor], Tensor]:
    layer = octavo.GroupedLinear(2, 32, 32)
    return lambda x: layer(x, torch.tensor([3, x.shape[0] - 3]))


def head() -> Callable[[Tensor], Tensor]:
    layer, targets = octavo.LMHead(32, 48), torch.zeros(8, dtype=torch.int64)
    return lambda x: layer(x, targets)


def joined() -> nn.Module:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32))
    octavo.convert(model, CurrentScaling(), filter="all")
    return model


LAYERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "Linear": lambda: octavo.Linear(32, 32),
    "LayerNormLinear": lambda: octavo.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: octavo.LayerNormMLP(32, 32),
    "smooth": lambda: octavo.LayerNormMLP(32, 32, activation="swiglu", smooth_swiglu=True),
    "GroupedLinear": grouped,
    "GroupedLinear, sizes on the device": grouped_on_device,
    "LMHead": head,
    "a normalisation that casts ahead": joined,
    "frozen": frozen,
    "LayerNorm": lambda: octavo.LayerNorm(32),
    "activation": lambda: lambda x: activate(x, "gelu_tanh"),
    "cross_entropy": lambda: lambda x: octavo.cross_entropy(x, torch.zeros(8, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_tangent_is_refused_without_gradients(name: str) -> None:
    layer, x = LAYERS[name](), torch.randn(8, 32)
    with octavo.autocast(recipe=CurrentScaling()), torch.no_grad():
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode derivative"):
            layer(forward_ad.make_dual(x, x))
        with pytest.raises(RuntimeError, match="forward-mode derivative"):
            torch.func.jvp(layer, (x,), (x,))
        with pytest.raises(RuntimeError, match="forward-mode derivative"):
            torch.func.jacfwd(layer)(x)
        # Of what has no tangent none is lost.
        expected = layer(x)
        with forward_ad.dual_level():
            assert torch.equal(layer(x), expected)


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=lambda recipe: type(recipe).__name__)
def test_a_tangent_of_the_weight_is_refused_and_the_remedy_works(recipe) -> None:
    layer, x = octavo.Linear(32, 32), torch.randn(8, 32)
    weight = {"weight": layer.weight.detach()}

    def call(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,))

    with torch.no_grad(), octavo.autocast(recipe=recipe):
        with pytest.raises(RuntimeError, match=r"FP8 products .* octavo.autocast\(enabled=False\)"):
            torch.func.jvp(call, (weight,), (weight,))
        with octavo.autocast(enabled=False):
            _, tangent = torch.func.jvp(call, (weight,), (weight,))
    torch.testing.assert_close(tangent, x @ layer.weight.detach().t())


def test_a_tangent_of_an_outer_derivative_is_refused_too() -> None:
    layer, x = octavo.Linear(32, 32), torch.randn(8, 32)

    def outer(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda y: layer(x) * y, (torch.ones(8, 32),), (torch.ones(8, 32),))[1]

    refused = pytest.raises(RuntimeError, match="FP8 products have no forward-mode derivative")
    with torch.no_grad(), octavo.autocast(recipe=CurrentScaling()), refused:
        torch.func.jvp(outer, (x,), (x,))


def test_codes_alone_have_no_tangent() -> None:
    """A layer whose weight is FP8 alone runs on where a derivative of something else is taken."""
    with octavo.quantized_init():
        layer = octavo.Linear(32, 32)
    x = torch.randn(8, 32)
    with torch.no_grad(), octavo.autocast(recipe=CurrentScaling()):
        expected = layer(x)
        with forward_ad.dual_level():
            assert torch.equal(layer(x), expected)
