"""Cross-entropy of a linear layer's output that never exists as a whole: chunk by chunk of the tokens.

    x = h w^T + b                       [C, V] a chunk of C tokens at a time      fprop
    loss_m, d = dloss_m/dx              [C], [C, V] over x                        `octavo.kernels.cross_entropy`
    dh = d w, dw += d^T h, db += sum d  [C, K], [V, K], [V]                       dgrad, wgrad, dbias

All gradients are there when the forward ends, and nothing of the size [M, V] ever was. What the backward adds is the
gradient g of the loss, which is known only then: a product with a number. So d goes into its products without g and
without the 1 / count of a mean: in [-1, 1], from which alone its FP8 scale comes, whatever a loss scaler does. g and
1 / count multiply dh and dw in float32 at the end. (A chunk's dw is rounded to bfloat16 if that is the weight's dtype,
else to float32; so is their sum, which is taken in float32; so, to its own dtype, is a gradient at the end.)

The rows of a loss that is not reduced have gradients of their own: with reduction "none", and on request, x is made a
second time in the backward, chunk by chunk from what was kept of h. There d is multiplied by g_m over the largest |g|,
so that it lies in [-1, 1] too, and that largest is what multiplies at the end.

Each chunk is an operand of its own: an amax is that of a chunk, or gathered from all of them. Output and gradients are
those of `octavo.functional.linear` and `octavo.functional.cross_entropy` on each chunk.

Kept for the backward, in bytes: of dh 2 a token and feature in bf16, of dw 2 an element in bf16 (4 in float32 and
float16). Where x is made again instead: of h the codes in both layouts, in high precision h itself; the codes of w.
While it runs: a chunk of x, and of d the codes in both layouts; dw in float32 and a chunk of it, if there are several.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.functional.cross_entropy import (
    Reduction,
    check_loss,
    check_targets,
    count_of,
    gradient_of_rows,
    reduced,
    refuse_second_derivative_of_loss,
)
from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.head_products import (
    NOTHING,
    Gradients,
    Head,
    LinearLoss,
    Part,
    head_of,
    logits_of,
    part_of,
    products_of,
)
from octavo.functional.products import Needs
from octavo.functional.shared_input import as_rows
from octavo.kernels.cross_entropy import (
    LOGIT_DTYPES,
    LossRule,
    cross_entropy,
    cross_entropy_gradient,
    cross_entropy_with_gradient,
)
from octavo.runtime import LinearPlan
from octavo.tensor import Operand

# A chunk's product with its inputs then takes about as long, in FP8 on Hopper, as adding it to dw.
DEFAULT_CHUNK = 2048


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
    chunk_tokens: int = DEFAULT_CHUNK,
    recompute: bool = False,
    plan: LinearPlan | None = None,
    cached_weight: Operand | None = None,
) -> Tensor:
    """Cross-entropy of `hidden weight^T + bias`, without these logits in memory. The loss is float32, [] or [...].

    Args:
        hidden: [..., K] of float32, bfloat16 or float16.
        weight: [V, K]; in products of high precision it takes the dtype of `hidden`, or of torch.autocast.
        targets: [...], as of `octavo.cross_entropy`.
        bias: [V] or None.
        ignore_index, label_smoothing, reduction, z_loss: as of `octavo.cross_entropy`.
        chunk_tokens: how many tokens' logits exist at a time. Compiled code unrolls the chunks: it is made anew for
            each number of tokens above this.
        recompute: logits are made again in the backward, a product more: the gradients, that of the weight above all,
            then take no memory from the forward to the backward. With reduction "none" it is always so.
        plan: quantizers and precision of each product, as `octavo.LMHead` makes it; None: no FP8.
        cached_weight: codes of the weight made before, in the layouts that are needed.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit; on a CPU also a target that is no class.
    """
    rule = LossRule(ignore_index, label_smoothing, z_loss)
    _check(hidden, weight, bias, chunk_tokens)
    check_loss(rule, reduction)
    check_targets(targets, hidden, "hidden")
    setup = LinearLoss(rule, reduction, chunk_tokens, recompute, _product_dtype(hidden), plan)
    # The dtype of the products is decided: autocast would round a float32 sum of theirs.
    with torch.autocast(hidden.device.type, enabled=False):
        if torch.is_grad_enabled():
            loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, setup, cached_weight)
            return loss
        refuse_tangents(hidden, weight, bias)
        rows, flat, none = as_rows(hidden), targets.reshape(-1), Needs(False, False, False)
        losses, *_ = _losses(rows, flat, head_of(weight, bias, setup, none, cached_weight), none, setup)
    return reduced(losses, count_of(targets, ignore_index, reduction), reduction, targets.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        setup: LinearLoss,
        cached_weight: Operand | None,
    ) -> Tensor:
        needs, rows, flat = Needs(*ctx.needs_input_grad[:3]), as_rows(hidden), targets.reshape(-1)
        # 1. What all chunks share.
        head = head_of(weight, bias, setup, needs, cached_weight)
        total = count_of(targets, setup.rule.ignore_index, setup.reduction)
        ctx.setup, ctx.shape, ctx.extents = setup, hidden.shape, weight.shape
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        # 2. Chunk by chunk, and what the backward needs: the gradients, or what they are made of.
        if any(needs) and not setup.in_backward:
            losses, *made = _losses_and_gradients(rows, flat, head, needs, setup, weight.dtype)
            ctx.save_for_backward(total, *made)
        else:
            losses, lse, parts = _losses(rows, flat, head, needs, setup)
            operand = head.operand or NOTHING
            kept = [tensor for part in parts for tensor in (*(part.operand or NOTHING)[:4], part.rows)]
            ctx.save_for_backward(total, flat, lse, *operand[:4], head.high, head.bias, *kept)
        return reduced(losses, total, setup.reduction, targets.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative_of_loss()
        needs, setup = Needs(*ctx.needs_input_grad[:3]), ctx.setup
        total, *saved = ctx.saved_tensors
        if not any(needs):
            return (None,) * 6
        # 1. The gradients of the rows' losses, times one factor.
        if not setup.in_backward:
            factor, made = gradient_of_rows(dloss, total), tuple(saved)
        else:
            factor, weights = _factor(gradient_of_rows(dloss, total))
            flat, lse, *rest = saved
            head = Head(Operand(*rest[:4]), rest[4], rest[5], *ctx.extents)
            parts = [Part(Operand(*rest[at : at + 4]), rest[at + 4]) for at in range(6, len(rest), 5)]
            # A backward inside of torch.autocast runs under it.
            with torch.autocast(dloss.device.type, enabled=False):
                made = _gradients_again(parts, flat, lse, weights, head, needs, setup, ctx.dtypes[1])
        # 2. Those of the inputs.
        dh, dw, db = (_times(one, factor, dtype) for one, dtype in zip(made, ctx.dtypes, strict=True))
        return None if dh is None else dh.reshape(ctx.shape), dw, db, None, None, None


def _losses(
    rows: Tensor, targets: Tensor, head: Head, needs: Needs, setup: LinearLoss
) -> tuple[Tensor, Tensor, list[Part]]:
    """(loss [M], lse [M], chunks of h in what a backward will want)."""
    losses, lses, parts = [], [], []
    for first, last in _spans(rows.shape[0], setup.chunk_tokens):
        part = part_of(rows[first:last], needs, setup)
        loss, lse = cross_entropy(logits_of(part, last - first, head, setup), targets[first:last], setup.rule)
        losses.append(loss)
        lses.append(lse)
        parts.append(part)
    return _joined(losses), _joined(lses), parts if any(needs) else []


def _losses_and_gradients(
    rows: Tensor, targets: Tensor, head: Head, needs: Needs, setup: LinearLoss, weight_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(loss [M], dh [M, K], dw [V, K], db [V]), the gradients those of the sum of the losses."""
    losses, dhs, dw, db, spans = [], [], None, None, _spans(rows.shape[0], setup.chunk_tokens)
    for first, last in spans:
        loss, made = _chunk(rows[first:last], targets[first:last], head, needs, setup, weight_dtype)
        losses.append(loss)
        dhs.append(made[0])
        dw, db = (_added(*pair, last == spans[-1][1]) for pair in ((dw, made[1]), (db, made[2])))
        # A name would hold it while the next one is made.
        del made
    return _joined(losses), _joined_if_there(dhs), dw, db


