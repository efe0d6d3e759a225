"""PairedQuantizer: an operand whose two uses have specs of their own."""

from __future__ import annotations

from torch import Tensor

from octavo.tensor.quantizer import Operand, StatelessQuantizer


class PairedQuantizer:
    """Row-wise codes of one quantizer, column-wise codes of another: an operand enters two products, each by a layout.

    Price: two casts, each with a read of its own, where one spec has both layouts of one read.

    Args:
        rowwise: makes `codes`, for fprop, or of a gradient for dgrad.
        columnwise: makes `codes_t`, for the other product.
    """

    def __init__(self, rowwise: StatelessQuantizer, columnwise: StatelessQuantizer) -> None:
        self.rowwise = rowwise
        self.columnwise = columnwise
        self._origin = (rowwise.spec, columnwise.spec)

    def origin(self) -> tuple[object, ...] | None:
        """As `StatelessQuantizer.origin`."""
        return self._origin

    def note(self, operand: Operand) -> None:
        """As `StatelessQuantizer.note`."""

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K], each layout by its own quantizer."""
        if not columnwise:
            return self.rowwise(x, rowwise, False, column_sum)
        if not rowwise:
            return self.columnwise(x, False, True, column_sum)
        codes, scale, *_, sums = self.rowwise(x, True, False, column_sum)
        return Operand(codes, scale, *self.columnwise(x, False, True).column_wise, sums)

    def again(self, x: Tensor, scale: Tensor, after: Tensor) -> Operand:
        """As `StatelessQuantizer.again`."""
        return self.columnwise.again(x, scale, after)
