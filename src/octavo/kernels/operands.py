"""What the fused casts ask of their arguments, and what becomes of them under the compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.formats import format_named
from octavo.kernels.layout import padded

# What a value may be rounded to before it is cast.
THROUGH = (None, torch.bfloat16, torch.float16, torch.float32)


def check_matrix(operation: str, name: str, x: Tensor) -> None:
    """Raise unless x is a floating-point matrix."""
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(
            f"{operation} takes a floating-point matrix as {name}, found {x.dtype} of shape {tuple(x.shape)}"
        )


def check_scale(operation: str, scale: Tensor) -> None:
    """Raise unless the scale is one number in float32."""
    if scale.numel() != 1 or scale.dtype != torch.float32:
        raise ValueError(
            f"{operation} takes one float32 scale of the whole matrix, found {scale.dtype} of shape"
            f" {tuple(scale.shape)}: scales by row are for cast_transpose"
        )


def check_through(operation: str, through: torch.dtype | None) -> None:
    """Raise unless values can be rounded through the dtype."""
    if through not in THROUGH:
        raise ValueError(
            f"{operation} rounds through bfloat16, float16 or float32, or not at all (None), found {through}"
        )


def merge(gathered: Tensor | None, largest: Tensor) -> None:
    """Add what an operator has found to what is gathered, by max, in place.

    Not by the operator: a checkpoint in compiled code would run it again in the backward, with a tensor that has been
    written to since.
    """
    if gathered is not None:
        gathered.copy_(torch.maximum(gathered, largest))


def present(*outputs: Tensor | None, like: Tensor) -> tuple[Tensor, ...]:
    """Outputs as an operator returns them: an empty tensor for what is not there."""
    return tuple(like.new_empty(0) if output is None else output for output in outputs)


def fake_codes(
    like: Tensor, shape: Sequence[int], format: str, rowwise: bool = True, columnwise: bool = True
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """(codes, scale, codes_t) of a matrix of this shape with one scale, for an operator's fake."""
    dtype, (tall, wide) = format_named(format).dtype, map(padded, shape)
    return (
        like.new_empty((tall, wide), dtype=dtype) if rowwise else None,
        like.new_empty((), dtype=torch.float32),
        like.new_empty((wide, tall), dtype=dtype) if columnwise else None,
    )


def one_part(amaxes: Tensor) -> Tensor:
    """[1], for an operator: how many parts there are depends on the number of rows, which must not make a graph."""
    return amaxes.amax().reshape(1)
