"""delayed_update in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.scaling import AmaxComputeAlgo, updated_history


def delayed_update_reference(
    history: Tensor,
    scale: Tensor,
    last: Tensor,
    maxima: tuple[float, float],
    first: int,
    margin: int,
    algorithm: AmaxComputeAlgo,
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.delayed_update.delayed_update`; any device."""
    if maxima[0] == maxima[1] or first in (0, history.shape[0]):
        # All are of one format: window, amax, scale, roll.
        format_max = maxima[0 if first else 1]
        return updated_history(history, scale, last, format_max=format_max, margin=margin, algorithm=algorithm)
    # 1. The operands of each format: [first, L] and [n - first, L], [first] and [n - first].
    of_each = zip(*(x.tensor_split([first]) for x in (history, scale, last)), maxima, strict=True)
    # 2. Window, amax, scale, roll of each.
    updated = [
        updated_history(*given, format_max=format_max, margin=margin, algorithm=algorithm)
        for *given, format_max in of_each
    ]
    # 3. Together again, [n, L] and [n].
    histories, scales = zip(*updated, strict=True)
    return torch.cat(histories), torch.cat(scales)
