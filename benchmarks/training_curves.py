"""Loss curves over 200 steps of the study's model on a CUDA device; parts of `check_training.py`.

Every run has torch's deterministic algorithms, and attention by the one kernel whose backward has such a form: runs
that should be equal then are, in every bit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from benchmarks.training_compile import counted_replays
from benchmarks.training_model import (
    RECIPES,
    WARM_UP,
    Mode,
    Setting,
    Training,
    batches_of,
    random_batch,
    state_of,
    unequal,
)
from torch import Tensor

import octavo
from octavo.study.model import ModelShape

Result = dict[str, Any]
CURVE = Setting(
    shape=ModelShape(layers=4, width=512, heads=8, context=256, vocab_size=4096), batch_size=16, learning_rate=1e-3
)
LAST = 50
SEEDS = (0, 1, 2)


@contextmanager
def deterministic() -> Iterator[None]:
    """Context: deterministic algorithms; attention by FlashAttention. CUBLAS_WORKSPACE_CONFIG must be set before."""
    cuda = torch.backends.cuda
    before = (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.math_sdp_enabled(),
    )
    fills = torch.utils.deterministic.fill_uninitialized_memory
    _attention(True, False, False, False)
    torch.use_deterministic_algorithms(True)
    # Every output is written; to fill it first would only take time.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills
        _attention(*before)


def _attention(flash: bool, efficient: bool, cudnn: bool, plain: bool) -> None:
    torch.backends.cuda.enable_flash_sdp(flash)
    torch.backends.cuda.enable_mem_efficient_sdp(efficient)
    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.backends.cuda.enable_math_sdp(plain)


class Curves:
    """Runs already made, by name: the losses [steps] on the CPU and the final state."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.losses: dict[str, Tensor] = {}
        self.states: dict[str, dict[str, Tensor]] = {}

    def run(self, name: str, recipe: str | None, mode: Mode, seed: int = 0) -> Result:
        """Train; the curve's rows for the record."""
        torch._dynamo.reset()
        setting = self.setting
        with deterministic():
            batches = batches_of(setting, seed)
            training = Training(None if recipe is None else RECIPES[recipe], mode, setting, seed)
            for step in range(setting.steps):
                training.step(*batches(step))
        losses = training.losses.cpu()
        self.losses[name], self.states[name] = losses, state_of(training.model)
        curve = [round(value, 4) for value in losses[9::10].tolist()]
        return {"ok": bool(losses.isfinite().all()), "final": self.final(name), "every_tenth": curve}

    def final(self, name: str) -> float:
        """Mean of the last losses."""
        return round(float(self.losses[name][-LAST:].double().mean()), 5)

    def within_noise(self, name: str) -> Result:
        """A curve against bf16's of the same seed and batches.

        The band is what bf16 itself does when the seed changes: the range of the final losses (means over the last 50
        steps) of three seeds, and the mean difference of two of their curves, step by step, over the same 50. A run
        that FP8 disturbs no more than another seed does lies within both. (The range of three is 1.7 standard
        deviations on average; two independent runs differ by 1.4, and those of the same weights and batches by less.)
        """
        seeds = [self.losses[f"bf16 seed {seed}"][-LAST:].double() for seed in SEEDS]
        finals = torch.stack(seeds).mean(1)
        band = float(finals.max() - finals.min())
        pairs = [(a, b) for place, a in enumerate(seeds) for b in seeds[place + 1 :]]
        steps = sum(float((a - b).abs().mean()) for a, b in pairs) / len(pairs)
        mine = self.losses[name][-LAST:].double()
        apart, by_step = float(mine.mean() - finals[0]), float((mine - seeds[0]).abs().mean())
        figures = {"difference": apart, "band": band, "by_step": by_step, "band_by_step": steps}
        return {"ok": abs(apart) <= band and by_step <= steps, **{key: round(v, 5) for key, v in figures.items()}}

    def equal(self, a: str, b: str) -> Result:
        """Every loss, every parameter, every scale and history."""
        losses = int((self.losses[a] != self.losses[b]).sum())
        first = int((self.losses[a] != self.losses[b]).int().argmax()) if losses else None
        names = unequal(self.states[a], self.states[b])
        return {"ok": not losses and not names, "losses_unequal": losses, "first": first, "tensors_unequal": len(names)}


