"""cross_entropy: the loss of each row of logits against a class, and its gradient, which may take their place.

    lse [M]     = log sum_j exp(x_mj)
    loss [M]    = lse - (1 - e) x_mt - e/V sum_j x_mj + z lse^2        t the target, e label_smoothing, z z_loss
                = log sum_j exp(y_mj) - (1 - e) y_mt - e/V sum_j y_mj + z lse^2      y = x - max_j x_mj, as computed
    dx [M, V]   = (p (1 + 2 z lse) - (1 - e) [j = t] - e/V) g_m        p = exp(x - lse), g_m the gradient of a loss

In float32; dx is rounded once, to the dtype of the logits. Rows whose target is `ignore_index` have loss, lse and
gradient 0, whatever their logits. A logit of -inf has probability 0 (with label smoothing its row's loss is inf); a row
of nothing else, or one that holds NaN or +inf, has loss NaN. So has a row whose target is no class: on a CPU that is an
error, elsewhere it would take a synchronisation to raise one. Its gradient is NaN as well, so nobody trains on it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cross_entropy.reference import cross_entropy_gradient_reference, cross_entropy_reference
from octavo.kernels.cross_entropy.rule import PLAIN_RULE, LossRule, check_rule
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons, uses_triton

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def cross_entropy(logits: Tensor, targets: Tensor, rule: LossRule = PLAIN_RULE) -> tuple[Tensor, Tensor]:
    """(loss, lse), each [M] in float32.

    Args:
        logits: [M, V] of float32, bfloat16 or float16, any strides.
        targets: [M], int64 or int32.
        rule: which rows count, and what else is in the loss.

    Raises:
        ValueError: shapes or dtypes do not fit; on a CPU also a target that is no class.
    """
    _check(logits, targets)
    if torch.compiler.is_compiling():
        loss, lse = _loss_operator(logits, targets, *rule)
        return loss, lse
    return _loss(logits, targets, *rule)


def cross_entropy_with_gradient(logits: Tensor, targets: Tensor, rule: LossRule = PLAIN_RULE) -> tuple[Tensor, Tensor]:
    """`cross_entropy`, and the gradient of the sum of the losses is written over the logits.

    Args and errors are those of `cross_entropy`; rows of the logits may not share memory.
    """
    _check(logits, targets)
    _check_apart(logits)
    if torch.compiler.is_compiling():
        loss, lse = _both_operator(logits, targets, *rule)
        return loss, lse
    return _both(logits, targets, *rule)


def cross_entropy_gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    factor: Tensor | None = None,
    rule: LossRule = PLAIN_RULE,
    in_place: bool = False,
) -> Tensor:
    """dx [M, V] of the dtype of the logits, or the logits themselves, overwritten.

    Args:
        logits, targets, rule: as `cross_entropy` had them.
        lse: [M], what it gave.
        factor: float32, the gradient of each row's loss, [M] or [1] or []; None stands for 1.
        in_place: dx is written over the logits, whose rows may not share memory.

    Raises:
        ValueError: as `cross_entropy`; or another number of factors.
    """
    _check(logits, targets)
    if in_place:
        _check_apart(logits)
    if factor is not None and (
        factor.dtype != torch.float32 or (factor.numel() != 1 and factor.shape != targets.shape)
    ):
        raise ValueError(
            f"factor is {factor.dtype} of shape {tuple(factor.shape)}: expected float32, one number or one a row,"
            f" {tuple(targets.shape)}"
        )
    if not torch.compiler.is_compiling():
        return _gradient(logits, targets, lse, factor, *rule, in_place)
    if in_place:
        _overwrite_operator(logits, targets, lse, factor, *rule)
        return logits
    dx: Tensor = _gradient_operator(logits, targets, lse, factor, *rule)
    return dx


def unsupported_reasons(logits: Tensor) -> list[str]:
    """Why the Triton twin does not run for these logits; then the PyTorch reference does."""
    return device_reasons(logits.device)


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES or logits.shape[1] == 0:
        raise ValueError(
            f"cross_entropy takes logits [M, V], V of 1 or more, in float32, bfloat16 or float16; found {logits.dtype}"
            f" of shape {tuple(logits.shape)}"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"targets are {targets.dtype}: expected classes in int64 or int32; for probabilities of classes use"
            " torch.nn.functional.cross_entropy"
        )
    if targets.shape != logits.shape[:1] or targets.device != logits.device:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} on {targets.device}: logits of shape {tuple(logits.shape)} on"
            f" {logits.device} take one a row, ({logits.shape[0]},)"
        )


def _check_apart(logits: Tensor) -> None:
    if logits.shape[0] > 1 and logits.stride(0) == 0:
        raise ValueError("the rows of the logits share memory (an expanded tensor): they cannot be overwritten")


def _check_classes(targets: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raise if a target on a CPU is no class."""
    if targets.device.type != "cpu" or type(targets) is not Tensor:
        return
    wrong = ((targets < 0) | (targets >= num_classes)) & (targets != ignore_index)
    if bool(wrong.any()):
        raise ValueError(
            f"targets hold {int(targets[wrong][0])}: with {num_classes} classes they are 0 to {num_classes - 1}, or"
            f" ignore_index = {ignore_index}"
        )


