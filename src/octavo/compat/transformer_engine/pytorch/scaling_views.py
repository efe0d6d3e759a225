"""`module.fp8_meta`: amax histories and scales of a layer in the layout of Transformer Engine.

    fp8_meta["scaling_fwd"].amax_history    [L, 3]   columns: input, weight, output (not quantized: zeros)
    fp8_meta["scaling_fwd"].scale           [3]      TE's scale is the multiplier: code = cast(value * scale)
    fp8_meta["scaling_fwd"].scale_inv       [3]      value = code * scale_inv
    fp8_meta["scaling_bwd"]                 2 columns: gradient of the output, gradient of the input (not quantized)

Of an MLP the columns of fc1 come first, then those of fc2: 6 and 4.

Row 0 is where the current step gathers; rows 1 … hold the past, oldest first. All are copies: looking changes nothing.

TE updates the gradients' part at the end of a backward, Octavo together with the next step. So the view shows that part
as the pending update will leave it. (With several ranks, from this rank's amaxes alone: a look is no collective.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.compat.transformer_engine.recipe import given_recipe
from octavo.kernels import delayed_update
from octavo.runtime import LayerState
from octavo.scaling import resized_history, scale_from_multiplier
from octavo.tensor import OperandState


class _Column(NamedTuple):
    history: Tensor  # [L]
    multiplier: Tensor  # []
    scale: Tensor  # []


class ScalingView:
    """Histories and scales of the operands of one direction."""

    def __init__(self, states: tuple[LayerState, ...], forward: bool) -> None:
        self._states = states
        self._forward = forward

    @property
    def amax_history(self) -> Tensor:
        """[L, operands]"""
        return torch.stack([column.history for column in self._columns()], dim=1)

    @property
    def scale(self) -> Tensor:
        """Multipliers, [operands]."""
        return torch.stack([column.multiplier for column in self._columns()])

    @property
    def scale_inv(self) -> Tensor:
        """Their reciprocals, [operands]."""
        return torch.stack([column.scale for column in self._columns()])

    @torch.no_grad()
    def _columns(self) -> list[_Column]:
        return [column for state in self._states for column in self._columns_of(state)]

    def _columns_of(self, state: LayerState) -> list[_Column]:
        if self._forward:
            columns = [_gathering(state, state.input), _gathering(state, state.weight)]
        else:
            columns = [_folded(state, state.grad_output)]
        one = torch.ones_like(columns[0].scale)
        return [*columns, _Column(torch.zeros_like(columns[0].history), one, one)]


def _gathering(state: LayerState, operand: OperandState) -> _Column:
    history = _history(state, operand)
    history[0] = operand.gathered
    return _Column(history, operand.multiplier, operand.scale.clone())


def _folded(state: LayerState, operand: OperandState) -> _Column:
    recipe, update = state.recipe, state.update
    if recipe is None or update is None:
        return _gathering(state, operand)
    history, scale = delayed_update(
        _history(state, operand)[None],
        operand.scale[None],
        operand.gathered[None],
        recipe.linear.grad_output.format.max,
        update.margin,
        update.algorithm,
    )
    return _Column(history[0], scale_from_multiplier(scale[0]), scale[0])


def _history(state: LayerState, operand: OperandState) -> Tensor:
    update = state.update
    length = operand.history.shape[0] if update is None else update.amax_history_len
    return resized_history(operand.history, length).clone()


def fp8_meta(*states: LayerState) -> dict[str, Any]:
    """What TE's modules keep under `fp8_meta`, of a layer with the states of its products."""
    recipe = states[0].recipe
    return {
        "scaling_fwd": ScalingView(states, forward=True),
        "scaling_bwd": ScalingView(states, forward=False),
        "recipe": None if recipe is None else given_recipe(recipe),
        "num_gemms": len(states),
    }
