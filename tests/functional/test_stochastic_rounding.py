"""Stochastic rounding of gradients: by every recipe and every layer, or refused; decided by the seed; unbiased."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.formats import Format, cast_float32, decode
from octavo.functional.grouped_on_device import unsupported_reasons
from octavo.recipes import (
    BlockScaling,
    CurrentScaling,
    CustomRecipe,
    DelayedScaling,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)
from octavo.runtime import Call, LayerState, plan_linear

NEAREST: list[Recipe] = [
    CurrentScaling(),
    DelayedScaling(initialise_from_first_batch=True),
    DelayedScaling(),
    RowwiseScaling(),
    BlockScaling(),
    MXFP8Scaling(),
    StaticScaling(input_scale=0.01, grad_output_scale=1e-4),
]
RECIPES = [recipe.replaced(grad_output_rounding="stochastic") for recipe in NEAREST]
E4M3, E5M2 = QuantizeSpec(format=octavo.E4M3), QuantizeSpec(format=octavo.E5M2)
BY_CHANCE = QuantizeSpec(format=octavo.E4M3, rounding="stochastic")
ALL_BY_CHANCE = CustomRecipe(
    fprop_input=BY_CHANCE,
    fprop_weight=BY_CHANCE,
    dgrad_grad_output=BY_CHANCE,
    dgrad_weight=BY_CHANCE,
    wgrad_grad_output=BY_CHANCE,
    wgrad_input=BY_CHANCE,
)


def named(recipe: Recipe) -> str:
    return type(recipe).__name__


def step(run: Any, layer: nn.Module, recipe: Recipe | None, seed: int, features: int = 32) -> list[Tensor]:
    """Output, input's gradient, parameters' gradients, of one step whose chances the seed decides on."""
    data = torch.Generator().manual_seed(7)
    x = torch.randn(24, features, generator=data).requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    with octavo.autocast(recipe=recipe):
        y = run(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.randn(y.shape, generator=data))
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]


def equal(one: list[Tensor], other: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(one, other, strict=True)]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_seed_decides_on_the_gradients_and_on_nothing_else(recipe: Recipe) -> None:
    layer = octavo.Linear(32, 48)
    layers = [copy.deepcopy(layer) for _ in range(4)]
    first, again, other = (step(one, one, recipe, seed) for one, seed in zip(layers, (1, 1, 2), strict=False))
    near = step(layers[3], layers[3], recipe.replaced(grad_output_rounding="nearest"), 1)
    assert all(equal(first, again))
    # y, dx, dw, db: the bias sums the gradient itself.
    assert equal(first, other) == [True, False, False, True]
    assert equal(first, near) == [True, False, False, True]


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_histories_gather_what_they_gather_without(recipe: Recipe) -> None:
    layer = octavo.Linear(32, 48)
    for seed in range(2):
        step(layer, layer, recipe, seed)
    near = octavo.Linear(32, 48)
    near.weight.data.copy_(layer.weight.data)
    for seed in range(2):
        step(near, near, recipe.replaced(grad_output_rounding="nearest"), seed)
    for one, other in zip(layer.delayed_state.operands, near.delayed_state.operands, strict=True):
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.gathered, other.gathered)
    if recipe.delayed is not None:
        assert float(layer.delayed_state.grad_output.gathered) > 0


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
def test_the_mean_gradient_is_that_of_the_gradient_itself(recipe: Recipe) -> None:
    # The identity for a weight: dx is dy as it was rounded. Rounding to nearest has an error that stays.
    layer = octavo.Linear(32, 32, bias=False)
    nn.init.eye_(layer.weight)
    dy = torch.randn(16, 32) * 1e-2
    errors = []
    for one, draws in ((recipe, 200), (recipe.replaced(grad_output_rounding="nearest"), 1)):
        total = torch.zeros(16, 32)
        for _ in range(draws):
            x = torch.randn(16, 32, requires_grad=True)
            with octavo.autocast(recipe=one):
                y = copy.deepcopy(layer)(x)
            y.backward(dy)
            total += x.grad
        errors.append((total / draws - dy).norm())
    # 200 draws divide the standard deviation of one by 14.
    assert errors[0] < 0.35 * errors[1]


Layer = tuple[nn.Module, Any]


def alone(layer: nn.Module) -> Layer:
    return layer, layer


def attention() -> Layer:
    layer = octavo.MultiheadAttention(32, 2)
    return layer, lambda x: layer(x.reshape(2, 12, 32))


def grouped() -> Layer:
    layer = octavo.GroupedLinear(2, 32, 48)
    return layer, lambda x: layer(x, [8, 16])


def head() -> Layer:
    layer = octavo.LMHead(32, 40)
    target = torch.randint(40, (24,), generator=torch.Generator().manual_seed(0))
    return layer, lambda x: layer(x, target)


def gate_and_up_apart() -> Layer:
    """A gated MLP of three layers, which `convert` makes run as one."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    configuration = llama.LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1)
    model = nn.Sequential(llama.LlamaMLP(configuration))
    assert "fused: LlamaMLP" in str(octavo.convert(model, recipe=CurrentScaling(), filter="all"))
    return alone(model)


