"""`transformer_engine.pytorch.quantization` (called fp8 in older code): where FP8 is on, and what the machine can.

The contexts are Octavo's own under TE's names, so they nest with `octavo.autocast` and are traced by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import octavo.distributed  # noqa: F401  puts the agreement of amaxes across ranks in force
from octavo import recipes
from octavo.compat.transformer_engine.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
    given_recipe,
)
from octavo.kernels.scaled_mm import device_reasons
from octavo.kernels.support import is_supported
from octavo.runtime import LayerState, quantized_init, update_scales
from octavo.runtime import autocast as octavo_autocast
from octavo.runtime.autocast import current_frame
from octavo.runtime.layer_state import registered_states

Reason = tuple[bool, str]


def _default_name() -> str:
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if capability >= (12, 0):
            return "current"
        if capability >= (10, 0):
            return "mxfp8"
    return "delayed"


# Dynamo asks once. (torch.compiler.assume_constant_result sets this, and imports Dynamo to do so.)
_default_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


_DEFAULTS: dict[str, Callable[[], Recipe]] = {
    "current": Float8CurrentScaling,
    "delayed": DelayedScaling,
    "mxfp8": MXFP8BlockScaling,
}
# Made once: a recipe that is new in every call would be compiled anew each time.
_STANDING = {name: make() for name, make in _DEFAULTS.items()}


def get_default_recipe() -> Recipe:
    """The recipe that TE would choose here: delayed on Hopper, Ada and machines without a GPU, MXFP8 on Blackwell."""
    return _DEFAULTS[_default_name()]()


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: object | None = None,
) -> octavo_autocast:
    """Context: TE layers inside run in FP8.

    Args:
        enabled: False runs them in high precision.
        calibrating: amaxes are gathered also where FP8 is off.
        recipe: `get_default_recipe()` if None.
        amax_reduction_group: process group over which amaxes agree; the default group if None.

    Raises:
        NotImplementedError: the recipe asks for what Octavo does not do yet; says what.
        ValueError: it is no recipe of `transformer_engine.common.recipe`.
    """
    native = _native(recipe) if enabled or calibrating else None
    return octavo_autocast(enabled, native, amax_reduction_group, calibrating)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object | None = None,
) -> octavo_autocast:
    """`autocast` with the argument names of older code."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_init:
    """Context: layers built inside hold their weights in FP8 alone.

    Args:
        enabled: False builds ordinary layers.
        recipe: decides the format of the weights; `get_default_recipe()` if None.
        preserve_high_precision_init_val: weights keep `get_high_precision_init_val()` until
            `clear_high_precision_init_val()`.
    """
    native = _native(recipe) if enabled else None
    return quantized_init(enabled, native, preserve_high_precision_init_val)


def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> quantized_init:
    """`quantized_model_init` under its older name."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)


def is_fp8_available(return_reason: bool = False) -> bool | Reason:
    """Whether products run on FP8 units here; where not, Octavo emulates them, with the same numbers."""
    if not torch.cuda.is_available():
        return _answer(["no CUDA device: Octavo emulates FP8 here"], return_reason)
    return _answer(device_reasons(torch.device("cuda", torch.cuda.current_device())), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | Reason:
    """False: Octavo emulates products under MX scales on every device, with the same numbers."""
    return _answer(list(is_supported("mx_products").reasons), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | Reason:
    """Whether products by block run on FP8 units here; where not, Octavo emulates them, with the same numbers."""
    return _answer(list(is_supported("block_products").reasons), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | Reason:
    """False: Octavo has eight-bit formats only."""
    return _answer(["Octavo has no four-bit formats"], return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | Reason:
    """True: on every GPU of compute capability 8.0 or later, and on the CPU."""
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return _answer(["compute capability below 8.0: no BF16 units"] if old else [], return_reason)


def check_fp8_support() -> Any:
    """`is_fp8_available` with its reason: (available, why not)."""
    return is_fp8_available(return_reason=True)


def check_mxfp8_support() -> Any:
    """`is_mxfp8_available` with its reason."""
    return is_mxfp8_available(return_reason=True)


def check_fp8_block_scaling_support() -> Any:
    """`is_fp8_block_scaling_available` with its reason."""
    return is_fp8_block_scaling_available(return_reason=True)


def check_nvfp4_support() -> Any:
    """`is_nvfp4_available` with its reason."""
    return is_nvfp4_available(return_reason=True)


class FP8GlobalStateManager:
    """TE's global state, as a view of Octavo's: the context in force, and the layers' own histories."""

    # Each gives (available, why not), as there.
    is_fp8_available: Callable[[], Reason] = staticmethod(check_fp8_support)
    is_mxfp8_available: Callable[[], Reason] = staticmethod(check_mxfp8_support)
    is_fp8_block_scaling_available: Callable[[], Reason] = staticmethod(check_fp8_block_scaling_support)
    is_nvfp4_available: Callable[[], Reason] = staticmethod(check_nvfp4_support)

    @classmethod
    def reset(cls) -> None:
        """Nothing to forget: state belongs to the layers, and a context ends with its block.

        Raises:
            RuntimeError: inside an open context.
        """
        if current_frame() is not None:
            raise RuntimeError("FP8GlobalStateManager.reset() inside an open autocast: leave its block first")

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """True inside an enabled context."""
        frame = current_frame()
        return frame is not None and frame.enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """True inside a calibrating context."""
        frame = current_frame()
        return frame is not None and frame.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """The recipe in force, as it was given; inside `octavo.autocast`, Octavo's own; outside, the default."""
        frame = current_frame()
        if frame is None or frame.recipe is None:
            return get_default_recipe()
        return given_recipe(frame.recipe)

    @classmethod
    def get_fp8_group(cls) -> object | None:
        """The process group over which amaxes agree; None for the default one."""
        frame = current_frame()
        return None if frame is None else frame.group

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """End a step of delayed scaling now, for all layers: what is pending is folded, the gradients' part included.

        Octavo does so itself when a context is left, and folds the gradients' part with the next step's. One update
        serves both of TE's, so `forward` decides nothing: a part without new amaxes does not change.
        """
        if not isinstance(forward, bool):
            raise ValueError(f"forward is {forward!r}: expected True or False")
        update_scales(nn.ModuleList([_Owner(state) for state in registered_states()]), cls.get_fp8_group())


class _Owner(nn.Module):
    """Lets the end of a step find one state."""

    def __init__(self, state: LayerState) -> None:
        super().__init__()
        self.delayed_state = state


def _native(recipe: Recipe | None) -> recipes.Recipe:
    if recipe is None:
        recipe = _STANDING[_default_name()]
    if not getattr(recipe, "is_transformer_engines", False):
        raise ValueError(
            f"recipe is {recipe!r}: expected one of transformer_engine.common.recipe, such as DelayedScaling()"
        )
    return recipe.native


def _answer(reasons: list[str], return_reason: bool) -> bool | Reason:
    return (not reasons, "; ".join(reasons)) if return_reason else not reasons


__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "check_nvfp4_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "quantized_model_init",
]
