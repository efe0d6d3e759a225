"""LayerState: the delayed-scaling state of one layer, owned by its module, and the weak registry of all of them.

The registry is filled when a layer is built. It lets the end of a context find the layers that took part without a list
being appended to while they run, which the compiler could not trace.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from octavo.recipes import DelayedUpdate, Recipe
from octavo.recipes.recipe import OPERANDS
from octavo.runtime.weight_bound import WeightBound
from octavo.tensor import OperandState, UsedScale

# One of the two globals of Octavo; a list, since its order must be the same on all ranks.
_REGISTRY: list[weakref.ref[LayerState]] = []
_REGISTERING = threading.Lock()


# What a copy of a state makes for itself.
_ANEW = {"decided": None, "plan": None, "updates": None, "_noted": None, "weight_bound": None}


class UsedScales:
    """The scales that a forward cast its input and its weight with."""

    def __init__(self) -> None:
        self.input = UsedScale()
        self.weight = UsedScale()


class LayerState:
    """State of the three operands of a Linear.

    Attributes:
        input, weight, grad_output: the operands'.
        recipe: the delayed recipe that the layer last ran with; None before that.
        context: in whose `octavo.autocast` a forward has gathered since the last update; None if in nobody's.
        used: the recipe and scales of the last forward with gradients, which a backward may recompute.
        used_without_grad: those of the last forward without.
        takes_part: with several ranks, its amaxes are agreed on at the end of each context; those of a copy not before
            it has gathered some itself.
        stale_steps: optimizer steps seen since the last update, to notice a forgotten one.
        shares_input: `input` is that of other layers too.
        decided: what the last forward outside of checkpoints was run with, and what that was decided by.
        plan: the plan of the last call and what it was made for.
        updates: those of the last step of which this state was the first, and what they were made for.
        high_precision: the layer runs in high precision, whatever recipe is in force.
        weight_bound: what the weight's scale is predicted from; None where it is not. A copy has none.
    """

    high_precision: bool = False
    weight_bound: WeightBound | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self.input = OperandState(device)
        self.weight = OperandState(device)
        self.grad_output = OperandState(device, late_bound=True)
        self.recipe: Recipe | None = None
        self.context: object | None = None
        self.used: Any = None
        self.used_without_grad: Any = None
        self.takes_part = True
        self.weight_version = (-1, -1)
        self.stale_steps = 0
        self.shares_input = False
        self.decided: Any = None
        self.plan: Any = None
        self.updates: Any = None
        self._noted: tuple[UsedScales, UsedScales] | None = None
        _register(self)

    def noted_scales(self) -> UsedScales:
        """Where the scales of the last forward are noted: of one with gradients, or of one without."""
        if self._noted is None:
            self._noted = UsedScales(), UsedScales()
        return self._noted[torch.is_grad_enabled()]

    @property
    def operands(self) -> tuple[OperandState, OperandState, OperandState]:
        """The three, in the order of `octavo.recipes.recipe.OPERANDS`."""
        return self.input, self.weight, self.grad_output

    @property
    def update(self) -> DelayedUpdate | None:
        """How this layer's histories are updated; None while it has not run with delayed scaling."""
        return None if self.recipe is None else self.recipe.delayed

    def adopt_recipe(self, recipe: Recipe) -> None:
        """Run with `recipe` from now on; a recipe that measures the first batch does so if nothing is known yet.

        In another format the scales go on providing for the same amaxes.
        """
        update, before = recipe.delayed, self.recipe
        for operand, spec in zip(self.operands, recipe.linear[:3], strict=True):
            operand.provide_for(spec.format.max)
            if before is None and update is not None and update.initialise_from_first_batch:
                operand.from_data = operand.from_data or not operand.is_known
        self.recipe = recipe

    def follows(self, recipe: Recipe) -> bool:
        """True if there is nothing to adopt: a layer that shares its input may have run in another format since."""
        return self.recipe is recipe and self.input.format_max == recipe.linear.input.format.max

    def share_input(self, other: LayerState) -> None:
        """Have one state of the input with another layer, whose it is."""
        self.input = other.input
        self.input.shared = True
        self.shares_input = other.shares_input = True
        self.plan = None

    def leave_shared_input(self) -> None:
        """Go on with a state of the input of its own, which begins as the shared one is."""
        if self.shares_input:
            self.input = copy.deepcopy(self.input)
            self.input.shared = False
            self.shares_input = False
            self.plan = None

    def measure_next(self) -> None:
        """Forget all scales: they come from the present weights and the next batch."""
        for operand in self.operands:
            operand.measure_next()

    def leave_recipe(self) -> None:
        """Forget all that delayed scaling knows: the layer runs without it from now on."""
        self.measure_next()
        self.recipe = None

    def predict_weight(self, bound: WeightBound | None) -> None:
        """Make the weight's scale of a bound from now on; None: as the recipe says, with what it knows forgotten."""
        self.weight_bound, self.plan = bound, None
        self.weight.measure_next()

    def saved(self, prefix: str) -> dict[str, Tensor]:
        """The entries of a state dict, `<prefix><operand>_scale` and `<prefix><operand>_amax_history`."""
        entries = {}
        for name, operand in zip(OPERANDS, self.operands, strict=True):
            for key, value in operand.saved().items():
                entries[f"{prefix}{name}_{key}"] = value
        return entries

    @property
    def is_used(self) -> bool:
        """True once there is something to save: the layer has run with delayed scaling, or a state was loaded."""
        return self.recipe is not None or any(operand.is_known for operand in self.operands)

    @property
    def device(self) -> torch.device:
        """Where the state lies."""
        return self.input.gathered.device

    def taken_out(self, state_dict: dict[str, Any], prefix: str) -> dict[str, Tensor]:
        """The entries that `saved` made, taken out of `state_dict`, without their prefix.

        Raises:
            ValueError: the scale is one of codes that stand for the weight, as in a frozen checkpoint.
        """
        _refuse_codes(state_dict, prefix)
        keys = [f"{name}_{part}" for name in OPERANDS for part in ("scale", "amax_history")]
        return {key: state_dict.pop(prefix + key) for key in keys if prefix + key in state_dict}

    def load(self, entries: dict[str, Tensor], new_weight: bool) -> None:
        """Take over entries that `saved` made; both of an operand are optional.

        A scale alone begins a history; a history alone waits for a scale from the data. An operand without entries is
        measured anew if the weight is new.
        """
        for name, operand in zip(OPERANDS, self.operands, strict=True):
            scale, history = entries.get(f"{name}_scale"), entries.get(f"{name}_amax_history")
            if scale is not None or history is not None:
                self.decided = self.plan = None
                try:
                    operand.load(
                        torch.tensor(float("nan")) if scale is None else scale,
                        torch.zeros(1) if history is None else history,
                    )
                except ValueError as error:
                    raise ValueError(
                        f"{name}_scale and {name}_amax_history of a state dict: {error}. Leave them out, and the scale"
                        " is measured from the next data"
                    ) from error
            elif new_weight:
                operand.measure_next()
        if new_weight and self.weight_bound is not None:
            self.weight.measure_next()
            self.weight_bound.measure()

    def move(self, device: torch.device) -> None:
        """Follow the weight to another device."""
        for operand in self.operands:
            operand.move(device)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "used": None, "used_without_grad": None, "context": None, "takes_part": False, **_ANEW}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register(self)


