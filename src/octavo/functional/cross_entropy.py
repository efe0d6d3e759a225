"""Cross-entropy of logits that exist: loss and gradient in one read and one write of them each.

    loss_m = lse_m - (1 - e) x_mt - e/V sum_j x_mj + z lse_m^2        see `octavo.kernels.cross_entropy`
    loss   = loss_m                 [...]   reduction "none"
             sum of loss_m          []      "sum"
             sum of loss_m / count  []      "mean"; count of the rows whose target is not ignore_index, on the device

Kept for the backward: the logits and four bytes a row. The backward writes their gradient beside them, or over them.
`torch.nn.functional.cross_entropy` keeps log-probabilities instead, in float32 if they are to be as exact.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octavo.functional.forward_mode import refuse_tangents
from octavo.functional.shared_input import as_rows
from octavo.kernels.cross_entropy import LOGIT_DTYPES, LossRule, check_rule, cross_entropy_gradient
from octavo.kernels.cross_entropy import cross_entropy as loss_of_rows

_NO_TANGENT = "this cross-entropy has no forward-mode derivative: use torch.nn.functional.cross_entropy for it"

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


class _Setup(NamedTuple):
    rule: LossRule
    reduction: Reduction
    overwrite: bool


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    z_loss: float = 0.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """The loss in float32: [] of reduction "mean" and "sum", [...] of "none".

    A logit of -inf is a class ruled out. On a GPU a target that is no class gives NaN, in the loss and in the gradient
    of its row; on a CPU it is an error. A mean over no rows is NaN, and its gradient 0, as torch has it.

    Args:
        logits: [..., V], classes last, of float32, bfloat16 or float16. (torch's has them second.)
        targets: [...], classes from 0 to V - 1 or `ignore_index`, int64 or int32.
        ignore_index: rows of this target count for nothing.
        label_smoothing: this part of each target is spread evenly over all classes.
        reduction: "mean" over the rows that count, "sum", or "none".
        z_loss: times the square of log sum exp is added to each row's loss.
        overwrite_logits: the backward writes the gradient over the logits, which saves their size. Nobody may use them
            afterwards: autograd raises for whoever kept them. Compiled code decides on that by itself.

    Raises:
        ValueError: shapes, dtypes or numbers do not fit; on a CPU also a target that is no class. To overwrite would
            be to lose a leaf's values, such as a parameter's.
    """
    rule = LossRule(ignore_index, label_smoothing, z_loss)
    check_loss(rule, reduction)
    check_targets(targets, logits, "logits")
    if logits.dtype not in LOGIT_DTYPES:
        raise ValueError(
            f"logits are {logits.dtype}: expected float32, bfloat16 or float16; for others use"
            " torch.nn.functional.cross_entropy"
        )
    if overwrite_logits:
        _check_not_of_a_leaf(logits)
    if torch.is_grad_enabled():
        loss: Tensor = _CrossEntropy.apply(logits, targets, _Setup(rule, reduction, overwrite_logits))
        return loss
    refuse_tangents(logits, why=_NO_TANGENT)
    losses, _ = loss_of_rows(as_rows(logits), targets.reshape(-1), rule)
    return reduced(losses, count_of(targets, ignore_index, reduction), reduction, targets.shape)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, setup: _Setup) -> Tensor:
        # 1. The loss of each row.  [..., V] -> [M]
        losses, lse = loss_of_rows(as_rows(logits), targets.reshape(-1), setup.rule)
        # 2. Together.
        count = count_of(targets, setup.rule.ignore_index, setup.reduction)
        # 3. What the backward needs.
        ctx.save_for_backward(logits, targets, lse, count)
        ctx.setup = setup
        return reduced(losses, count, setup.reduction, targets.shape)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative_of_loss()
        logits, targets, lse, count = ctx.saved_tensors
        setup: _Setup = ctx.setup
        if not ctx.needs_input_grad[0]:
            return None, None, None
        # 1. The gradient of each row's loss.  [M], or [] where all have the same
        factor = gradient_of_rows(dloss, count)
        # 2. That of the logits.  [M, V]
        overwrite = setup.overwrite and not torch.compiler.is_compiling()
        rows = as_rows(logits)
        dx = cross_entropy_gradient(rows, targets.reshape(-1), lse, factor, setup.rule, in_place=overwrite)
        if overwrite:
            # A kernel's writes are none that autograd knows of.
            torch.autograd.graph.increment_version(logits)
            dx = dx.detach()
        return dx.reshape(logits.shape), None, None


def _check_not_of_a_leaf(logits: Tensor) -> None:
    """Raise ValueError if the values of a leaf that is trained would be lost."""
    # (Of a view in compiled code nobody knows whose it is; nothing is overwritten there.)
    base = None if torch.compiler.is_compiling() else logits._base
    for owner, what in ((logits, "a leaf"), (base, "a leaf, of which logits are a view")):
        if owner is not None and owner.is_leaf and owner.requires_grad:
            raise ValueError(
                f"overwrite_logits would write a gradient over the values of {what}, {type(owner).__name__} of shape"
                f" {tuple(owner.shape)}: leave it out, or give logits.clone()"
            )


def check_loss(rule: LossRule, reduction: str) -> None:
    """Raise ValueError unless the loss is one that there is."""
    check_rule(rule)
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}: expected 'mean', 'sum' or 'none'")


def check_targets(targets: Tensor, rows: Tensor, name: str) -> None:
    """Raise ValueError unless there is one target for each row of a tensor [..., N], called so."""
    if rows.dim() == 0 or targets.shape != rows.shape[:-1]:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and {name} {tuple(rows.shape)}: one target belongs to each row,"
            f" {tuple(rows.shape[:-1])}; classes are the last dimension of logits"
        )


def count_of(targets: Tensor, ignore_index: int, reduction: Reduction) -> Tensor | None:
    """[] float32, how many rows a mean is over; None of no mean. It stays on the device."""
    return (targets != ignore_index).sum().float() if reduction == "mean" else None


def reduced(losses: Tensor, count: Tensor | None, reduction: Reduction, lead: torch.Size) -> Tensor:
    """The losses of rows [M] as a reduction has them."""
    if reduction == "none":
        return losses.reshape(lead)
    total = losses.sum()
    return total if count is None else total / count


def gradient_of_rows(dloss: Tensor, count: Tensor | None) -> Tensor:
    """What a gradient of the loss, [...] or [], makes of each row's: [M] or [], float32."""
    if dloss.dim():
        return dloss.reshape(-1).float()
    # A mean over no rows has no gradient.
    return dloss.float() if count is None else dloss.float() / count.clamp(min=1)


def refuse_second_derivative_of_loss() -> None:
    """Raise if a backward is asked for a graph of its own. (The compiler refuses that by itself.)"""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "create_graph=True asks for the gradient of a gradient, which this cross-entropy does not have: the part"
            " of it that goes through the loss would be missing. Use torch.nn.functional.cross_entropy for it"
        )
