"""The MLP of layers of their own, as one: the bits of its layers and the activation one by one."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.measures import sqnr_db
from torch import Tensor, nn
from torch.nn import functional as F

import octavo
from octavo.functional import activate
from octavo.functional.mlp import MLP, Layer, mlp
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import layer_call

BF16 = torch.bfloat16
RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(),
    "delayed": DelayedScaling(amax_history_len=3),
    "row": RowwiseScaling(),
    "block": BlockScaling(),
    "current, input kept": CurrentScaling(saved_input="high_precision"),
    "delayed, input kept": DelayedScaling(amax_history_len=3, saved_input="high_precision"),
    "current, weight kept": CurrentScaling(saved_weight="high_precision"),
    "delayed, all kept": DelayedScaling(
        amax_history_len=3, saved_input="high_precision", saved_weight="high_precision"
    ),
    "row, wgrad in high precision": RowwiseScaling(high_precision_wgrad=True),
    "current, backward in high precision": CurrentScaling(backward="high_precision"),
}


class Parts(nn.Module):
    """The linear layers of an MLP; `gated` with two before the activation."""

    def __init__(
        self, recipe: Recipe, gated: bool, activation: str = "silu", sizes: tuple[int, int, int] = (40, 56, 24)
    ) -> None:
        super().__init__()
        names = ("gate", "up") if gated else ("fc1",)
        self.first = nn.ModuleDict({name: octavo.Linear(*sizes[:2], recipe=recipe) for name in names})
        self.last = octavo.Linear(*sizes[1:], recipe=recipe)
        self.activation = activation
        if gated and recipe.delayed is not None:
            self.first["up"].delayed_state.share_input(self.first["gate"].delayed_state)

    def one_by_one(self, x: Tensor) -> Tensor:
        z = [layer(x) for layer in self.first.values()]
        if len(z) == 1:
            return self.last(activate(z[0], self.activation))
        gated = {"silu": "swiglu", "relu": "reglu", "gelu_tanh": "geglu_tanh"}[self.activation]
        return self.last(activate(torch.cat(z, -1), gated))

    def as_one(self, x: Tensor) -> Tensor:
        layers: list[Any] = [*self.first.values(), self.last]
        calls = [layer_call(layer.delayed_state, layer.recipe, None) for layer in layers]
        plans = [layer.planned(call, layer.weight) for layer, call in zip(layers, calls, strict=True)]
        made = [
            Layer(one.weight, one.bias, one.kept_operand(one.weight, plan, None))
            for one, plan in zip(layers, plans, strict=True)
        ]
        dtype = BF16 if torch.is_autocast_enabled("cpu") else x.dtype
        return mlp(x, tuple(made[:-1]), made[-1], MLP(self.activation, tuple(plans[:-1]), plans[-1], dtype))


def pair(*arguments: Any, **options: Any) -> tuple[Parts, Parts]:
    """Two of the same parameters."""
    first, second = Parts(*arguments, **options), Parts(*arguments, **options)
    second.load_state_dict(first.state_dict())
    return first, second


def run(parts: Parts, how: str, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    x = x.detach().clone().requires_grad_(x.requires_grad)
    parts.zero_grad()
    y = getattr(parts, how)(x)
    if y.requires_grad:
        y.backward(dy.to(y.dtype))
    return [y.detach(), x.grad, *(parameter.grad for parameter in parts.parameters())]


def assert_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for place, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None), place
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b), place


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("name", RECIPES)
def test_output_gradients_and_states_are_those_of_its_layers(name: str, gated: bool, autocast: bool) -> None:
    one, other = pair(RECIPES[name], gated)
    for step in range(3 if RECIPES[name].delayed else 1):
        x, dy = torch.randn(3, 7, 40, requires_grad=True), torch.randn(3, 7, 24) * 2.0**step
        with torch.autocast("cpu", BF16, enabled=autocast):
            found, expected = run(one, "as_one", x, dy), run(other, "one_by_one", x, dy)
        assert_equal(found, expected)
        for parts in (one, other):
            octavo.update_scales(parts)
        assert_equal(list(one.state_dict().values()), list(other.state_dict().values()))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_nothing_is_computed_that_nobody_wants(gated: bool) -> None:
    for recipe in (CurrentScaling(), DelayedScaling(amax_history_len=2)):
        one, other = pair(recipe, gated)
        names = [name for name, _ in one.named_parameters()]
        for wanted in itertools.chain([()], itertools.combinations(names, 1), [tuple(names[:2]), tuple(names[-2:])]):
            for needs_dx in (False, True):
                for parts in (one, other):
                    for name, parameter in parts.named_parameters():
                        parameter.requires_grad_(name in wanted)
                x, dy = torch.randn(9, 40, requires_grad=needs_dx), torch.randn(9, 24)
                with octavo.count_gemms() as mine:
                    found = run(one, "as_one", x, dy)
                with octavo.count_gemms() as theirs:
                    expected = run(other, "one_by_one", x, dy)
                assert_equal(found, expected)
                assert mine.fp8 == theirs.fp8, (wanted, needs_dx)
                for parts in (one, other):
                    octavo.update_scales(parts)


def test_kept_weights_are_taken_and_without_gradients_nothing_is_kept() -> None:
    one, other = pair(CurrentScaling(), True)
    x = torch.randn(5, 40)
    with octavo.cached_weights():
        for _ in range(2):
            assert torch.equal(one.as_one(x), other.one_by_one(x))
    with torch.no_grad():
        y = one.as_one(x)
    assert not y.requires_grad
    assert torch.equal(y, other.one_by_one(x))


def codes_kept(parts: Parts, x: Tensor) -> int:
    """How many tensors of codes the MLP keeps for its backward."""
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        parts.as_one(x)
    return sum(t.element_size() == 1 for t in kept)


def test_codes_of_weights_are_made_again_where_the_weight_stays_anyway() -> None:
    recipe = CurrentScaling(saved_input="high_precision", saved_weight="high_precision")
    parts, x = Parts(recipe, True), torch.randn(9, 40, requires_grad=True)
    assert codes_kept(parts, x) == 0
    with octavo.cached_weights():
        assert codes_kept(parts, x) == 3, "they are there for all micro-batches"
    # One that is computed would be kept for this alone, in four bytes for one.
    torch.nn.utils.parametrize.register_parametrization(parts.last, "weight", nn.Identity())
    assert codes_kept(parts, x) == 0
    parts.last.parametrizations.weight[0] = nn.Softplus()
    assert codes_kept(parts, x) == 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what quantizers cast."""
    from octavo.tensor import quantizer

    counted: list[tuple[int, ...]] = []
    real = quantizer.cast_transpose

    def counting(x: Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(tuple(x.shape))
        return real(x, *arguments, **options)

    monkeypatch.setattr(quantizer, "cast_transpose", counting)
    return counted


def test_gate_and_up_cast_an_input_again_once(counted: list[tuple[int, ...]]) -> None:
    for recipe in (CurrentScaling(saved_input="high_precision"), DelayedScaling(saved_input="high_precision")):
        y = Parts(recipe, True).as_one(torch.randn(9, 40, requires_grad=True) * 1)
        counted.clear()
        y.sum().backward()
        assert counted.count((9, 40)) == 1


def test_gate_and_up_cast_their_input_once(counted: list[tuple[int, ...]]) -> None:
    for recipe in (CurrentScaling(), DelayedScaling(initialise_from_first_batch=True)):
        counted.clear()
        # An activation, which layers of no group share.
        Parts(recipe, True).as_one(torch.randn(9, 40, requires_grad=True) * 1)
        # And three weights; a is cast where it is made.
        assert sorted(counted) == sorted(
            [(9, 40), (56, 40), (56, 40), (24, 56)] + [(9, 56)] * (recipe.delayed is not None)
        )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_in_bf16_a_gated_mlp_is_as_close_to_float32_as_its_layers(activation: str) -> None:
    """They round f(gate) before they multiply; as one it is not rounded, so that there is less to lose."""
    parts, other = pair(CurrentScaling(), True, activation)
    x, dy = torch.randn(256, 40, requires_grad=True), torch.randn(256, 24)
    function = {"silu": F.silu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"), "relu": F.relu}[activation]

    def separate(x: Tensor) -> Tensor:
        return other.last(function(other.first["gate"](x)) * other.first["up"](x))

    other.separate = separate  # type: ignore[assignment]
    with octavo.autocast(enabled=False):
        exact = run(other, "separate", x, dy)
    with torch.autocast("cpu", BF16):
        found, expected = run(parts, "as_one", x, dy), run(other, "separate", x, dy)
    for truth, mine, theirs in zip(exact, found, expected, strict=True):
        if truth is not None and mine is not None and theirs is not None:
            # FP8's own noise, 20 to 26 dB, of another draw: its level varies by some tenths of a dB.
            assert sqnr_db(truth, mine) > sqnr_db(truth, theirs) - 0.5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_a_tangent_is_refused_without_gradients() -> None:
    parts, x = Parts(CurrentScaling(), True), torch.randn(8, 40)
    refused = pytest.raises(RuntimeError, match="FP8 products have no forward-mode derivative")
    with torch.no_grad(), torch.autograd.forward_ad.dual_level(), refused:
        parts.as_one(torch.autograd.forward_ad.make_dual(x, x))


def test_a_second_derivative_is_refused() -> None:
    parts = Parts(CurrentScaling(), True)
    x = torch.randn(4, 40, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(parts.as_one(x).sum(), x, create_graph=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "delayed", "row", "block"])
def test_compiled_code_gives_the_same_bits_in_one_graph(name: str) -> None:
    one, other = pair(RECIPES[name], True)
    compiled = torch.compile(one.as_one, fullgraph=True, backend="aot_eager", dynamic=True)
    one.compiled = compiled  # type: ignore[assignment]
    for rows in (20, 33, 20):
        x, dy = torch.randn(rows, 40, requires_grad=True), torch.randn(rows, 24)
        assert_equal(run(one, "compiled", x, dy), run(other, "as_one", x, dy))
        for parts in (one, other):
            octavo.update_scales(parts)
