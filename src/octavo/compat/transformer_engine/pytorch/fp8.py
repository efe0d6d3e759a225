"""`transformer_engine.pytorch.fp8`: the older name of `quantization`."""

from __future__ import annotations

from octavo.compat.transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
)

get_default_fp8_recipe = get_default_recipe
check_fp8_support = is_fp8_available

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
]
