"""scale_from_amax in plain PyTorch: the definition."""

from __future__ import annotations

from torch import Tensor

from octavo.formats import Format
from octavo.scaling import multiplier_from_amax, scale_from_multiplier


def scale_from_amax_reference(
    amax: Tensor, format: Format, epsilon: float = 0.0, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.scale_from_amax.scale_from_amax`; any device."""
    # 1. m = M / max(amax, epsilon), with its special cases.
    multiplier = multiplier_from_amax(amax, format, epsilon=epsilon, power_of_two=power_of_two)
    # 2. scale = 1 / m.
    return multiplier, scale_from_multiplier(multiplier)
