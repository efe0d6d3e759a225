"""FixedProduct: a linear layer whose weight is FP8 for good, and what others need to compute its product for it.

An MLP that runs as one, or a normalisation that casts its output ahead, takes plan, weight and bias from here, as it
takes those of an `FP8LinearMixin` from its recipe and state. There is no training: the output refuses gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.functional.forward_mode import refuse_tangents
from octavo.runtime import LinearPlan
from octavo.tensor import Operand


class LayerProduct(NamedTuple):
    """What one call of a linear layer computes its product with.

    Attributes:
        plan: quantizers and precision.
        weight: [N, K]; codes of a weight that is FP8 for good.
        bias: [N] or None.
        operand: codes of the weight made before, or None.
    """

    plan: LinearPlan
    weight: Tensor
    bias: Tensor | None
    operand: Operand | None


class FixedWeights(nn.Module):
    """A layer whose weights are FP8 for good: there are codes alone, and no way back from them."""


class FixedProduct(FixedWeights):
    """A linear layer that does nothing but a product with a weight whose codes are given."""

    @property
    @abstractmethod
    def is_plain(self) -> bool:
        """True while its forward is that of its class: others may compute the product in its place."""

    @abstractmethod
    def product(self, dtype: torch.dtype) -> LayerProduct | None:
        """What a call on an input of this dtype computes; None if only the layer itself can compute it."""


def refusing_gradient(input: Tensor, out: Tensor) -> Tensor:
    """An output that says so when a gradient is asked of it, rather than be a constant without a word."""
    refuse_tangents(input)
    if torch.is_grad_enabled() and input.requires_grad and not torch.compiler.is_compiling():
        refused: Tensor = _NoGradient.apply(input, out)
        return refused
    return out


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, out: Tensor) -> Tensor:
        # Not known as a view of `out`, which could not be changed in place by what follows.
        same: Tensor = torch.ops.aten._unsafe_view.default(out, out.shape)
        return same

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        raise RuntimeError(
            "a frozen layer passes no gradient: train with octavo.convert, and freeze afterwards; or run it under"
            " torch.no_grad()"
        )
