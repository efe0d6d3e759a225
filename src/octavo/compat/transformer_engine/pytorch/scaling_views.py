"""`module.fp8_meta`: amax histories and scales of a layer in the layout of Transformer Engine.

    fp8_meta["scaling_fwd"].amax_history    [L, 3]   columns: input, weight, output (not quantized: zeros)
    fp8_meta["scaling_fwd"].scale           [3]      TE's scale is the multiplier: code = cast(value * scale)
    fp8_meta["scaling_fwd"].scale_inv       [3]      value = code * scale_inv
    fp8_meta["scaling_bwd"]                 2 columns: gradient of the output, gradient of the input (not quantized)

Of an MLP the columns of fc1 come first, then those of fc2: 6 and 4; of several experts those of each in turn. Attention
by itself has three products in TE, of which nothing is quantized here: 9 and 6 columns of zeros and ones.

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
from octavo.recipes import Recipe
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
        """[L, operands]; where products have histories of their own lengths, as long as the longest."""
        histories = [column.history for column in self._columns()]
        longest = max(history.shape[0] for history in histories)
        return torch.stack([resized_history(history, longest) for history in histories], dim=1)

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


class UnquantizedView:
    """As `ScalingView`, of operands of which none is quantized.

    Args:
        operands: how many.
        length: of their histories.
    """

    def __init__(self, operands: int, length: int) -> None:
        self._operands, self._length = operands, length

    @property
    def amax_history(self) -> Tensor:
        """Zeros, [L, operands]."""
        return torch.zeros(self._length, self._operands)

    @property
    def scale(self) -> Tensor:
        """Ones, [operands]."""
        return torch.ones(self._operands)

    @property
    def scale_inv(self) -> Tensor:
        """Ones, [operands]."""
        return torch.ones(self._operands)


def _gathering(state: LayerState, operand: OperandState) -> _Column:
    history = _history(state, operand)
    history[0] = operand.gathered
    return _Column(history, operand.multiplier, operand.scale.clone())


def _folded(state: LayerState, operand: OperandState) -> _Column:
    recipe, update = state.recipe, state.update
    if recipe is None or update is None:
        return _gathering(state, operand)
    format_max = recipe.linear.grad_output.format.max
    history, scale = delayed_update(
        _history(state, operand)[None],
        operand.scale[None],
        operand.gathered[None],
        (format_max, format_max),
        1,
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
    recipe = next((state.recipe for state in states if state.recipe is not None), None)
    return {
        "scaling_fwd": ScalingView(states, forward=True),
        "scaling_bwd": ScalingView(states, forward=False),
        "recipe": None if recipe is None else given_recipe(recipe),
        "num_gemms": len(states),
    }


def unquantized_fp8_meta(num_gemms: int, recipe: Recipe | None) -> dict[str, Any]:
    """As `fp8_meta`, of a layer with so many products in high precision, which last ran where `recipe` was in force."""
    length = 1 if recipe is None or recipe.delayed is None else recipe.delayed.amax_history_len
    return {
        "scaling_fwd": UnquantizedView(3 * num_gemms, length),
        "scaling_bwd": UnquantizedView(2 * num_gemms, length),
        "recipe": None if recipe is None else given_recipe(recipe),
        "num_gemms": num_gemms,
    }
