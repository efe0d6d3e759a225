"""row_cast: the cast of a matrix with one measured scale a row, in one pass over memory; of what makes the matrix, too.

    codes [M', K'] = cast(y / scale)        scale [M', 1], of the largest finite |y| of each row

    row_cast           y = x
    norm_row_cast      y = LayerNorm or RMSNorm of the rows of x, as in `octavo.kernels.norm_cast`
    gated_row_cast     y = f(gate) * up, or f(gate), as in `octavo.kernels.gated_cast` and `activation_cast`

M' and K' are M and K rounded up to a multiple of 16; what is added is zero, and its scale 1. A program has a whole row,
and so its amax before it casts. Bytes moved an element of bf16: 2 read and 1 written, against 4 and 1 of an amax and
then a cast; of a gate 4 and 1, against 8 and 3. Only the row-wise layout can be made so: columns have scales of their
own. In compiled code, and of rows too wide for one program, y is made first, then its amaxes, then the codes.

Bits are those of the separate operations, but for the statistics of a normalisation, which are sums in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.activation_cast import activation_output
from octavo.kernels.amax import amax_by_row_and_column
from octavo.kernels.cast_transpose import ScaleRule, cast_transpose
from octavo.kernels.gated_cast import check_gated, gated_output
from octavo.kernels.norm_cast import Norm, norm_output
from octavo.kernels.operands import check_matrix
from octavo.kernels.row_cast.reference import (
    gated_row_cast_reference,
    norm_row_cast_reference,
    row_cast_reference,
)
from octavo.kernels.triton_support import cast_reasons, runs_on

# Columns of the widest rows that a program holds.
WIDEST = 32768


class RowCast(NamedTuple):
    """codes [M', K'] and their scales [M', 1]."""

    codes: Tensor
    scale: Tensor


class NormRowCast(NamedTuple):
    """codes, scale; output [M, K] if it was asked for, mean [M] (None of RMSNorm), rstd [M]."""

    codes: Tensor
    scale: Tensor
    output: Tensor | None
    mean: Tensor | None
    rstd: Tensor


def row_cast(x: Tensor, format: Format, rule: ScaleRule) -> RowCast:
    """Codes of a matrix x [M, K] (any floating dtype, any strides).

    Args:
        x: the matrix.
        format: of the codes.
        rule: how a scale comes from an amax.

    Raises:
        ValueError: x is no floating-point matrix.
    """
    check_matrix("row_cast", "x [M, K]", x)
    if _runs(x, format):
        from octavo.kernels.row_cast import launch

        return RowCast(*launch.row_cast_triton(x, format, rule))
    by_row, _ = amax_by_row_and_column(x, True, False)
    out = cast_transpose(x, format, by_row, None, rule=rule)
    return RowCast(*out.row_wise)


def norm_row_cast(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    rule: ScaleRule,
    *,
    return_output: bool = False,
) -> NormRowCast:
    """Codes of the normalised rows of x [M, K].

    Args: norm, weight, bias, return_output: as of `octavo.kernels.norm_cast.norm_cast`; the others as of `row_cast`.
    """
    check_matrix("norm_row_cast", "x [M, K]", x)
    if _runs(x, format):
        from octavo.kernels.row_cast import launch

        return NormRowCast(*launch.norm_row_cast_triton(x, norm, weight, bias, format, rule, return_output))
    output, _, mean, rstd = norm_output(x, norm, weight, bias)
    return NormRowCast(*row_cast(output, format, rule), output if return_output else None, mean, rstd)


def gated_row_cast(
    gate: Tensor, up: Tensor | None, activation: str, format: Format, rule: ScaleRule, *, through: torch.dtype
) -> RowCast:
    """Codes of f(gate) * up, matrices [M, K]; without up, of f(gate).

    Args:
        gate, up: the matrices.
        activation: the name of f, one of `octavo.kernels.activations.PLAIN`.
        format, rule: as of `row_cast`.
        through: what the float32 result is rounded to before it is cast.
    """
    check_gated("gated_row_cast", gate, gate if up is None else up, activation, through)
    if _runs(gate, format):
        from octavo.kernels.row_cast import launch

        return RowCast(*launch.gated_row_cast_triton(gate, up, activation, format, rule, through))
    if up is None:
        return row_cast(activation_output(gate, activation, through).output, format, rule)
    return row_cast(gated_output(gate, up, activation, through).output, format, rule)


def unsupported_reasons(x: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then several operations do."""
    reasons = cast_reasons(x, format)
    if x.shape[1] > WIDEST:
        reasons.append(f"rows of {x.shape[1]} columns: a program holds {WIDEST} at most")
    return reasons


def _runs(x: Tensor, format: Format) -> bool:
    """True if the twin runs; compiled code sees the separate operations, which it knows."""
    if torch.compiler.is_compiling() or not x.is_cuda or not x.numel():
        return False
    return 1 < x.shape[1] <= WIDEST and runs_on(x.device.index, format.name)


__all__ = [
    "WIDEST",
    "NormRowCast",
    "RowCast",
    "gated_row_cast",
    "gated_row_cast_reference",
    "norm_row_cast",
    "norm_row_cast_reference",
    "row_cast",
    "row_cast_reference",
    "unsupported_reasons",
]
