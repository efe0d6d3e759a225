"""`te.Fp8Padding` and `te.Fp8Unpadding`: Octavo's with Transformer Engine's signature.

Source: transformer_engine/pytorch/module/fp8_padding.py of Transformer Engine 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.kernels import ALIGNMENT
from octavo.modules import Padding, Unpadding


class Fp8Padding(Padding):
    """Fills up the rows of each group with zeros.

    Args:
        num_gemms: how many groups.
        align_size: to a multiple of it; 16 if None.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__(num_gemms, ALIGNMENT if align_size is None else align_size)

    def forward(self, inp: Tensor, m_splits: list[int]) -> Any:  # type: ignore[override]
        """(x [M', H], the sizes of its groups).

        Args:
            inp: [M, H].
            m_splits: rows of each group.
        """
        return super().forward(inp, m_splits)


class Fp8Unpadding(Unpadding):
    """Takes out what `te.Fp8Padding` filled up.

    Args:
        num_gemms, align_size: as of `te.Fp8Padding`.
    """

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__(num_gemms, ALIGNMENT if align_size is None else align_size)

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        """x [M, H] without the padding.

        Args:
            inp: [M', H].
            m_splits: rows of each group, before they were padded.
        """
        return super().forward(inp, m_splits)


__all__ = ["Fp8Padding", "Fp8Unpadding"]
