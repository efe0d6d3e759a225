"""delayed_update in plain PyTorch: the definition."""

from __future__ import annotations

from torch import Tensor

from octavo.scaling import AmaxComputeAlgo, updated_history


def delayed_update_reference(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    format_max: float,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.delayed_update.delayed_update`; any device."""
    # Window, amax, scale, roll.
    return updated_history(history, scale, last, format_max=format_max, margin=margin, algorithm=algorithm)
