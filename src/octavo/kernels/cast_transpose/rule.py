"""ScaleRule: how a scale comes from an amax, as an argument of kernels and operators."""

from __future__ import annotations

from typing import NamedTuple

from octavo.scaling import ScaleRounding


class ScaleRule(NamedTuple):
    """multiplier = M / max(amax, epsilon); of MX blocks the power of two of `mx_scale`: `octavo.scaling.rules`.

    Attributes:
        epsilon_text: epsilon as `float.hex` gives it. (Of a number, torch.compile(dynamic=True) makes a symbol, which
            it then cannot take into the backward.)
        power_of_two: the multiplier is rounded down to a power of two.
        rounding: of the exponent of an MX scale, which the others leave alone and which leaves them alone.
    """

    epsilon_text: str = (0.0).hex()
    power_of_two: bool = False
    rounding: ScaleRounding = "up"

    @property
    def epsilon(self) -> float:
        """Amaxes below it count as it."""
        return float.fromhex(self.epsilon_text)
