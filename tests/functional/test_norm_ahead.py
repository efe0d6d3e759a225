"""A normalisation that casts ahead: the bits of one that does not, and codes for none but those who would make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import octavo
from octavo.functional import normalise
from octavo.functional.norm_ahead import normalise_ahead
from octavo.modules.norm import norm_of
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import layer_call
from octavo.tensor import quantizer

RECIPES: list[Recipe] = [CurrentScaling(), DelayedScaling(amax_history_len=2), RowwiseScaling(), BlockScaling()]


def linear(recipe: Recipe) -> octavo.Linear:
    layer = octavo.Linear(48, 32, recipe=recipe)
    # That others make the same codes is known by the state.
    layer.delayed_state.input.shared = True
    return layer


def ahead(layer: octavo.Linear, x: Tensor, *parameters: Tensor, kind: str = "LayerNorm") -> Tensor:
    call = layer_call(layer.delayed_state, layer.recipe, None)
    plan = layer.planned(call, layer.weight)
    return normalise_ahead(x, norm_of(kind, 1e-5, False, x.dtype), *_both(parameters), plan.input, True)


def _both(parameters: tuple[Tensor, ...]) -> tuple[Any, Any]:
    weight, bias = (*parameters, None, None)[:2]
    return weight, bias


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what quantizers cast."""
    seen: list[tuple[int, ...]] = []
    real = quantizer.cast_transpose

    def counting(x: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(tuple(x.shape))
        return real(x, *arguments, **options)

    monkeypatch.setattr(quantizer, "cast_transpose", counting)
    return seen


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_output_gradients_and_states_are_those_of_a_norm_and_a_linear(recipe: Recipe, kind: str) -> None:
    one, other = linear(recipe), linear(recipe)
    other.load_state_dict(one.state_dict())
    weight = torch.rand(48) + 0.5
    parameters = (weight, torch.randn(48)) if kind == "LayerNorm" else (weight,)
    for step in range(3):
        x, dy = torch.randn(2, 9, 48) * 2.0**step, torch.randn(2, 9, 32)
        results = []
        for layer in (one, other):
            own = [t.clone().requires_grad_() for t in (x, *parameters)]
            if layer is one:
                n = ahead(layer, *own, kind=kind)
            else:
                n = normalise(own[0], norm_of(kind, 1e-5, False, x.dtype), *_both(tuple(own[1:])))
            y = layer(n)
            layer.zero_grad()
            y.backward(dy)
            octavo.update_scales(layer)
            results.append([n, y, *(t.grad for t in own), layer.weight.grad, *layer.state_dict().values()])
        for place, (a, b) in enumerate(zip(*results, strict=True)):
            assert torch.equal(a, b), (step, place)


def test_the_codes_are_taken_by_the_layers_that_would_make_them_and_by_no_other(casts: list[Any]) -> None:
    first, alike, unlike = linear(CurrentScaling()), linear(CurrentScaling()), linear(RowwiseScaling())
    # One spec is one object; an equal recipe built anew has its own.
    alike.recipe = first.recipe
    n = ahead(first, torch.randn(9, 48))
    casts.clear()
    first(n)
    alike(n)
    assert casts.count((9, 48)) == 0
    unlike(n)
    assert casts.count((9, 48)) == 1
    first(n)  # what was made last is another's
    assert casts.count((9, 48)) == 2


def test_a_tensor_that_was_changed_or_copied_is_cast_anew(casts: list[Any]) -> None:
    layer = linear(DelayedScaling())
    for change in (lambda n: n.mul_(2), lambda n: n.clone(), lambda n: n[:4]):
        with torch.no_grad():
            n = change(ahead(layer, torch.randn(9, 48)))
            casts.clear()
            y = layer(n)
            assert casts.count(tuple(n.shape)) == 1
            assert torch.equal(y, layer(n.clone()))


def test_the_amax_is_gathered_when_the_codes_are_taken() -> None:
    layer = linear(DelayedScaling(initialise_from_first_batch=False))
    n = ahead(layer, torch.randn(9, 48))
    assert layer.delayed_state.input.gathered == 0, "nobody has been given these codes yet"
    layer(n)
    assert layer.delayed_state.input.gathered == n.abs().max()


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(4, 48, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True .* convert with fuse=False"):
        torch.autograd.grad(ahead(linear(CurrentScaling()), x).sum(), x, create_graph=True)