def _chunk(
    rows: Tensor, targets: Tensor, head: Head, needs: Needs, setup: LinearLoss, weight_dtype: torch.dtype
) -> tuple[Tensor, Gradients]:
    """(loss [C], gradients), made so that logits are gone when the next ones are made."""
    # 1. Logits and losses; the logits become their gradient.  [C, K] @ [K, V] -> [C, V]
    part = part_of(rows, needs, setup)
    d = logits_of(part, rows.shape[0], head, setup)
    loss, _ = cross_entropy_with_gradient(d, targets, setup.rule)
    # 2. What they give to the inputs.
    return loss, products_of(d, part, head, needs, setup, weight_dtype)


def _gradients_again(
    parts: list[Part],
    targets: Tensor,
    lse: Tensor,
    weights: Tensor | None,
    head: Head,
    needs: Needs,
    setup: LinearLoss,
    weight_dtype: torch.dtype,
) -> Gradients:
    """(dh, dw, db) of the sum of the losses times `weights` [M], or 1, from what the forward has kept."""
    dhs, dw, db, spans = [], None, None, _spans(targets.shape[0], setup.chunk_tokens)
    for (first, last), part in zip(spans, parts, strict=True):
        of_rows = targets[first:last], lse[first:last], None if weights is None else weights[first:last]
        made = _chunk_again(part, of_rows, head, needs, setup, weight_dtype)
        dhs.append(made[0])
        dw, db = (_added(*pair, last == spans[-1][1]) for pair in ((dw, made[1]), (db, made[2])))
        del made
    return _joined_if_there(dhs), dw, db


