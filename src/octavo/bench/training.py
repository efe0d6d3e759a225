"""A training step of a variant of a model: forward under autocast, backward, AdamW; eager, compiled or graphed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import octavo.runtime as runtime
from octavo.bench.models import Batch, LossModel, ModelCase
from octavo.bench.timing import Call
from octavo.bench.variants import Converted, Variant, apply_variant

_WARM_UP_BEFORE_CAPTURE = 4


@dataclass
class Training:
    """A model under training, and one step of it.

    Attributes:
        step: a whole step.
        loss: [] of the last step; a captured step writes it anew.
        layers: how many run in FP8.
        parameters: of the model.
    """

    step: Call
    loss: Callable[[], Tensor]
    layers: int
    parameters: int


def prepare_training(
    case: ModelCase,
    variant: Variant,
    *,
    small: bool,
    samples: int,
    device: torch.device,
    seed: int,
    ran_eager: Callable[[], None] = lambda: None,
) -> Training:
    """Build, convert, compile and, if the variant asks for it, capture; the first steps are still to be run.

    A captured variant has run its warm-up steps when this returns. `ran_eager` is called where eager steps, run before
    anything is compiled, have ended.

    Raises:
        NotImplementedError: this version of Octavo has no make_graphed_callables.
    """
    torch.manual_seed(seed)
    sizes = case.small if small else case.sizes
    with device:
        inner = case.build(sizes)
    inner.train()
    converted = apply_variant(variant, inner)
    model: Any = LossModel(inner, case.loss)
    capturable = variant.graph == "captured"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=capturable)
    batch = case.make_batch(sizes, samples, device)
    parameters = sum(parameter.numel() for parameter in inner.parameters())
    stepper = _Stepper(model, converted, optimizer, batch, device, keeps_casts=not variant.graph)
    if variant.compiled:
        for _ in range(converted.eager_steps):
            stepper.run()
        ran_eager()
        _compile(inner, variant.compiled, case.blocks(inner))
    if variant.graph == "graphed":
        stepper.model = _graphed(model, variant, batch, device)
    step: Call = stepper.run
    if capturable:
        step = _captured(stepper)
    return Training(step, lambda: stepper.loss, converted.layers, parameters)


def _compile(model: nn.Module, form: str, blocks: list[nn.Module]) -> None:
    """In place, as `Variant.compiled` says; one compilation serves all blocks."""
    for part in [model] if form == "whole" else blocks:
        part.compile(mode="reduce-overhead" if form == "reduced" else None)


class _Stepper:
    """The eager form of a step: what a captured one records."""

    loss: Tensor

    def __init__(
        self,
        model: nn.Module,
        converted: Converted,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
        device: torch.device,
        keeps_casts: bool,
    ) -> None:
        self.model, self._converted, self._optimizer, self._batch = model, converted, optimizer, batch
        self._device, self._keeps_casts = device, keeps_casts

    def run(self) -> None:
        """Gradients to None, forward, backward, optimizer, scales: none are held while activations are."""
        self._optimizer.zero_grad(set_to_none=True)
        with ExitStack() as stack:
            # In a captured graph casts must not come from a cache that outlives it.
            autocast = torch.autocast(self._device.type, torch.bfloat16, cache_enabled=self._keeps_casts)
            stack.enter_context(autocast)
            stack.enter_context(self._converted.context())
            loss = self.model(*self._batch)
        loss.backward()
        self._optimizer.step()
        self._converted.after_step()
        self.loss = loss.detach()


def _graphed(model: nn.Module, variant: Variant, batch: Batch, device: torch.device) -> nn.Module:
    """Forward and backward each as a CUDA graph."""
    make: Any = torch.cuda.make_graphed_callables
    if variant.library == "octavo":
        make = getattr(runtime, "make_graphed_callables", None)
        if make is None:
            raise NotImplementedError("this version of Octavo has no make_graphed_callables")
    elif variant.library != "torch":
        raise NotImplementedError(f"{variant.library} is not graphed here")
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        graphed: nn.Module = make(model, tuple(batch))
    return graphed


def _captured(stepper: _Stepper) -> Call:
    """The whole step as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP_BEFORE_CAPTURE):
            stepper.run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # As in `CudaGraphs.capture`.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            stepper.run()
    except Exception:
        # The generator believes that the capture goes on, and whoever draws from it next would fail.
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())
        raise
    return graph.replay
