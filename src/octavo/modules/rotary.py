"""octavo.RotaryPositionEmbedding: the angles by which attention turns its queries and keys.

    angles [S, 1, 1, R] float32 = position * frequencies, see `octavo.functional.rotary`

The layer has no parameters: a model calls it once a forward, and hands the angles to all of its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.functional.rotary import Llama3Scaling, RotaryScaling, rotary_angles, rotary_frequencies

SCALINGS = ("none", "linear", "ntk", "llama3")


class RotaryPositionEmbedding(nn.Module):
    """Angles of rotary position embeddings.

    Args:
        dim: features of a head.
        rotary_percent: the share of them that is turned, from the first one on.
        interleaved: pairs are neighbouring features; else the first half is paired with the second.
        rotary_base: of the geometric row of frequencies.
        scaling: "none", "linear", "ntk" or "llama3".
        factor: how many times longer than in training sequences may be.
        llama3: wavelengths of scaling "llama3".

    Raises:
        ValueError: an odd number of features to turn, an unknown scaling, or a factor that would change nothing.
    """

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        *,
        interleaved: bool = False,
        rotary_base: float = 10000.0,
        scaling: RotaryScaling = "none",
        factor: float = 1.0,
        llama3: Llama3Scaling | None = None,
    ) -> None:
        super().__init__()
        features = int(dim * rotary_percent)
        if not 0 < rotary_percent <= 1 or features < 2 or features % 2:
            raise ValueError(
                f"dim is {dim} and rotary_percent {rotary_percent}: {features} features would be turned, and it must be"
                " an even number, at least 2"
            )
        if scaling not in SCALINGS:
            raise ValueError(f"scaling is {scaling!r}: expected one of {', '.join(SCALINGS)}")
        if (scaling == "none") != (factor == 1.0) or factor < 1:
            raise ValueError(
                f"scaling is {scaling!r} and factor {factor}: a factor above 1 goes with 'linear', 'ntk' or 'llama3',"
                " and 1 with 'none'"
            )
        if llama3 is not None and scaling != "llama3":
            raise ValueError(f"llama3 is given with scaling={scaling!r}: it goes with 'llama3'")
        self.interleaved, self.rotary_base, self.scaling, self.factor = interleaved, rotary_base, scaling, factor
        self.features = features
        # As a buffer it would follow .to(bfloat16), and lose what positions beyond 256 need.
        self._made_from = (features, rotary_base, scaling, factor, llama3)

    def forward(self, max_seq_len: int, offset: int = 0, device: torch.device | str | None = None) -> Tensor:
        """[max_seq_len, 1, 1, R] float32.

        Args:
            max_seq_len: how many positions.
            offset: the first of them.
            device: where; the default device if None.
        """
        frequencies = rotary_frequencies(*self._made_from, device=None if device is None else torch.device(device))
        positions = torch.arange(offset, offset + max_seq_len, device=frequencies.device)
        return rotary_angles(frequencies, positions, self.interleaved)[:, None, None, :]

    def extra_repr(self) -> str:
        """What is turned, and how far."""
        shown = f"features={self.features}, rotary_base={self.rotary_base}, interleaved={self.interleaved}"
        return shown if self.scaling == "none" else f"{shown}, scaling={self.scaling}, factor={self.factor}"
