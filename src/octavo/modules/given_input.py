"""What a layer is called with: an input that it cannot take is refused by the names that its caller knows."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn


def check_input(x: Any, features: int, layer: nn.Module, name: str = "input") -> None:
    """Raise unless x is a floating-point tensor of so many features.

    Args:
        x: what a forward was given.
        features: its last dimension.
        layer: whose forward.
        name: of the argument.

    Raises:
        TypeError: no tensor.
        ValueError: another last dimension, or whole numbers.
    """
    if not isinstance(x, Tensor) or x.shape[-1:] != (features,) or not x.is_floating_point():
        refuse_input(x, features, layer, name)


def check_values(x: Any, layer: nn.Module, name: str, features: int) -> None:
    """Raise unless x is a floating-point tensor; its shape is another's matter. Arguments as of `check_input`."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        _refuse_kind(x, features, layer, name)


def refuse_input(x: Any, features: int, layer: nn.Module, name: str = "input") -> NoReturn:
    """Say what speaks against an input that `check_input` does not take."""
    if isinstance(x, Tensor) and x.shape[-1:] != (features,):
        raise ValueError(
            f"{called(layer)}: {name} has shape {tuple(x.shape)}: its last dimension must be in_features = {features}"
        )
    _refuse_kind(x, features, layer, name)


def _refuse_kind(x: Any, features: int, layer: nn.Module, name: str) -> NoReturn:
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{called(layer)}: {name} is a {type(x).__name__}: expected a tensor, floating point [..., {features}]"
        )
    raise ValueError(
        f"{called(layer)}: {name} has dtype {x.dtype} and shape {tuple(x.shape)}: it takes floating point"
        f" [..., {features}]; convert it first, such as x.float(), or look token ids up in an nn.Embedding"
    )


def called(layer: nn.Module) -> str:
    """How a message names a layer: its class, and its name in the model where `octavo.convert` gave it one."""
    name = getattr(layer, "layer_name", None)
    return f"{type(layer).__name__} {name!r}" if name else type(layer).__name__