def _chunk_again(
    part: Part,
    of_rows: tuple[Tensor, Tensor, Tensor | None],
    head: Head,
    needs: Needs,
    setup: LinearLoss,
    weight_dtype: torch.dtype,
) -> Gradients:
    """The gradients of a chunk; `of_rows`: target, log sum exp and weight of each."""
    targets, lse, factor = of_rows
    logits = logits_of(part, targets.shape[0], head, setup)
    d = cross_entropy_gradient(logits, targets, lse, factor, setup.rule, in_place=True)
    return products_of(d, part, head, needs, setup, weight_dtype)


def _added(total: Tensor | None, part: Tensor | None, ends: bool) -> Tensor | None:
    """The sum so far with one part more, in float32; with the last part it is rounded to the dtype of the parts."""
    if total is None or part is None:
        return part
    return part.add_(total) if ends else total.float().add_(part)


def _times(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """A gradient times one float32 number [], in float32, rounded to a dtype; a new tensor."""
    if gradient is None or dtype is None:
        return None
    if torch.compiler.is_compiling():
        return (gradient.float() * factor).to(dtype)
    # A number of no dimension would be rounded to the dtype of the gradient first; so would a float32 copy be made.
    return torch.mul(gradient, factor.reshape(1), out=torch.empty_like(gradient, dtype=dtype))


def _factor(rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the rows' losses, [M] or one [], as a number [] times weights from -1 to 1 [M], or 1.

    The weight of one that is not finite is itself, so that it spoils its own row of dh and no other.
    """
    if rows.dim() == 0 or rows.numel() == 0:
        return rows.reshape(()) if rows.numel() else rows.new_ones(()), None
    sizes = rows.abs()
    largest = torch.where(sizes < float("inf"), sizes, 0.0).amax()
    # (Where all others are 0, they are 0 times 1.)
    largest = torch.where(largest > 0, largest, 1.0)
    return largest, rows / largest


def _spans(num_tokens: int, chunk: int) -> list[tuple[int, int]]:
    """Where each chunk begins and ends; one chunk, if only an empty one."""
    # Asked apart, so that compiled code with one chunk goes on serving any number of tokens.
    if num_tokens <= chunk:
        return [(0, num_tokens)]
    return [(first, min(first + chunk, num_tokens)) for first in range(0, num_tokens, chunk)]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined_if_there(parts: list[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return _joined(there) if there else None


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """That of torch.autocast if it is on, else that of `hidden`."""
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    if dtype not in LOGIT_DTYPES:
        raise ValueError(f"hidden is {dtype}: expected float32, bfloat16 or float16")
    return dtype


def _check(hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_tokens: int) -> None:
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}: expected [..., K] and [V, K]"
        )
    if hidden.device != weight.device or (bias is not None and bias.device != hidden.device):
        there = f"weight on {weight.device}" + ("" if bias is None else f", bias on {bias.device}")
        raise ValueError(
            f"hidden is on {hidden.device} and {there}: all belong on one device; move hidden or the head with .to()"
            " (a head on meta has no values: .to_empty(device=...), then load or initialise it)"
        )
    if hidden.is_meta:
        raise ValueError(
            "hidden and weight are on meta, where there are no values to take a loss of: move the head with"
            " .to_empty(device=...), then load or initialise it"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: expected one number a class, ({weight.shape[0]},)")
    if type(chunk_tokens) is not int or chunk_tokens < 1:
        raise ValueError(f"chunk_tokens is {chunk_tokens!r}: expected an integer of 1 or more, such as {DEFAULT_CHUNK}")
