"""What functions over a whole model are called with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


def check_model(model: Any, function: str) -> None:
    """Raise TypeError unless it is a module; `function` is the one that was called."""
    if not isinstance(model, nn.Module):
        shown = f"{model.__name__}, a class" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"{function}: model is {shown}: expected an nn.Module; put several into an nn.ModuleList")


def check_batches(batches: Any, function: str) -> None:
    """Raise ValueError unless there are several of them: of one batch, rows or keys would be taken for batches."""
    if isinstance(batches, (Tensor, Mapping, str)):
        raise ValueError(
            f"{function}: batches is a {type(batches).__name__}, a single batch: give a list of batches, [batch]"
        )
    if isinstance(batches, Iterable):
        return
    # A Dataset iterates by its `__getitem__` alone. (Only of such is `iter` asked: a DataLoader would start workers.)
    try:
        iter(batches)
    except TypeError:
        raise ValueError(
            f"{function}: batches is a {type(batches).__name__}: expected a list of batches, or a DataLoader"
        ) from None


@contextmanager
def told_of_one_batch(batches: Any, function: str, remedy: str) -> Iterator[None]:
    """Context of a batch's run: what fails there because one batch was given in place of several says so.

    A tuple of tensors may be several batches of one tensor each, so nothing is refused before it fails.

    Args:
        batches: as the user gave them.
        function: the one that was called with them.
        remedy: what to give in place of one batch.

    Raises:
        ValueError: the run failed, and `batches` is a tuple of tensors.
    """
    try:
        yield
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        alike = isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(one, Tensor) for one in batches)
        if not alike or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        raise ValueError(
            f"{function}: batches is {_shown(batches)}, so that each of its tensors was taken for a batch, and with one"
            f" of them the model or the loss failed ({error}). If the tuple is one batch, {remedy}"
        ) from error


def output_of(model: nn.Module, batch: Any, function: str, remedy: str) -> Any:
    """What the model gives for a batch.

    Args:
        model: called as the form of the batch says.
        batch: a mapping holds keyword arguments, a tuple or a list positional ones; anything else is the one argument.
        function: the one that was called with batches.
        remedy: what to do if the model does not take them.

    Raises:
        ValueError: the model's forward does not take these arguments.
    """
    keywords = batch if isinstance(batch, Mapping) else {}
    arguments = () if keywords is batch else batch if isinstance(batch, (tuple, list)) else (batch,)
    try:
        return model(*arguments, **keywords)
    except TypeError as error:
        taken = _refusal(model, arguments, keywords)
        # What went wrong inside of the model is the model's to tell.
        if not taken:
            raise
        raise ValueError(
            f"{function}: the model is called with {_shown(batch)}, and {taken}. A tuple or a list holds the model's"
            f" arguments, a mapping its keyword arguments, anything else is its one argument: {remedy}"
        ) from error


def _refusal(model: nn.Module, arguments: Iterable[Any], keywords: Mapping[str, Any]) -> str:
    """What the model's forward takes; empty if it takes these arguments, or does not say."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return f"the forward of {type(model).__name__} takes ({', '.join(signature.parameters)})"
    return ""


def _shown(batch: Any) -> str:
    """A batch in a few words."""
    if isinstance(batch, Mapping):
        return f"a mapping of {', '.join(map(repr, batch)) or 'nothing'}"
    if isinstance(batch, (tuple, list)):
        shown = [*map(_shown, batch[:4]), *(["…"] if len(batch) > 4 else [])]
        return f"a {type(batch).__name__} of {len(batch)} ({', '.join(shown)})"
    return f"a tensor {list(batch.shape)}" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
