"""Operands of attention as FP8 would give them: emulated, on every device.

    value -> dequantize(quantize(value, E4M3, a scale for 128 features of a token's head))

The products and the softmax that follow run in high precision on what the codes stand for; the probabilities are not
cast. So the numbers show what FP8 queries, keys and values cost in accuracy; nothing is gained in speed. The gradient
passes straight through, and is that of the decoded operands.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.formats import E4M3
from octavo.tensor.quantize import quantize

ATTENTION_BLOCK = (1, 128)


def as_fp8_operand(x: Tensor) -> Tensor:
    """x [..., D] as E4M3 codes hold it, of x's dtype; the power-of-two scales are those of block scaling."""
    result: Tensor = _AsCodes.apply(x)
    return result


class _AsCodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return quantize(x, E4M3, ATTENTION_BLOCK, power_of_two=True).dequantize(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
