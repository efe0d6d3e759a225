"""A model compiled block by block is one graph for all of its blocks: nothing in it depends on which block it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize(
    ("recipe", "graphs"),
    # A converted model measures its first batch: one graph that does, one that does not.
    [(DelayedScaling(amax_history_len=4), 2), (CurrentScaling(), 1), (RowwiseScaling(), 1)],
)
def test_twelve_blocks_are_one_graph(recipe: Recipe, graphs: int) -> None:
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return aot_eager(graph, inputs)

    model = nn.Sequential(*[Block() for _ in range(12)])
    octavo.convert(model, recipe)
    eager = copy.deepcopy(model)
    for block in model:
        block.compile(fullgraph=True, backend=backend)
    for _ in range(3):
        x = torch.randn(16, 32)
        outcomes = []
        for each in (model, eager):
            leaf = x.clone().requires_grad_()
            y = each(leaf)
            y.square().sum().backward()
            octavo.update_scales(each)
            outcomes.append((y, leaf.grad))
        assert torch.equal(outcomes[0][0], outcomes[1][0])
        assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert len(compiled) == graphs
