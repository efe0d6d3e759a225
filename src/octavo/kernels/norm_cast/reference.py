"""norm_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.kernels.norm_cast.norm import Norm
from octavo.scaling import TENSOR

# codes, scale, codes_t, output, mean, rstd.
Result = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]


def norm_cast_reference(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    scale: Tensor,
    gathered: Tensor | None = None,
    columnwise: bool = True,
    return_output: bool = False,
) -> Result:
    """As `octavo.kernels.norm_cast.norm_cast`; any device."""
    # 1. Statistics.  [M, K] -> [M], [M]
    mean, rstd = statistics(x, norm)
    # 2. The result in float32, as a separate normalisation would have handed it on.  [M, K]
    y = normalised(x, norm, weight, bias, mean, rstd)
    if norm.through is not None:
        y = y.to(norm.through)
    # 3. Scale, cast, fill up, turn.  [M, K] -> [M', K'], [K', M']
    codes, _, codes_t, _, _ = cast_transpose_reference(y, format, scale, scale if columnwise else None, None, gathered)
    assert codes is not None, "this layout is always asked for"
    output = y.to(output_dtype(x, norm)) if return_output else None
    return codes, scale.reshape(()).clone(), codes_t, output, mean, rstd


def norm_output_reference(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """As `octavo.kernels.norm_cast.norm_output`; any device."""
    # 1. Statistics.  [M, K] -> [M], [M]
    mean, rstd = statistics(x, norm)
    # 2. The result, rounded once, and its amax in one part.  [M, K] -> [M, K], [1]
    output = normalised(x, norm, weight, bias, mean, rstd).to(output_dtype(x, norm))
    return output, amax_reference(output, TENSOR).reshape(1), mean, rstd


def output_dtype(x: Tensor, norm: Norm) -> torch.dtype:
    """That of the result in high precision."""
    if norm.through is not None:
        return norm.through
    return torch.float32 if x.dtype == torch.float64 else x.dtype


def statistics(x: Tensor, norm: Norm) -> tuple[Tensor | None, Tensor]:
    """(mean [M], or None of RMSNorm; 1 / sqrt(variance + epsilon) [M]), in float32."""
    x32, mean = x.float(), None
    if norm.kind == "layer":
        mean = x32.mean(1)
        x32 = x32 - mean[:, None]
    return mean, 1 / torch.sqrt((x32 * x32).mean(1) + norm.epsilon)


def normalised(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, rstd: Tensor
) -> Tensor:
    """((x - mean) rstd) weight + bias, each step rounded to float32.  [M, K]"""
    y = x.float() if mean is None else x.float() - mean[:, None]
    y = y * rstd[:, None]
    if weight is not None:
        y = y * (weight.float() + 1 if norm.zero_centered else weight.float())
    return y if bias is None else y + bias.float()
