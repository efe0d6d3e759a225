"""Float8Linear: `octavo.Linear` with delayed scaling of all three operands, on without any context.

The scales of one step come from the amaxes of past ones; `sync_float8_amax_and_scale_history` ends a step.
"""

from __future__ import annotations

import copy
import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from octavo.compat.float8_experimental import config
from octavo.modules import CachedWeight, Linear
from octavo.recipes import DelayedScaling
from octavo.runtime.autocast import in_backward, trains
from octavo.tensor import OperandState

# The original's suffixes, and the operands they mean.
_OPERANDS = {"x": "input", "w": "weight", "dL_dY": "grad_output"}


class TensorScalingType(enum.Enum):
    """Where the scale of one operand comes from."""

    DELAYED = "delayed"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class DelayedScalingRecipe:
    """How scales follow amaxes.

    Attributes:
        history_len: for how many syncs an amax is remembered.
        scale_fn_name: "max" of the history; there is no other.
    """

    history_len: int = 16
    scale_fn_name: str = "max"

    def __post_init__(self) -> None:
        if self.scale_fn_name != "max":
            raise NotImplementedError(f"scale_fn_name={self.scale_fn_name!r}: float8_experimental knows 'max' only")


@dataclass(frozen=True)
class Float8Options:
    """What a swap decides for a layer beside its recipe.

    Attributes:
        scaling_type_x, scaling_type_w, scaling_type_dL_dY: DYNAMIC measures that operand in every call.
        emulate: products by emulation, which Octavo does wherever there are no FP8 units.
    """

    scaling_type_x: TensorScalingType = TensorScalingType.DELAYED
    scaling_type_w: TensorScalingType = TensorScalingType.DELAYED
    scaling_type_dL_dY: TensorScalingType = TensorScalingType.DELAYED
    emulate: bool = False

    @property
    def dynamic_operands(self) -> tuple[str, ...]:
        """Names, in the state of a layer, of the operands that are measured in every call."""
        kinds = {"input": self.scaling_type_x, "weight": self.scaling_type_w, "grad_output": self.scaling_type_dL_dY}
        return tuple(name for name, kind in kinds.items() if kind is TensorScalingType.DYNAMIC)


