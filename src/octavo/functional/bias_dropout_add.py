"""What ends each half of a transformer layer, as one expression.

    y = residual + keep * dropout(x + bias)

`keep` is drop path's: of each sample 0 with probability `drop_path`, else 1 / (1 - drop_path) (Huang et al., "Deep
Networks with Stochastic Depth", 2016). The compiler makes one pass of it; eager code makes one a part, and none of a
part that does nothing. An octavo.Linear adds its bias in its product, so bias is mostly None here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from octavo.functional.rotary import sequence_of


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, probability: float, training: bool, keep: Tensor | None = None
) -> Tensor:
    """residual + keep * dropout(x + bias), of residual's shape.

    Args:
        x, residual: [..., H].
        bias: [H] or None.
        probability: of dropout.
        training: dropout is on.
        keep: what `drop_path` gives, or None.
    """
    added = x if bias is None else x + bias
    dropped = dropout(added, probability, training) if probability > 0 and training else added
    return residual + dropped if keep is None else torch.addcmul(residual, dropped, keep)


def drop_path(x: Tensor, probability: float, sample_dim: int) -> Tensor:
    """1 / (1 - probability) or 0 for each sample, of a shape that broadcasts to x's; `sample_dim` counts samples."""
    shape = [x.shape[dim] if dim == sample_dim else 1 for dim in range(x.dim())]
    return x.new_empty(shape).bernoulli_(1 - probability).div_(1 - probability)


def drop_path_of_packed(x: Tensor, probability: float, cu_seqlens: Tensor) -> Tensor:
    """`drop_path` of sequences one after the other: x [T, ...], cu_seqlens [B + 1] -> [T, 1, ...]."""
    drawn = x.new_empty(cu_seqlens.shape[0] - 1).bernoulli_(1 - probability).div_(1 - probability)
    taken = drawn[sequence_of(cu_seqlens, torch.arange(x.shape[0], device=x.device))]
    return taken.reshape(-1, *[1] * (x.dim() - 1))
