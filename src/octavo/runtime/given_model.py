"""What functions over a whole model are called with."""

from __future__ import annotations

from typing import Any

from torch import nn


def check_model(model: Any, function: str) -> None:
    """Raise TypeError unless it is a module; `function` is the one that was called."""
    if not isinstance(model, nn.Module):
        shown = f"{model.__name__}, a class" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TypeError(f"{function}: model is {shown}: expected an nn.Module; put several into an nn.ModuleList")