class Float8Linear(Linear):
    """`nn.Linear` in FP8 with delayed scaling; inputs and weights E4M3, gradients E5M2.

    Takes the arguments of `nn.Linear`, and `delayed_scaling_recipe`. Most layers come from `from_float` or
    `swap_linear_with_float8_linear`.

    Attributes:
        enable_pre_and_post_forward: from `config` when the layer was made.
        amax_and_scale_synced: False between a training forward and the sync that follows it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        delayed_scaling_recipe: DelayedScalingRecipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.become_float8(None, Float8Options(), delayed_scaling_recipe)

    def become_float8(
        self, name: str | None, options: Float8Options, scaling: DelayedScalingRecipe | None = None
    ) -> None:
        """Give a linear layer of this class its recipe and state; parameters stay as they are."""
        recipe = DelayedScaling(
            amax_history_len=(scaling or DelayedScalingRecipe()).history_len,
            initialise_from_first_batch=config.enable_amax_init,
        )
        self.become_fp8(recipe, name)
        self.options = options
        self._dynamic_operands = options.dynamic_operands
        self.enable_pre_and_post_forward = config.enable_pre_and_post_forward
        self.amax_and_scale_synced = True

    @classmethod
    def from_float(
        cls,
        mod: nn.Linear,
        emulate: bool = False,
        scaling_type_x: TensorScalingType = TensorScalingType.DELAYED,
        scaling_type_w: TensorScalingType = TensorScalingType.DELAYED,
        scaling_type_dL_dY: TensorScalingType = TensorScalingType.DELAYED,
    ) -> Float8Linear:
        """A Float8Linear beside `mod`, with the same Parameter objects, hooks and flags."""
        new = twin(mod)
        new.__class__ = cls
        assert isinstance(new, Float8Linear), "the class it has just been given"
        new.become_float8(None, Float8Options(scaling_type_x, scaling_type_w, scaling_type_dL_dY, emulate))
        return new

    def forward(self, input: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor:
        """y = x w^T + b -> [..., out_features].

        Raises:
            AssertionError: with `enable_pre_and_post_forward`, a training forward without a sync after the last one.
        """
        refuse_emulation(self.options.emulate, input)
        self._note_training_forward()
        for name in self._dynamic_operands:
            operand: OperandState = getattr(self.delayed_state, name)
            operand.from_data = True
        return self.run(input, cached_weight)

    def _note_training_forward(self) -> None:
        if not self.enable_pre_and_post_forward or not trains() or in_backward():
            return
        if not self.amax_and_scale_synced:
            raise AssertionError(
                f"{self.layer_name or 'Float8Linear'}: a second training forward without a sync: call"
                " sync_float8_amax_and_scale_history(model) after each backward, or set"
                " config.enable_pre_and_post_forward = False before the swap to merge several forwards"
            )
        self.amax_and_scale_synced = False

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for theirs, ours in _OPERANDS.items():
            state_dict.pop(f"{prefix}fp8_amax_{theirs}", None)
            scale = state_dict.pop(f"{prefix}fp8_scale_{theirs}", None)
            history = state_dict.pop(f"{prefix}fp8_amax_history_{theirs}", None)
            if scale is not None and history is not None:
                # Its scale is a multiplier; its history has the newest in front, ours at the end, behind the open step.
                past = history[: history.shape[0] - 1].flip(0)
                state_dict[f"{prefix}{ours}_scale"] = scale.reciprocal()
                state_dict[f"{prefix}{ours}_amax_history"] = torch.cat([past.new_zeros(1), past])
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # What code in the wild reads of the original's buffers. Its scale is the multiplier.

    @property
    def fp8_amax_x(self) -> Tensor:
        """Amax of the inputs since the last sync, [1]."""
        return self.delayed_state.input.gathered.reshape(1)

    @property
    def fp8_amax_w(self) -> Tensor:
        """Amax of the weight since the last sync, [1]."""
        return self.delayed_state.weight.gathered.reshape(1)

    @property
    def fp8_amax_dL_dY(self) -> Tensor:
        """Amax of the output's gradients since the last sync, [1]."""
        return self.delayed_state.grad_output.gathered.reshape(1)

    @property
    def fp8_scale_x(self) -> Tensor:
        """Multiplier of the inputs, [1]."""
        return self.delayed_state.input.multiplier.reshape(1)

    @property
    def fp8_scale_w(self) -> Tensor:
        """Multiplier of the weight, [1]."""
        return self.delayed_state.weight.multiplier.reshape(1)

    @property
    def fp8_scale_dL_dY(self) -> Tensor:
        """Multiplier of the output's gradients, [1]."""
        return self.delayed_state.grad_output.multiplier.reshape(1)

    @property
    def fp8_amax_history_x(self) -> Tensor:
        """Past amaxes of the inputs, newest first, [history_len]."""
        return self._history(self.delayed_state.input)

    @property
    def fp8_amax_history_w(self) -> Tensor:
        """Past amaxes of the weight, newest first, [history_len]."""
        return self._history(self.delayed_state.weight)

    @property
    def fp8_amax_history_dL_dY(self) -> Tensor:
        """Past amaxes of the output's gradients, newest first, [history_len]."""
        return self._history(self.delayed_state.grad_output)

    def _history(self, operand: OperandState) -> Tensor:
        update = self.delayed_state.update
        assert update is not None, "a Float8Linear always has a delayed recipe"
        # Of L positions the state uses L - 1 for the past; the original's window holds L amaxes, the last one included.
        past = operand.history[1:].flip(0)
        return torch.cat([past, past.new_zeros(update.amax_history_len - past.shape[0])])


def twin(mod: nn.Linear) -> nn.Linear:
    """A shallow copy of a module: the same Parameters and hooks in dictionaries of its own."""
    new = copy.copy(mod)
    for name, value in mod.__dict__.items():
        if isinstance(value, dict):
            new.__dict__[name] = copy.copy(value)
    return new


def refuse_emulation(emulate: bool, input: Tensor) -> None:
    """NotImplementedError for a product that would run on FP8 units although emulation was asked for."""
    if emulate and input.is_cuda:
        raise NotImplementedError(
            "emulate=True on a CUDA device: Octavo emulates where there are no FP8 units, and only there as yet"
        )
