"""Forward and backward of each layer as functions of plain tensors."""

from octavo.functional.linear import linear, quantize_weight

__all__ = ["linear", "quantize_weight"]
