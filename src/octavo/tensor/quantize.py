"""`quantize`: a tensor and a granularity make a QuantizedTensor; every granularity, any device, plain PyTorch.

    codes = cast(x * m),  value = code * scale,  scale = 1 / m,  m from the amax of each block

Nothing here is differentiable: a gradient passes a layer, not a number format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.formats import E4M3, Format, cast_float32, format_given
from octavo.scaling import (
    MX,
    TENSOR,
    Granularity,
    ScaleRounding,
    as_matrix,
    block_amax,
    expand_scale,
    granularity_named,
    multiplier_from_amax,
    mx_multiplier,
    mx_scale,
    scale_from_multiplier,
)
from octavo.scaling.granularity import MX_TRANSPOSED
from octavo.tensor.quantized_tensor import QuantizedTensor


@torch.no_grad()
def quantize(
    x: Tensor,
    format: Format | torch.dtype | str,
    granularity: str | tuple[int, int] | Granularity = "tensor",
    *,
    scale: Tensor | float | None = None,
    power_of_two: bool = False,
    epsilon: float = 0.0,
    scale_rounding: ScaleRounding = "up",
) -> QuantizedTensor:
    """Quantize x (any shape, floating point) by blocks that share a scale.

    Args:
        x: the values. Of more than two dimensions, it is seen as the matrix [product of the leading ones, last one].
        format: octavo.E4M3, octavo.E5M2 or another eight-bit format; its torch dtype or its name will do.
        granularity: "tensor", "row", "column", (1, 128), (128, 1), (128, 128) or "mx".
        scale: a known scale of the whole tensor instead of one from its amax (granularity "tensor" only).
        power_of_two: round multipliers down to powers of two; MX scales always are.
        epsilon: amaxes below it count as it.
        scale_rounding: of MX scales, "up" or "floor".

    Returns:
        codes of x's shape; scale float32 [] for "tensor", else [tall, wide] of the matrix; E8M0 codes for "mx".

    Raises:
        TypeError: x is no tensor.
        ValueError: x is not floating point, the granularity is unknown, or a given scale does not fit.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"quantize needs a tensor, found a {type(x).__name__}: make one first, torch.as_tensor(x)")
    if not x.is_floating_point():
        raise ValueError(f"quantize needs a floating-point tensor, found {x.dtype}: convert it first, x.float()")
    format, blocks = format_given(format), granularity_named(granularity)
    if blocks is MX_TRANSPOSED:
        return quantize(x.t(), format, MX, scale=scale, scale_rounding=scale_rounding).t()  # type: ignore[return-value]
    matrix = as_matrix(x.detach()).float()
    shape = (matrix.shape[0], matrix.shape[1])
    if scale is not None:
        stored, multiplier = _given_scale(scale, blocks, x.device)
    elif blocks is MX:
        stored = mx_scale(block_amax(matrix, blocks), format, scale_rounding)
        multiplier = mx_multiplier(stored)
    else:
        multiplier = multiplier_from_amax(
            block_amax(matrix, blocks), format, epsilon=epsilon, power_of_two=power_of_two
        )
        multiplier = multiplier.reshape(()) if blocks is TENSOR else multiplier
        stored = scale_from_multiplier(multiplier)
    codes = cast_float32(matrix * expand_scale(multiplier, blocks, shape), format).reshape(x.shape)
    return QuantizedTensor(codes, stored, blocks, x.dtype)


def _given_scale(scale: Tensor | float, blocks: Granularity, device: torch.device) -> tuple[Tensor, Tensor]:
    if blocks is not TENSOR:
        raise ValueError(f"a given scale is one number for the whole tensor, found granularity {blocks}")
    stored = torch.as_tensor(scale, dtype=torch.float32, device=device)
    if stored.numel() != 1 or not bool((stored > 0).all() & stored.isfinite().all()):
        raise ValueError(f"scale is {scale}: it must be one positive finite number")
    stored = stored.reshape(()).clone()
    return stored, scale_from_multiplier(stored)


@torch.no_grad()
def cast_to_representable(x: Tensor, scale: float = 1.0, format: Format | torch.dtype | str = E4M3) -> Tensor:
    """The values nearest to x that `format` holds exactly under `scale`, in x's dtype and shape.

    Data that has gone through this once loses nothing when it is cast again under the same scale, so what remains of an
    FP8 layer's error is accumulation and output rounding.

    Args:
        x: floating-point values.
        scale: as Transformer Engine's tutorials mean it, a multiplier: codes are cast(x * scale).
        format: the format; its values must be exact in x's dtype, which float32, bf16 and fp16 guarantee for scale 1.
    """
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: it must be positive and finite")
    codes = cast_float32(x.detach().float() * scale, format_given(format))
    return (codes.float() / scale).to(x.dtype)
