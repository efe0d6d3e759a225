"""`finfo`: the limits of a format, in the shape of `torch.finfo`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.formats.format import Format, format_given


@dataclass(frozen=True)
class FormatInfo:
    """Limits of a number format; `min` is the most negative finite value, as in `torch.finfo`."""

    name: str
    bits: int
    max: float
    min: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


def finfo(format: Format | torch.dtype | str) -> FormatInfo:
    """Limits of an Octavo format, or its name, or of a torch floating-point dtype.

    `torch.finfo` has no subnormals; for its dtypes they follow as smallest_normal * eps.

    Raises:
        ValueError: no format of eight bits, nor a floating-point dtype.
    """
    if isinstance(format, torch.dtype):
        if not (format.is_floating_point or format.is_complex):
            raise ValueError(f"{format} has no limits of a floating-point format: see torch.iinfo")
        info = torch.finfo(format)
        name = str(format).removeprefix("torch.")
        return FormatInfo(name, info.bits, info.max, info.min, info.tiny, info.tiny * info.eps, info.eps)
    format = format_given(format)
    low = -format.max if format.signed else format.min_normal
    return FormatInfo(format.name, format.bits, format.max, low, format.min_normal, format.min_subnormal, format.eps)