# Every layer that has FP8 products, and how it is called.
LAYERS: dict[str, Callable[[], Layer]] = {
    "Linear": lambda: alone(octavo.Linear(32, 48)),
    "LayerNormLinear": lambda: alone(octavo.LayerNormLinear(32, 48)),
    "MultiheadAttention": attention,
    "gelu": lambda: alone(octavo.LayerNormMLP(32, 64, activation="gelu")),
    "swiglu": lambda: alone(octavo.LayerNormMLP(32, 64, activation="swiglu")),
    "relu": lambda: alone(octavo.LayerNormMLP(32, 64, activation="relu")),
    "smooth": lambda: alone(octavo.LayerNormMLP(32, 64, activation="swiglu", smooth_swiglu=True)),
    "gate and up apart": gate_and_up_apart,
    "GroupedLinear": grouped,
    "LMHead": head,
}


def built(name: str, recipe: Recipe) -> Layer:
    if name == "smooth" and isinstance(recipe, StaticScaling):
        pytest.skip("refused, stochastic or not")
    return LAYERS[name]()


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_passes_it_over(name: str, recipe: Recipe) -> None:
    layer, run = built(name, recipe)
    if recipe.delayed is not None and not recipe.delayed.initialise_from_first_batch:
        step(run, layer, recipe, 0)  # now scales are known, as kernels fused with what comes before ask for
    state = copy.deepcopy(layer.state_dict())
    seen = []
    for seed in (1, 1, 2):
        layer.load_state_dict(state)
        seen.append(step(run, layer, recipe, seed))
    first, again, other = seen
    if recipe.delayed is None:
        assert all(equal(first, again))
    # Of all weights of products the gradient differs, and so does the input's.
    differs = dict(
        zip(
            ["y", "x", *(key for key, p in layer.named_parameters() if p.grad is not None)],
            (not same for same in equal(first, other)),
            strict=True,
        )
    )
    assert not differs.pop("y")
    assert differs.pop("x")
    of_products = {key: value for key, value in differs.items() if "weight" in key and "norm" not in key}
    assert of_products
    assert all(of_products.values()), of_products