def _refuse_codes(state_dict: dict[str, Any], prefix: str) -> None:
    """Codes would be copied into the weight as if they were its values."""
    weight, scale = state_dict.get(f"{prefix}weight"), state_dict.get(f"{prefix}weight_scale")
    if type(weight) is torch.Tensor and scale is not None and weight.is_floating_point() and weight.itemsize == 1:
        raise ValueError(
            f"{prefix}weight is {weight.dtype} of shape {tuple(weight.shape)}, and {prefix}weight_scale of shape"
            f" {tuple(scale.shape)}: codes of a frozen checkpoint? It loads into a model frozen with the same scheme:"
            " octavo.freeze(model, scheme) first"
        )


def _register(state: LayerState) -> None:
    with _REGISTERING:
        _REGISTRY[:] = [reference for reference in _REGISTRY if reference() is not None]
        _REGISTRY.append(weakref.ref(state))


def any_layer_was_built() -> bool:
    """True from the first FP8 layer of this process on, also after it is gone."""
    return bool(_REGISTRY)


def registered_states() -> list[LayerState]:
    """All states that are alive, in the order in which they were built."""
    states = []
    for reference in _REGISTRY:
        state = reference()
        if state is not None:
            states.append(state)
    return states


def states_of(model: nn.Module) -> Iterator[LayerState]:
    """The states of the layers of a model, each once."""
    for module in model.modules():
        state = module.__dict__.get("delayed_state")
        if isinstance(state, LayerState):
            yield state
