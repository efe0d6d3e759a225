"""cast_transpose: one read of a matrix, its codes in both layouts, and its amax.

    codes   [M', K'] = cast(x * multiplier)
    codes_t [K', M'] = cast(x * multiplier_t)^T
    amax    []       = largest finite |x|          (what delayed scaling gathers)

M' and K' are M and K rounded up to a multiple of 16; what is added is zero. A Hopper FP8 product takes only K-major
operands, so the forward product wants `codes` and the weight gradient, whose K is the number of tokens, wants
`codes_t`. Bytes moved an element of bf16: 2 read and 2 written, against 2 + 1 + 1 + 1 of a cast and then a transpose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import E4M3, E5M2, Format, format_named
from octavo.kernels.cast_transpose.reference import cast_transpose_reference
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons


class CastOutput(NamedTuple):
    """Codes in one or both layouts, and the amax of what was cast."""

    codes: Tensor | None
    codes_t: Tensor | None
    amax: Tensor


def cast_transpose(
    x: Tensor,
    format: Format,
    multiplier: Tensor | None,
    multiplier_t: Tensor | None,
    *,
    inf_to_nan: bool = False,
) -> CastOutput:
    """Codes of a matrix x [M, K] (any floating dtype, any strides).

    Args:
        x: the matrix.
        format: of both layouts.
        multiplier: float32, [] or [M, 1]; None leaves `codes` out.
        multiplier_t: float32, [] or [1, K]; None leaves `codes_t` out.
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients, so that a loss scaler still sees the overflow.

    Returns:
        codes [M', K'] and codes_t [K', M'] of `format.dtype`, contiguous; amax float32 [].

    Raises:
        ValueError: x is no floating-point matrix, or a multiplier has another shape.
    """
    if torch.compiler.is_compiling():
        codes, codes_t, amax = _operator(x, format.name, multiplier, multiplier_t, inf_to_nan)
        return CastOutput(None if multiplier is None else codes, None if multiplier_t is None else codes_t, amax)
    return _launch(x, format, multiplier, multiplier_t, inf_to_nan)


def unsupported_reasons(x: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    reasons = device_reasons(x.device)
    if format not in (E4M3, E5M2):
        reasons.append(f"format {format.name}: NVIDIA's conversion instructions write E4M3 and E5M2")
    return reasons


def _launch(
    x: Tensor, format: Format, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> CastOutput:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"cast_transpose takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}"
        )
    for name, scales, shape in (
        ("multiplier", multiplier, (x.shape[0], 1)),
        ("multiplier_t", multiplier_t, (1, x.shape[1])),
    ):
        if scales is not None and scales.numel() != 1 and scales.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(scales.shape)}; for x of shape {tuple(x.shape)} it takes [] or {list(shape)}"
            )
    if x.is_cuda and x.numel() and not unsupported_reasons(x, format):
        from octavo.kernels.cast_transpose.triton_kernel import cast_transpose_triton

        return CastOutput(*cast_transpose_triton(x, format, multiplier, multiplier_t, inf_to_nan))
    return CastOutput(*cast_transpose_reference(x, format, multiplier, multiplier_t, inf_to_nan))


def _operator_implementation(
    x: Tensor, format: str, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor, Tensor, Tensor]:
    codes, codes_t, amax = _launch(x, format_named(format), multiplier, multiplier_t, inf_to_nan)
    # An operator returns tensors only: what was left out is an empty one.
    absent = x.new_empty(0, dtype=format_named(format).dtype)
    return absent if codes is None else codes, absent.clone() if codes_t is None else codes_t, amax


def _fake(
    x: Tensor, format: str, multiplier: Tensor | None, multiplier_t: Tensor | None, inf_to_nan: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = padded(x.shape[0]), padded(x.shape[1])
    dtype = format_named(format).dtype
    codes = x.new_empty((0,) if multiplier is None else (rows, columns), dtype=dtype)
    codes_t = x.new_empty((0,) if multiplier_t is None else (columns, rows), dtype=dtype)
    return codes, codes_t, x.new_empty((), dtype=torch.float32)


_operator = register(
    "cast_transpose(Tensor x, str format, Tensor? multiplier, Tensor? multiplier_t, bool inf_to_nan)"
    " -> (Tensor, Tensor, Tensor)",
    _operator_implementation,
    _fake,
)

__all__ = ["CastOutput", "cast_transpose", "cast_transpose_reference", "unsupported_reasons"]
