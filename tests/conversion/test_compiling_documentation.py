"""What docs/convert.md says of compiling and docs/state.md of micro-batches: how many graphs, how many steps."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe


class Model(nn.Module):
    """Two layers. (Of an nn.Sequential Dynamo would compile each layer by itself.)"""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 48), nn.Linear(48, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 32] -> [tokens, 16]."""
        return self.b(nn.functional.gelu(self.a(x)))


def graphs(recipe: Recipe, eager_steps: int, context: bool) -> int:
    """How many graphs six compiled steps take after some eager ones."""
    torch.compiler.reset()
    model = Model()
    octavo.convert(model, recipe, filter="all")

    def step() -> None:
        with octavo.autocast(recipe=recipe) if context else nullcontext():
            loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        model.zero_grad()
        if not context and recipe.delayed is not None:
            octavo.update_scales(model)

    for _ in range(eager_steps):
        step()
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(fullgraph=True, backend=counter)
    for _ in range(6):
        step()
    return int(counter.frame_count)


@pytest.mark.parametrize(("context", "at_once"), [(False, 2), (True, 3)], ids=["update_scales", "autocast"])
def test_three_eager_steps_leave_one_graph(context: bool, at_once: int) -> None:
    assert graphs(DelayedScaling(), 0, context) == at_once
    assert graphs(DelayedScaling(), 3, context) == 1


def test_a_recipe_without_state_has_one_graph() -> None:
    assert graphs(CurrentScaling(), 0, context=False) == 1


@pytest.mark.parametrize(
    ("way", "history"), [("update", [0, 0, 0, 3]), ("around all", [0, 0, 0, 3]), ("around each", [0, 1, 2, 3])]
)
def test_what_counts_as_a_step_of_micro_batches(way: str, history: list[int]) -> None:
    recipe = DelayedScaling(amax_history_len=4)
    layer = octavo.Linear(32, 32, recipe=recipe if way == "update" else None)

    def around(here: str) -> octavo.autocast | nullcontext[None]:
        return octavo.autocast(recipe=recipe) if way == here else nullcontext()

    with around("around all"), octavo.cached_weights():
        for size in (1, 2, 3):
            with around("around each"):
                y = layer(torch.full((16, 32), float(size)))
            y.sum().backward()
    if way == "update":
        octavo.update_scales(layer)
    assert layer.delayed_state.input.history.tolist() == history