def check_curves(checks: Any) -> None:
    """The loss curves of bf16 and of FP8 in every way of running, and the runs that must be the same."""
    curves = Curves(CURVE)

    def run(name: str, recipe: str | None, mode: Mode, seed: int = 0) -> None:
        checks.run("curve", functools.partial(curves.run, name, recipe, mode, seed), run=name)

    run("delayed eager", "delayed", "eager")
    run("delayed captured", "delayed", "captured")
    checks.run("captured equals eager", functools.partial(curves.equal, "delayed eager", "delayed captured"))
    for seed in SEEDS:
        run(f"bf16 seed {seed}", None, "eager", seed)
    run("current eager", "current", "eager")
    run("delayed blocks", "delayed", "blocks")
    run("current blocks", "current", "blocks")
    run("delayed whole", "delayed", "whole")
    for name in [name for name in curves.losses if not name.startswith("bf16")]:
        checks.run("within noise", functools.partial(curves.within_noise, name), run=name)
    for name in ("delayed", "current"):
        run(f"{name} again", name, "eager")
        checks.run("same seed twice", functools.partial(curves.equal, f"{name} eager", f"{name} again"), recipe=name)


def check_graphed(checks: Any) -> None:
    """`octavo.make_graphed_callables` and eager, over 20 steps with updates: the same bits."""
    for name in ("delayed", "current", "rowwise"):
        for update in ("autocast", "update_scales") if name == "delayed" else ("autocast",):
            checks.run("graphed equals eager", functools.partial(graphed, name, update), recipe=name, update=update)


def graphed(name: str, update: str, steps: int = 20) -> Result:
    """Blocks graphed one by one, once their scales are known; losses and final states against eager."""
    setting = Setting(steps=steps)
    losses, states, replays = [], [], 0
    for with_graphs in (False, True):
        with deterministic(), counted_replays() as count:
            training = Training(RECIPES[name], "eager", setting)
            if update == "update_scales":
                training.recipe = None
            for step in range(steps):
                if with_graphs and step == WARM_UP:
                    _graph_blocks(training)
                training.step(*random_batch(setting, seed=step))
                if update == "update_scales":
                    octavo.update_scales(training.model)
        losses.append(training.losses.cpu())
        states.append({key.replace(".inner.block.", "."): value for key, value in state_of(training.model).items()})
        replays = count[0]
    names = unequal(*states)
    apart = int((losses[0] != losses[1]).sum())
    # A forward and a backward of each block and step.
    ok = not apart and not names and replays == 2 * setting.shape.layers * (steps - WARM_UP)
    return {"ok": ok, "losses_unequal": apart, "tensors_unequal": len(names), "replays": replays}


def _graph_blocks(training: Training) -> None:
    shape, batch_size = training.setting.shape, training.setting.batch_size
    blocks = [_OneArgument(block) for block in training.model.blocks]
    size = (batch_size, shape.context, shape.width)
    samples = tuple((torch.randn(size, device="cuda", requires_grad=True),) for _ in blocks)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        blocks_with_graphs: Any = octavo.make_graphed_callables(tuple(blocks), samples)
    training.model.blocks = torch.nn.ModuleList(_WithCache(block) for block in blocks_with_graphs)


class _OneArgument(torch.nn.Module):
    """A block without its cache of keys and values, which a graph could not take."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        out: Tensor = self.block(x, None)
        return out


class _WithCache(torch.nn.Module):
    """Called as the model calls its blocks."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: Tensor, cache: None) -> Tensor:
        """[B, T, C] -> [B, T, C]."""
        out: Tensor = self.inner(x)
        return out
