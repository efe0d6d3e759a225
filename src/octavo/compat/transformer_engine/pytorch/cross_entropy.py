"""`te.parallel_cross_entropy`: Octavo's cross-entropy of logits with Transformer Engine's arguments.

Source: transformer_engine/pytorch/cross_entropy.py of Transformer Engine 2.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.functional import cross_entropy


def parallel_cross_entropy(
    inp: Tensor | None = None,
    target: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    z_loss_weight: float = 0.0,
    _input: Tensor | None = None,
) -> Tensor:
    """The loss in float32, of each token or their mean.

    Other than Transformer Engine's, it leaves the logits as they are: their gradient is a tensor of its own.

    Args:
        inp: logits [..., V]; `_input` is its older name.
        target: [...], classes or `ignore_idx`.
        label_smoothing: this part of each target is spread evenly over all classes.
        reduce_loss: the mean over the tokens that are not ignored (as later versions of Transformer Engine have it;
            earlier ones divided by all of them), instead of each token's loss.
        dist_process_group: of one rank, or None.
        ignore_idx: tokens of this target have loss 0 and gradient 0.
        is_cg_capturable: changes nothing: a CUDA graph can always be captured, and nothing waits for the device.
        z_loss_weight: times the square of log sum exp is added to each token's loss.

    Raises:
        NotImplementedError: `dist_process_group` has several ranks.
        ValueError: logits or targets are missing, given twice or do not fit.
    """
    if dist_process_group is not None and dist_process_group.size() > 1:
        raise NotImplementedError(
            f"te.parallel_cross_entropy with a dist_process_group of {dist_process_group.size()} ranks is not built in"
            " Octavo: gather the logits along the vocabulary and leave the group out, or use"
            " torch.distributed.tensor.parallel.loss_parallel"
        )
    if (inp is None) == (_input is None) or target is None:
        raise ValueError("te.parallel_cross_entropy takes logits as inp (or under its older name _input), and target")
    logits = _input if inp is None else inp
    assert logits is not None, "one of the two names holds it"
    return cross_entropy(
        logits,
        target,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction="mean" if reduce_loss else "none",
        z_loss=z_loss_weight,
    )
