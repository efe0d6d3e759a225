"""Norm: which normalisation, as an argument of kernels and operators."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Norm(NamedTuple):
    """LayerNorm or RMSNorm of rows.

    Attributes:
        kind: "layer" or "rms".
        epsilon_text: epsilon as `float.hex` gives it; see `octavo.kernels.cast_transpose.rule.ScaleRule`.
        zero_centered: the weight is kept as its distance from 1, which is added in float32.
        through: what the float32 result is rounded to before it is cast, as a separate normalisation would have handed
            it on (under torch.autocast: bfloat16); None casts the float32 itself.
    """

    kind: str
    epsilon_text: str = (1e-5).hex()
    zero_centered: bool = False
    through: torch.dtype | None = None

    @property
    def epsilon(self) -> float:
        """What is added to the variance, or to the mean of squares."""
        return float.fromhex(self.epsilon_text)
