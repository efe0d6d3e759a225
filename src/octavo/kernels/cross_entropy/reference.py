"""cross_entropy in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.cross_entropy.rule import LossRule


def cross_entropy_reference(logits: Tensor, targets: Tensor, rule: LossRule) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.cross_entropy.cross_entropy`; any device."""
    x, num_classes = logits.float(), logits.shape[1]
    # 1. What each row is shifted by, so that no exponential overflows.  [M, 1]
    largest = x.amax(1, keepdim=True)
    shift = torch.where(largest == -float("inf"), 0.0, largest)
    x = x - shift
    # 2. Its log sum exp; NaN where the target is no class.  [M]
    inside = (targets >= 0) & (targets < num_classes)
    log = torch.where(inside, x.exp().sum(1).log(), float("nan"))
    lse = shift[:, 0] + log
    # 3. The logit of its target.  [M]
    at = x.gather(1, torch.where(inside, targets, 0).long()[:, None])[:, 0]
    # 4. Its loss, of what has been shifted: of large logits the difference would be lost.  [M]
    loss = log - (1 - rule.label_smoothing) * at
    if rule.label_smoothing:
        loss = loss - rule.label_smoothing / num_classes * x.sum(1)
    if rule.z_loss:
        loss = loss + rule.z_loss * lse * lse
    # 5. Nothing of rows that do not count.
    ignored = targets == rule.ignore_index
    return torch.where(ignored, 0.0, loss), torch.where(ignored, 0.0, lse)


def cross_entropy_gradient_reference(
    logits: Tensor, targets: Tensor, lse: Tensor, factor: Tensor | None, rule: LossRule
) -> Tensor:
    """As `octavo.kernels.cross_entropy.cross_entropy_gradient`; any device."""
    num_classes = logits.shape[1]
    # 1. Probabilities, and what z_loss adds to each.  [M, V]
    gradient = (logits.float() - lse[:, None]).exp()
    if rule.z_loss:
        gradient = gradient * (1 + 2 * rule.z_loss * lse)[:, None]
    # 2. Less the smoothed target.  [M, V]
    if rule.label_smoothing:
        gradient = gradient - rule.label_smoothing / num_classes
    inside = (targets >= 0) & (targets < num_classes)
    place = torch.where(inside, targets, 0).long()[:, None]
    gradient = gradient.scatter(1, place, gradient.gather(1, place) - (1 - rule.label_smoothing))
    # 3. Times the gradient of each row's loss; nothing of rows that do not count.  [M, V]
    if factor is not None:
        gradient = gradient * factor.reshape(-1, 1)
    gradient = torch.where((targets == rule.ignore_index)[:, None], 0.0, gradient)
    return gradient.to(logits.dtype)
