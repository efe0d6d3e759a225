"""torch.compile(fullgraph=True) of LayerNormLinear and LayerNormMLP: the bits of eager code, few compilations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.compositions import RECIPES, jittered, state_of, under
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo.recipes import DelayedScaling

TOKENS = [24, 40, 56, 17, 128, 7]
OUTSIDE, INSIDE, OWN = "context outside", "context inside", "own recipe"
# Where the context stands matters to delayed scaling alone, and each combination costs seconds.
CASES = [
    ("delayed", OWN),
    ("delayed, measured first", INSIDE),
    ("delayed, input kept", OUTSIDE),
    ("delayed, high precision backward", OUTSIDE),
    ("current", INSIDE),
    ("rowwise", OUTSIDE),
    ("block", OUTSIDE),
    ("static", OWN),
    ("none", OUTSIDE),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        recipe = options.pop("recipe", None)
        self.qkv = jittered(octavo.LayerNormLinear(32, 32, normalization="RMSNorm", recipe=recipe))
        self.mlp = jittered(octavo.LayerNormMLP(32, 48, activation="swiglu", recipe=recipe, **options))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.qkv(x))
        return out[0] * 2 + out[1] if isinstance(out, tuple) else out


class Runs:
    """A model, run eagerly or compiled, for steps of growing inputs."""

    def __init__(self, where: str, recipe: str, backend: object | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.recipe, self.where = RECIPES[recipe], where
        self.model = Model(recipe=self.recipe if where == OWN else None, **options)
        self.run = self.function if backend is None else torch.compile(self.function, backend=backend, fullgraph=True)

    def function(self, x: Tensor) -> Tensor:
        if self.where == INSIDE:
            with under(self.recipe):
                return self.model(x)
        return self.model(x)

    def step(self, number: int, tokens: int) -> list[Tensor]:
        torch.manual_seed(number)
        x = (torch.randn(tokens, 32) * 1.5**number).requires_grad_()
        if self.where == OUTSIDE:
            with under(self.recipe):
                y = self.run(x)
        else:
            y = self.run(x)
        y.square().mean().backward()
        if self.where == OWN:
            octavo.update_scales(self.model)
        seen = [y.detach(), x.grad, *(p.grad.clone() for p in self.model.parameters()), *state_of(self.model)]
        self.model.zero_grad()
        return seen


def assert_equal_steps(eager: Runs, compiled: Runs) -> None:
    for number, tokens in enumerate(TOKENS):
        pairs = zip(eager.step(number, tokens), compiled.step(number, tokens), strict=True)
        for place, (a, b) in enumerate(pairs):
            assert torch.equal(a, b), f"step {number}, part {place}"


@pytest.mark.parametrize(("recipe", "where"), CASES)
def test_equal_to_eager_with_few_recompiles(recipe: str, where: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    assert_equal_steps(Runs(where, recipe, None), Runs(where, recipe, counter))
    assert counter.frame_count <= 3, "one compilation and two recompiles"


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("delayed", {"checkpoint": True}),
        ("delayed", {"saved_activation_input": "fp8"}),
        ("delayed", {"return_layernorm_output": True}),
        ("rowwise", {"saved_activation_input": "fp8"}),
        ("rowwise", {"checkpoint": True, "return_layernorm_output": True}),
        ("none", {"checkpoint": True, "return_layernorm_output": True}),
    ],
    ids=str,
)
def test_options_are_compiled_too(recipe: str, options: dict[str, Any]) -> None:
    assert_equal_steps(Runs(OUTSIDE, recipe, None, **options), Runs(OUTSIDE, recipe, "aot_eager", **options))


def test_torch_autocast_and_evaluation() -> None:
    model = Model()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    x = torch.randn(9, 32)
    for recipe in ("delayed", "current"):
        with under(RECIPES[recipe]), torch.autocast("cpu", torch.bfloat16):
            y, expected = compiled(x), model(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, expected)
        with torch.no_grad(), under(RECIPES[recipe]):
            assert torch.equal(compiled(x), model(x))


def test_one_row_and_no_row() -> None:
    eager, compiled = Runs(OUTSIDE, "delayed", None), Runs(OUTSIDE, "delayed", "aot_eager")
    for number, tokens in enumerate((8, 1, 0)):
        for a, b in zip(eager.step(number, tokens), compiled.step(number, tokens), strict=True):
            assert torch.equal(a.nan_to_num(), b.nan_to_num())  # the mean over no element is NaN


def test_an_equal_recipe_made_anew_each_step_compiles_nothing_anew() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(Model(), backend=counter, fullgraph=True)
    for _ in range(6):
        with octavo.autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = compiled(torch.randn(8, 32))
        y.sum().backward()
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_inductor_is_within_one_rounding_of_eager() -> None:
    """What lies between the opaque operators is rounded as in eager code but for sums, whose order is Inductor's."""
    eager, compiled = Runs(INSIDE, "delayed", None), Runs(INSIDE, "delayed", "inductor")
    for number, tokens in enumerate([24, 40]):
        # A few values next to the middle of two codes may take the other one, 1/8 of themselves away.
        for x, y in zip(eager.step(number, tokens), compiled.step(number, tokens), strict=True):
            assert relative_error(x, y) < 0.02
