"""`transformer_engine.pytorch.fp8`: the older name of `quantization`."""

from __future__ import annotations

from octavo.compat.transformer_engine.pytorch.quantization import (
    FP8GlobalStateManager,
    check_fp8_block_scaling_support,
    check_fp8_support,
    check_mxfp8_support,
    check_nvfp4_support,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
)

get_default_fp8_recipe = get_default_recipe

__all__ = [
    "FP8GlobalStateManager",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
]
