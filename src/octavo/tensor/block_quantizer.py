"""BlockQuantizer: scales by block, measured from the very matrix that is cast, in the one read that casts it."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels import block_cast
from octavo.tensor.quantizer import Operand, StatelessQuantizer


class BlockQuantizer(StatelessQuantizer):
    """Current scaling by blocks of 1x128, 128x128 or MX, along the rows of each layout.

    Its operands have their K padded to whole blocks, and scales as `octavo.kernels.block_cast.layout` has them.

    Args:
        spec: of granularity BLOCK_1X128, BLOCK_128X128 or MX.
    """

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K] under scales of its blocks."""
        spec = self.spec
        return block_cast(
            x,
            spec.format,
            spec.granularity,
            spec.rule,
            rowwise,
            columnwise,
            inf_to_nan=spec.inf_to_nan,
            column_sum=column_sum,
        )
