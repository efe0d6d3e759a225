"""BlockQuantizer: scales by block, measured from the very matrix that is cast, in the one read that casts it."""

from __future__ import annotations

from torch import Tensor

from octavo.kernels import block_cast
from octavo.kernels.block_cast import BlockCast, block_cast_pair
from octavo.scaling import MX
from octavo.tensor.quantizer import Operand, Quantizer, StatelessQuantizer


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


def casts_together(one: Quantizer, other: Quantizer) -> bool:
    """True of two that `cast_together` takes: by blocks of 128 and not of a gradient; what wraps one is none."""
    return all(
        type(quantizer) is BlockQuantizer and quantizer.spec.granularity is not MX and not quantizer.spec.inf_to_nan
        for quantizer in (one, other)
    )


def cast_together(
    input: BlockQuantizer,
    x: Tensor,
    columnwise: bool,
    weight: BlockQuantizer,
    w: Tensor,
    weight_columnwise: bool,
) -> tuple[Operand, Operand]:
    """Codes of x [M, K] and of w [N, K], row-wise and on request column-wise too: what each quantizer makes of its own.

    One launch where `octavo.kernels.block_cast.block_cast_pair` makes it so.
    """
    one, other = input.spec, weight.spec
    return block_cast_pair(
        BlockCast(x, one.format, one.granularity, one.rule, True, columnwise),
        BlockCast(w, other.format, other.granularity, other.rule, True, weight_columnwise),
    )
