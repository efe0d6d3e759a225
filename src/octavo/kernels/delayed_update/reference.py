"""delayed_update in plain PyTorch: the definition, and for now the only implementation."""

from __future__ import annotations

from torch import Tensor

from octavo.scaling import AmaxComputeAlgo, scale_from_multiplier, updated_history


def delayed_update_reference(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    format_max: float,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `octavo.kernels.delayed_update.delayed_update`; any device."""
    # 1. Window, amax, scale, roll.
    new_history, new_scale = updated_history(
        history, scale, last, format_max=format_max, margin=margin, algorithm=algorithm
    )
    # 2. What the next cast multiplies by.
    return new_history, new_scale, scale_from_multiplier(new_scale)
