"""Run a model on batches of many forms, and leave it as it was found."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.runtime.given_model import output_of

Loss = Callable[[Any, Any], Tensor] | None

_FUNCTION = "octavo.choose_precision"
_LOSS_REMEDY = (
    "give loss=, a function of (output, targets) that returns one number; without it the model must return a loss, as"
    " transformers' models do when they are given labels"
)
_WITHOUT_LOSS = (
    "if the last one is the targets, give loss=, a function of (output, targets), such as"
    " torch.nn.functional.cross_entropy; leave out what else the model does not take"
)
_WITH_LOSS = (
    "leave out what it does not take. With loss= the last entry of a tuple or a list is the targets, which the model"
    " does not get: give (inputs, targets). Of a mapping both get everything"
)


def loss_of(model: nn.Module, batch: Any, loss: Loss) -> Tensor:
    """The loss of one batch, a finite number that depends on the model.

    Args:
        model: the model, called as the batch's form says.
        batch: keyword arguments of the model as a mapping, else positional ones. With `loss`, the last of several is
            the targets, and the loss is `loss(output, targets)`; of a mapping or a tensor, `loss(output, batch)`.
        loss: None takes what the model returns: its `loss`, the entry "loss" of a mapping, or a tensor of one element.

    Raises:
        ValueError: the model does not take the batch; the loss is no scalar, not finite, or does not depend on the
            model.
    """
    if loss is None:
        return _checked_loss(_returned_loss(output_of(model, batch, _FUNCTION, _WITHOUT_LOSS)))
    inputs, targets = batch, batch
    if isinstance(batch, (tuple, list)) and batch:
        inputs, targets = batch[:-1], batch[-1]
    return _checked_loss(loss(output_of(model, inputs, _FUNCTION, _WITH_LOSS), targets))


def _returned_loss(output: Any) -> Any:
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", output)


def _checked_loss(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"the loss is {found}, and it must be a scalar tensor: {_LOSS_REMEDY}")
    if not value.isfinite():
        raise ValueError(
            f"the loss is {value.item()}, and it must be finite before FP8 can be judged by it: look at the batch, the"
            " weights and the learning rate that led to it"
        )
    if not value.requires_grad:
        raise ValueError(
            "the loss holds no gradient, and FP8 is judged by dL/dy: compute it outside of torch.no_grad(), and without"
            " .detach() or .item() on the way"
        )
    return value.reshape(())


class _Buffers(NamedTuple):
    """The buffers of a module by name, and a copy of each."""

    tensors: dict[str, Tensor | None]
    values: dict[str, Tensor]

    @staticmethod
    def of(module: nn.Module) -> _Buffers:
        tensors = dict(module._buffers)
        return _Buffers(tensors, {name: one.detach().clone() for name, one in tensors.items() if one is not None})

    @torch.no_grad()
    def put_back(self, module: nn.Module) -> None:
        """Names, tensors and values as they were; of one whose shape was changed, its copy."""
        for name, values in self.values.items():
            buffer = self.tensors[name]
            assert buffer is not None, "it was copied"
            if buffer.grad_fn is not None:
                # Written to with what was given a gradient here.
                buffer.detach_()
            if buffer.shape != values.shape:
                self.tensors[name] = values
            # By value: batch_norm writes to its statistics without telling their version.
            elif not _same(buffer, values):
                buffer.copy_(values)
        module._buffers.clear()
        module._buffers.update(self.tensors)


def _same(a: Tensor, b: Tensor) -> bool:
    """True of equal numbers, NaN included."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Context: what a forward of the model changes is put back at the end, also after an exception.

    Training flags, buffers (the running statistics of BatchNorm), and the generators of `random`, torch's CPU and the
    devices of the model.
    """
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(module, _Buffers.of(module)) for module in model.modules()]
    python = random.getstate()
    places = {tensor.device for tensor in [*model.parameters(), *model.buffers()]}
    cuda = sorted({place.index for place in places if place.type == "cuda" and place.index is not None})
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        random.setstate(python)
        for module, flag in flags:
            module.training = flag
        for module, before in buffers:
            before.put_back(module)
