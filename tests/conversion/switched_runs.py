"""A small model that trains on fresh batches, so that steps differ by what the batches do, and recipes that change."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import Recipe

WIDTH, TOKENS, STEPS = 32, 64, 150
# Activations are this large, so that a scale of 1, or one of other data, saturates and shows.
GAIN = 4096.0
# So many changes before a switch say how much steps differ anyway.
WINDOW = 25


class Network(nn.Module):
    """Three layers that share one input, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x) * GAIN
        q, k, v = self.q_proj(h) / GAIN, self.k_proj(h) / GAIN, self.v_proj(h) / GAIN
        h = x + q * torch.sigmoid(k) + v
        return h + self.down(nn.functional.gelu(self.up(h)))


def train(
    recipes: Mapping[int, Recipe | None],
    backend: Any = None,
    switch: Callable[[nn.Module, Recipe | None], Any] = octavo.set_recipe,
) -> list[float]:
    """The losses of 150 steps; `recipes` by the step before which they come into force, 0 included."""
    torch.manual_seed(0)
    model, teacher = Network(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    octavo.convert(model, recipes[0])
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for step in range(STEPS):
        if step and step in recipes:
            switch(model, recipes[step])
        x = torch.randn(TOKENS, WIDTH)
        with torch.no_grad():
            target = teacher(x)
        loss = nn.functional.mse_loss(run(x), target)
        (1e-4 * loss).backward()
        octavo.update_scales(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def jump(losses: list[float], step: int) -> float:
    """By how many standard deviations the loss's change at a step leaves the changes of the steps before."""
    changes = [after - before for before, after in itertools.pairwise(losses)]
    before = changes[step - 1 - WINDOW : step - 1]
    return abs(changes[step - 1] - statistics.mean(before)) / statistics.stdev(before)
