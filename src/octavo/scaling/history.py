"""Delayed scaling: a scale from the amaxes of the past, so that one pass over memory is enough.

Per operand there is a window of L amaxes. Position 0 is where the amax of the current step is gathered (by max, if the
operand is cast more than once); positions 1 … L-1 hold the past, oldest first. One update, at the end of a step:

    last = gathered amax
    last is 0 (not used, or all zero)       -> nothing changes
    last is inf or NaN                      -> nothing changes: it is not stored, lest it freeze the scale
    A = max(last and the past) | last | the user's function of the window with last at position 0
    scale = A * 2^margin / M                rounded to nearest in float32, unless A is 0, inf or NaN: then kept
    roll: the oldest leaves, `last` enters at the end, position 0 becomes 0

So an amax takes part in exactly L updates. All of it works on many operands at once and decides on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

AmaxComputeAlgo = Literal["max", "most_recent"] | Callable[[Tensor], Tensor]


def updated_history(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    *,
    format_max: float,
    margin: int = 0,
    algorithm: AmaxComputeAlgo = "max",
) -> tuple[Tensor, Tensor]:
    """One update of n operands -> (history [n, L], scale [n]), both new tensors.

    Args:
        history: float32 [n, L]; position 0 is ignored.
        scale: float32 [n].
        last: float32 [n], the gathered amaxes.
        format_max: M of the operands' format.
        margin: the scale leaves 2^margin of headroom.
        algorithm: "max", "most_recent", or a function of one window [L] (last at position 0) that returns a scalar
            tensor.
    """
    # 1. The window that the rule sees: the past, and `last` at position 0.
    window = torch.cat([last.unsqueeze(1), history[:, 1:]], dim=1)
    # 2. The amax to provide for.
    if algorithm == "max":
        amax = window.amax(dim=1)
    elif algorithm == "most_recent":
        amax = last
    else:
        amax = torch.stack([_one_amax(algorithm(row)) for row in window])
    # 3. Its scale.
    fresh = amax * 2.0**margin / torch.full_like(amax, format_max)
    fresh = fresh.clamp(SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER)
    takes_part = last.isfinite() & (last > 0)
    usable = takes_part & amax.isfinite() & (amax > 0)
    new_scale = torch.where(usable, fresh, scale)
    # 4. Roll.
    rolled = torch.cat([torch.zeros_like(last).unsqueeze(1), window[:, 2:], last.unsqueeze(1)], dim=1)
    rolled = rolled if history.shape[1] > 1 else torch.zeros_like(history)
    cleared = torch.cat([torch.zeros_like(last).unsqueeze(1), history[:, 1:]], dim=1)
    return torch.where(takes_part.unsqueeze(1), rolled, cleared), new_scale


def _one_amax(chosen: Any) -> Tensor:
    if not isinstance(chosen, Tensor) or chosen.numel() != 1:
        shape = tuple(chosen.shape) if isinstance(chosen, Tensor) else type(chosen).__name__
        raise ValueError(f"amax_compute_algo returned {shape}: it must return a tensor of one element")
    amax: Tensor = chosen.reshape(()).to(torch.float32)
    return amax


def resized_history(history: Tensor, length: int) -> Tensor:
    """A history [L] as one of `length`, keeping position 0 and the newest of the past."""
    if history.shape[0] == length:
        return history
    past = history[1:][-(length - 1) :] if length > 1 else history[:0]
    empty = history.new_zeros(length - 1 - past.shape[0])
    return torch.cat([history[:1] if history.shape[0] else history.new_zeros(1), empty, past])
