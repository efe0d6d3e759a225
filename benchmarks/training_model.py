"""The study's language model under training on a CUDA device: eager, compiled, or a whole step as one CUDA graph.

Everything that may differ between two runs is an argument: recipe, how it runs, seed. Weights are float32 masters, the
forward runs under torch.autocast in bf16, AdamW is fused, gradients are clipped, the learning rate lies on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.study.corpus import load_corpus
from octavo.study.documents import texts
from octavo.study.model import ModelShape, build_model
from octavo.study.tokenizer import train_encoder
from octavo.study.tokens import Batches, TokenData

Mode = Literal["eager", "blocks", "whole", "captured"]
# A language model of a shape, tokens [B, T] -> logits [B, T, V], from a seed.
Build = Callable[[ModelShape, int], nn.Module]
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=16),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}
VOCABULARY = 4096
SMALL = ModelShape(layers=2, width=256, heads=4, context=64, vocab_size=VOCABULARY)
# Enough for scales to be known: a gradient's not before the second update.
WARM_UP = 4


@dataclass(frozen=True)
class Setting:
    """What a training is made of; `clip` is the largest norm of all gradients."""

    shape: ModelShape = SMALL
    batch_size: int = 4
    learning_rate: float = 1e-3
    warm_up: int = 20
    steps: int = 200
    weight_decay: float = 0.1
    clip: float = 1.0

    def rate(self, step: int) -> float:
        """Learning rate of a step: up linearly, then down linearly to a tenth."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.learning_rate * (1.0 - 0.9 * min(1.0, done))


class Training:
    """One model under training.

    Attributes:
        losses: [steps] float32 on the device, one a step; nothing waits for them.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        mode: Mode,
        setting: Setting,
        seed: int = 0,
        device: str = "cuda",
        build: Build = build_model,
    ) -> None:
        """Build and convert; `captured` is captured after `WARM_UP` steps, by `step` itself."""
        self.recipe, self.mode, self.setting, self.done = recipe, mode, setting, 0
        shape = setting.shape
        self.model: Any = build(shape, seed).to(device)
        self.converted = 0
        if recipe is not None:
            self.converted = len(octavo.convert(self.model, recipe, exclude=["lm_head"], filter="all").converted)
            assert self.converted == 4 * shape.layers, "all linear layers of the blocks run in FP8"
        if mode == "blocks":
            for block in self.model.blocks:
                block.compile(fullgraph=True)
        elif mode == "whole":
            self.model.compile(fullgraph=True)
        self.rate = torch.zeros((), device=device)
        self.optimizer = optimizer_of(self.model, self.rate, setting.weight_decay)
        self.inputs = torch.zeros(setting.batch_size, shape.context, dtype=torch.int64, device=device)
        self.targets = torch.zeros_like(self.inputs)
        self.loss = torch.zeros((), device=device)
        self.losses = torch.zeros(setting.steps, device=device)
        self._graph: Any = None

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """One step on int64 tokens [batch, context]."""
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self.rate.fill_(self.setting.rate(self.done))
        if self.mode == "captured" and self.done >= WARM_UP:
            if self._graph is None:
                self._graph = captured(self.compute)
            self._graph.replay()
        elif self.mode == "captured":
            on_a_side_stream(self.compute)
        else:
            self.compute()
        self.losses[self.done % self.setting.steps].copy_(self.loss)
        self.done += 1

    def compute(self) -> None:
        """Forward, backward, clipping, optimizer, and the update of delayed scales at the exit of the context."""
        fp8 = nullcontext() if self.recipe is None else octavo.autocast(recipe=self.recipe)
        # Casts from a cache would outlive the graph that they were captured in.
        with torch.autocast(self.inputs.device.type, torch.bfloat16, cache_enabled=False), fp8:
            logits = self.model(self.inputs)
            loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), self.targets.reshape(-1))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.setting.clip)
        self.optimizer.step()
        self.loss.copy_(loss.detach())


def optimizer_of(model: nn.Module, rate: Tensor, weight_decay: float) -> torch.optim.Optimizer:
    """Fused AdamW as a graph can hold it, decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    on_gpu = rate.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True, capturable=on_gpu)
    # Else it warns of steps outside of a graph, which those compared with are on purpose.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer


def on_a_side_stream(call: Any) -> None:
    """Run what is to be captured later where a capture would run it, as torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)


def captured(call: Any) -> torch.cuda.CUDAGraph:
    """The kernels of one call as a graph; nothing of it has run yet."""
    torch.cuda.synchronize()
    # A graph that nobody holds any more but a cycle must not be freed while another one is captured.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@lru_cache(maxsize=1)
def token_streams(vocabulary: int) -> TokenData:
    """The splits of the text that ships with Python, tokens of a vocabulary that is trained on the training split."""
    parts = {split: texts(documents) for split, documents in load_corpus("docs").split().items()}
    encoder = train_encoder(parts["train"], vocabulary)
    return TokenData(**{split: encoder.encode(part) for split, part in parts.items()})


def batches_of(setting: Setting, seed: int = 0, device: str = "cuda") -> Batches:
    """The batches of a seed, by step."""
    return Batches(
        token_streams(VOCABULARY).train, setting.batch_size, setting.shape.context, seed, torch.device(device)
    )


def random_batch(setting: Setting, device: str = "cuda", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens drawn evenly, int64 [batch, context] each, for what asks nothing of a text."""
    generator = torch.Generator().manual_seed(seed)
    size = (2, setting.batch_size, setting.shape.context)
    inputs, targets = torch.randint(setting.shape.vocab_size, size, generator=generator).to(device).unbind()
    return inputs, targets


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and delayed-scaling state, copies."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Names under which two states differ in any bit (NaN counts as equal to NaN), or that one lacks."""
    names = sorted(a.keys() ^ b.keys())
    for name in sorted(a.keys() & b.keys()):
        if not torch.equal(a[name].nan_to_num(nan=-1.0), b[name].nan_to_num(nan=-1.0)):
            names.append(name)
    return names


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Context: whatever makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
