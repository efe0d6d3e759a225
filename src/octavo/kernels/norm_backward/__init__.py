"""norm_backward: the gradients of LayerNorm or RMSNorm of rows, in one pass over memory.

    xhat [M, K] = (x - mean) rstd                 g [M, K] = dy weight
    dx [M, K]   = (g - xhat mean(g xhat) - mean(g)) rstd          means over a row; RMSNorm: without mean(g)
    dweight [K] = sum of dy xhat over the rows    dbias [K] = sum of dy over the rows

All in float32, each step rounded; dx is rounded once more, to the dtype of x. Bytes moved an element of bf16: 4 read
and 2 written. Sums are float32 in an order of their own, the same in every run; all else is the reference's to the bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.library import register
from octavo.kernels.norm_backward.reference import Gradients, norm_backward_reference
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.operands import check_matrix, present
from octavo.kernels.triton_support import device_reasons, one_column_reasons, uses_triton

# A program holds whole rows, and sums of as many columns, in registers.
MOST_COLUMNS = 8192


def norm_backward(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool] = (True, True, True),
) -> Gradients:
    """(dx [M, K] of x's dtype, dweight [K], dbias [K] in float32); None for what is not needed.

    Args:
        dy, x: [M, K], any floating dtype, any strides.
        norm: which normalisation.
        weight: [K] of any floating dtype, or None.
        mean, rstd: [M] float32, what the forward found; mean is None of RMSNorm.
        needs: of x, weight, bias.

    Raises:
        ValueError: dy has another shape than x, or statistics are missing.
    """
    check_matrix("norm_backward", "x [M, K]", x)
    check_matrix("norm_backward", "dy [M, K]", dy)
    if dy.shape != x.shape:
        raise ValueError(f"dy has shape {tuple(dy.shape)}; for x of shape {tuple(x.shape)} it takes the same")
    if (mean is None) != (norm.kind == "rms"):
        raise ValueError(f"mean is {'missing' if mean is None else 'given'}: LayerNorm has one, RMSNorm has none")
    if not torch.compiler.is_compiling():
        return _launch(dy, x, norm, weight, mean, rstd, needs)
    outputs = _operator(dy, x, weight, mean, rstd, norm.kind, norm.epsilon_text, norm.zero_centered, *needs)
    dx, dweight, dbias = (output if needed else None for output, needed in zip(outputs, needs, strict=True))
    return dx, dweight, dbias


def unsupported_reasons(x: Tensor) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    reasons = device_reasons(x.device) + one_column_reasons(x)
    if x.shape[1] > MOST_COLUMNS:
        reasons.append(f"{x.shape[1]} columns: a program holds rows of up to {MOST_COLUMNS} in registers")
    return reasons


def _launch(
    dy: Tensor,
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    if uses_triton(x) and x.numel() and 1 < x.shape[1] <= MOST_COLUMNS:
        from octavo.kernels.norm_backward.triton_kernel import norm_backward_triton

        return norm_backward_triton(dy, x, norm, weight, mean, rstd, needs)
    return norm_backward_reference(dy, x, norm, weight, mean, rstd, needs)


def _implementation(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[Tensor, ...]:
    norm = Norm(kind, epsilon, zero_centered)
    return present(*_launch(dy, x, norm, weight, mean, rstd, (needs_dx, needs_dweight, needs_dbias)), like=x)


def _fake(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    needs_dx: bool,
    needs_dweight: bool,
    needs_dbias: bool,
) -> tuple[Tensor, ...]:
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    return present(
        x.new_empty(x.shape, dtype=dtype) if needs_dx else None,
        x.new_empty((x.shape[1],), dtype=torch.float32) if needs_dweight else None,
        x.new_empty((x.shape[1],), dtype=torch.float32) if needs_dbias else None,
        like=x,
    )


_operator = register(
    "norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor? mean, Tensor rstd, str kind, str epsilon,"
    " bool zero_centered, bool needs_dx, bool needs_dweight, bool needs_dbias) -> (Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)

__all__ = ["MOST_COLUMNS", "norm_backward", "norm_backward_reference", "unsupported_reasons"]
