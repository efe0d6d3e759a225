"""The products of a language-model head, of one chunk of tokens at a time, in FP8 or in high precision.

    x  [C, V] = h [C, K] @ w [V, K]^T + b      fprop
    dh [C, K] = d [C, V] @ w [V, K]            dgrad
    dw [V, K] = d [C, V]^T @ h [C, K]          wgrad
    db [V]    = sum of d over C, in float32

In FP8 those of `octavo.functional.products`; without, torch's, in the dtype of the logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.functional.cross_entropy import Reduction
from octavo.functional.linear import quantize_weight
from octavo.functional.products import Extents, Kept, Needs, count, gradients, in_high_precision, quantized_gradient
from octavo.kernels import padded, scaled_mm
from octavo.kernels.cross_entropy import LossRule
from octavo.runtime import LinearPlan
from octavo.tensor import Operand


class LinearLoss(NamedTuple):
    """What one call runs with.

    Attributes:
        rule, reduction: the loss.
        chunk_tokens: how many tokens' logits exist at a time.
        recompute: logits are made again in the backward, for the gradients.
        dtype: of the products.
        plan: quantizers and precision of each product; None runs all in high precision.
    """

    rule: LossRule
    reduction: Reduction
    chunk_tokens: int
    recompute: bool
    dtype: torch.dtype
    plan: LinearPlan | None

    @property
    def in_backward(self) -> bool:
        """True if the gradients are computed in the backward."""
        return self.recompute or self.reduction == "none"


class Head(NamedTuple):
    """The weight [V, K] as products take it: its codes, or itself in their dtype; the bias [V]."""

    operand: Operand | None
    high: Tensor | None
    bias: Tensor | None
    num_classes: int
    num_in: int


class Part(NamedTuple):
    """A chunk of h [C, K]: its codes, itself where a product takes it."""

    operand: Operand | None
    rows: Tensor | None


# dh [C, K], dw [V, K], db [V].
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


NOTHING = Operand(None, None, None, None)


def head_of(
    weight: Tensor, bias: Tensor | None, setup: LinearLoss, needs: Needs, cached_weight: Operand | None
) -> Head:
    """The weight and the bias, made once for all chunks: in the layouts and precisions that somebody needs."""
    plan, operand, high = setup.plan, None, None
    if plan is not None:
        operand = cached_weight or quantize_weight(weight, plan, True, needs.dx and plan.dgrad_fp8)
    if plan is None or (needs.dx and not plan.dgrad_fp8):
        high = in_high_precision(weight, setup.dtype)
    return Head(operand, high, None if bias is None else bias.to(setup.dtype), *weight.shape)


def part_of(rows: Tensor, needs: Needs, setup: LinearLoss) -> Part:
    """A chunk of h [C, K] of any dtype, in what its products take."""
    plan, rows = setup.plan, rows.to(setup.dtype)
    if plan is None:
        return Part(None, rows)
    operand = plan.input(rows, True, needs.dw and plan.wgrad_fp8)
    return Part(operand, rows if needs.dw and not plan.wgrad_fp8 else None)


def logits_of(part: Part, tokens: int, head: Head, setup: LinearLoss) -> Tensor:
    """[C, K] @ [K, V] -> [C, V], rows of which may have gaps between them."""
    plan, bias = setup.plan, head.bias
    if plan is None:
        assert part.rows is not None, "a product in high precision takes the rows themselves"
        assert head.high is not None, "and the weight itself"
        return torch.nn.functional.linear(part.rows, head.high, bias)
    assert part.operand is not None, "an FP8 product takes codes"
    assert head.operand is not None, "of both operands"
    codes, scale = part.operand.row_wise
    w_codes, w_scale = head.operand.row_wise
    count(plan, "fprop", codes, w_codes, scale)
    missing = padded(head.num_classes) - head.num_classes
    if bias is not None and missing:
        bias = torch.nn.functional.pad(bias, (0, missing))
    logits = scaled_mm(codes, w_codes, scale, w_scale, bias, setup.dtype, plan.accumulate.fprop)
    return logits[:tokens, : head.num_classes]


def products_of(
    d: Tensor, part: Part, head: Head, needs: Needs, setup: LinearLoss, weight_dtype: torch.dtype
) -> Gradients:
    """What the gradient d [C, V] of a chunk of logits gives to h, w and b."""
    plan, dtype = setup.plan, dtype_of_sums(weight_dtype)
    if plan is None:
        assert head.high is not None, "a product in high precision takes the weight itself"
        assert part.rows is not None, "and the rows themselves"
        return (
            d @ head.high if needs.dx else None,  # [C, V] @ [V, K] -> [C, K]
            _product(d.t(), part.rows, dtype) if needs.dw else None,  # [V, C] @ [C, K] -> [V, K]
            d.sum(0, dtype=torch.float32) if needs.db else None,
        )
    x, w = part.operand or NOTHING, head.operand or NOTHING
    kept_x = Kept(x.codes_t, x.scale_t) if plan.wgrad_fp8 else Kept(high=part.rows)
    kept_w = Kept(w.codes_t, w.scale_t) if plan.dgrad_fp8 else Kept(high=head.high)
    extents = Extents(d.shape[0], head.num_classes, head.num_in, setup.dtype, dtype)
    return gradients(quantized_gradient(d, plan, needs), kept_x, kept_w, needs, extents, plan)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """[V, C] @ [C, K] -> [V, K] of `dtype`: the operands', or float32, in which the sum is taken in any case."""
    if a.dtype == dtype:
        return a @ b
    return (
        torch.mm(a, b, out_dtype=dtype) if a.is_cuda and dtype == torch.float32 else (a.float() @ b.float()).to(dtype)
    )


def dtype_of_sums(weight_dtype: torch.dtype) -> torch.dtype:
    """Of a chunk's dw; float16 might not hold what has not been divided by the number of tokens yet."""
    return weight_dtype if weight_dtype == torch.bfloat16 else torch.float32