def _loss(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    rule = LossRule(ignore_index, label_smoothing, z_loss)
    _check_classes(targets, logits.shape[1], ignore_index)
    if uses_triton(logits) and logits.numel():
        from octavo.kernels.cross_entropy.triton_kernel import cross_entropy_triton

        return cross_entropy_triton(logits, targets, rule, False)
    return cross_entropy_reference(logits, targets, rule)


def _both(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    rule = LossRule(ignore_index, label_smoothing, z_loss)
    _check_classes(targets, logits.shape[1], ignore_index)
    if uses_triton(logits) and logits.numel():
        from octavo.kernels.cross_entropy.triton_kernel import cross_entropy_triton

        return cross_entropy_triton(logits, targets, rule, True)
    loss, lse = cross_entropy_reference(logits, targets, rule)
    logits.copy_(cross_entropy_gradient_reference(logits, targets, lse, None, rule))
    return loss, lse


def _gradient(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    in_place: bool = False,
) -> Tensor:
    rule = LossRule(ignore_index, label_smoothing, z_loss)
    if uses_triton(logits) and logits.numel():
        from octavo.kernels.cross_entropy.triton_kernel import cross_entropy_gradient_triton

        return cross_entropy_gradient_triton(logits, targets, lse, factor, rule, in_place)
    dx = cross_entropy_gradient_reference(logits, targets, lse, factor, rule)
    return logits.copy_(dx) if in_place else dx


def _overwrite(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    factor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    _gradient(logits, targets, lse, factor, ignore_index, label_smoothing, z_loss, in_place=True)


def _fake_loss(logits: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0],)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.float32)


def _fake_gradient(logits: Tensor, *_: object) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_overwrite(*_: object) -> None:
    return None


_RULE = "int ignore_index, float label_smoothing, float z_loss"
_loss_operator = register(
    f"cross_entropy(Tensor logits, Tensor targets, {_RULE}) -> (Tensor, Tensor)", _loss, _fake_loss
)
_both_operator = register(
    f"cross_entropy_with_gradient(Tensor(a!) logits, Tensor targets, {_RULE}) -> (Tensor, Tensor)", _both, _fake_loss
)
_gradient_operator = register(
    f"cross_entropy_gradient(Tensor logits, Tensor targets, Tensor lse, Tensor? factor, {_RULE}) -> Tensor",
    _gradient,
    _fake_gradient,
)
_overwrite_operator = register(
    f"cross_entropy_gradient_(Tensor(a!) logits, Tensor targets, Tensor lse, Tensor? factor, {_RULE}) -> ()",
    _overwrite,
    _fake_overwrite,
)

__all__ = [
    "LOGIT_DTYPES",
    "PLAIN_RULE",
    "LossRule",
    "check_rule",
    "cross_entropy",
    "cross_entropy_gradient",
    "cross_entropy_gradient_reference",
    "cross_entropy_reference",
    "cross_entropy_with_gradient",
    "unsupported_reasons",
]