@pytest.mark.parametrize("recipe", RECIPES, ids=named)
@pytest.mark.parametrize("name", LAYERS)
def test_every_cast_of_a_gradient_is_by_chance(name: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    # Under HYBRID gradients alone become E5M2: what is cast to that must lie on its grid already.
    rounded: list[bool] = []

    def spy(x: Tensor, format: Format, saturate: bool = True) -> Tensor:
        codes = cast_float32(x, format, saturate)
        if format is octavo.E5M2:
            within = x.nan_to_num().clamp(-format.max, format.max)
            rounded.append(torch.equal(decode(codes).nan_to_num(), within))
        return codes

    for module in [module for key, module in sys.modules.items() if key.startswith("octavo.")]:
        if vars(module).get("cast_float32") is cast_float32:
            monkeypatch.setattr(module, "cast_float32", spy)
    layer, run = built(name, recipe)
    for seed in range(3):  # the last with scales that are known beforehand
        step(run, layer, recipe.replaced(format=octavo.HYBRID), seed)
    assert rounded
    assert all(rounded)
    near = recipe.replaced(format=octavo.HYBRID, grad_output_rounding="nearest")
    step(run, layer, near, 0)
    assert not all(rounded), "else the lines before would prove nothing"


def test_the_layers_of_a_converted_model_round_by_chance_too() -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    octavo.convert(model, recipe=CurrentScaling(grad_output_rounding="stochastic"), filter="all")
    first, other = (step(model, model, None, seed) for seed in (1, 2))
    assert torch.equal(first[0], other[0])
    assert not torch.equal(first[1], other[1])


def test_sizes_on_the_device_are_refused_for_it() -> None:
    for recipe, message in (
        (CurrentScaling(grad_output_rounding="stochastic"), "stochastic rounding: grouped casts round to nearest"),
        (RowwiseScaling(grad_output_rounding="stochastic"), "stochastic rounding: grouped casts round to nearest"),
        (ALL_BY_CHANCE.replaced(wgrad_input=E4M3), "another spec in each of its products"),
    ):
        plan = plan_linear(Call(recipe, False), LayerState(), "")
        reasons = unsupported_reasons(torch.device("cpu"), torch.float32, plan, (32, 48))
        assert any(message in reason for reason in reasons)
    plan = plan_linear(Call(CurrentScaling(), False), LayerState(), "")
    assert not unsupported_reasons(torch.device("cpu"), torch.float32, plan, (32, 48))


def test_what_cannot_round_forward_operands_by_chance_says_so() -> None:
    smooth = octavo.LayerNormMLP(32, 64, activation="swiglu", smooth_swiglu=True)
    with octavo.autocast(recipe=ALL_BY_CHANCE), pytest.raises(ValueError, match="smooth_swiglu makes both layouts"):
        smooth(torch.randn(8, 32))
    for options in ({"recompute": True}, {"reduction": "none"}):
        head = octavo.LMHead(32, 40, **options)
        with octavo.autocast(recipe=ALL_BY_CHANCE), pytest.raises(ValueError, match="makes the logits again"):
            head(torch.randn(8, 32), torch.zeros(8, dtype=torch.int64))
    with octavo.quantized_init(recipe=ALL_BY_CHANCE), pytest.raises(ValueError, match="rounds weights 'stochastic'"):
        octavo.Linear(32, 32)


@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP"])
def test_forward_operands_round_by_chance_where_a_spec_says_so(kind: str) -> None:
    layer = {
        "Linear": lambda: octavo.Linear(32, 48),
        "LayerNormLinear": lambda: octavo.LayerNormLinear(32, 48),
        "LayerNormMLP": lambda: octavo.LayerNormMLP(32, 64),
    }[kind]()
    first, again, other = (step(layer, layer, ALL_BY_CHANCE, seed) for seed in (1, 1, 2))
    assert all(equal(first, again))
    assert equal(first, other)[:2] == [False, False]


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how.startswith("torch"):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=self.how != "torch")
        return octavo.checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["octavo", "reentrant", "torch", "torch reentrant"])
@pytest.mark.parametrize("recipe", [*RECIPES[:1], RECIPES[3], ALL_BY_CHANCE], ids=named)
def test_a_recompute_changes_no_bit(recipe: Recipe, how: str) -> None:
    plain = nn.Sequential(octavo.Linear(32, 48), nn.Dropout(0.1), octavo.Linear(48, 32))
    expected = step(plain, plain, recipe, 4)
    checkpointed = Checkpointed(copy.deepcopy(plain), how)
    if recipe is ALL_BY_CHANCE and "reentrant" in how:
        with pytest.raises(RuntimeError, match=r"would draw other numbers.*use_reentrant=False"):
            step(checkpointed, checkpointed, recipe, 4)
        return
    assert all(equal(step(checkpointed, checkpointed, recipe, 4), expected))


@pytest.mark.parametrize("recipe", [*RECIPES, ALL_BY_CHANCE], ids=named)
def test_compiled_code_rounds_by_chance_too(recipe: Recipe) -> None:
    torch._dynamo.reset()
    layer = octavo.Linear(32, 48)
    eager, traced = copy.deepcopy(layer), copy.deepcopy(layer)
    expected = step(eager, eager, recipe, 6)
    compiled = torch.compile(traced, fullgraph=True, backend="aot_eager")
    found = step(compiled, traced, recipe, 6)
    assert all(equal(found, expected))
    assert not torch.equal(step(compiled, traced, recipe, 8)[1], found[1])


def test_the_numbers_of_a_batch_in_parts_are_those_of_the_whole() -> None:
    # Of one layer, whose draws follow one another; the scales here are each row's own.
    recipe = RowwiseScaling(grad_output_rounding="stochastic", high_precision_wgrad=True)
    layer = octavo.Linear(32, 48)
    x, dy = torch.randn(24, 32), torch.randn(24, 48)

    def gradient(rounding: Any, parts: int) -> Tensor:
        torch.manual_seed(0)
        found = []
        for one, other in zip(x.chunk(parts), dy.chunk(parts), strict=True):
            own = one.clone().requires_grad_()
            with octavo.autocast(recipe=recipe.replaced(grad_output_rounding=rounding)):
                layer(own).backward(other)
            found.append(own.grad)
        return torch.cat(found)

    assert torch.equal(gradient("nearest", 1), gradient("nearest", 2))
    assert torch.equal(gradient("stochastic", 1), gradient("stochastic", 2))
