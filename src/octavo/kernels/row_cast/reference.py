"""row_cast in plain PyTorch: the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activations import activated
from octavo.kernels.amax.reference import amax_reference
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import norm_output_reference
from octavo.scaling import ROW


def row_cast_reference(x: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.row_cast.row_cast`; any device."""
    # 1. The largest finite magnitude of each row.  [M, K] -> [M, 1]
    largest = amax_reference(x, ROW)
    # 2. Scale, cast, fill up.  [M, K] -> [M', K'], [M', 1]
    codes, scale, _, _, _ = cast_transpose_reference(x, format, largest, None, rule)
    assert codes is not None, "this layout is always asked for"
    assert scale is not None, "codes come with their scale"
    return codes, scale


def norm_row_cast_reference(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    rule: ScaleRule,
    return_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """As `octavo.kernels.row_cast.norm_row_cast`; any device."""
    # 1. The normalised rows, as a separate normalisation would have handed them on.  [M, K]
    output, _, mean, rstd = norm_output_reference(x, norm, weight, bias)
    # 2. Their codes.
    return *row_cast_reference(output, format, rule), output if return_output else None, mean, rstd


def gated_row_cast_reference(
    gate: Tensor, up: Tensor | None, activation: str, format: Format, rule: ScaleRule, through: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.row_cast.gated_row_cast`; any device."""
    # 1. The result in float32, rounded once.  [M, K], [M, K] -> [M, K]
    y = activated(gate.float(), activation)
    y = (y if up is None else y * up.float()).to(through)
    # 2. Its codes.
    return row_cast_reference(y, format, rule)
