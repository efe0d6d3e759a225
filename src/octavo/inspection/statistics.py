"""What a cast did to a tensor: amax, underflow, saturation, error.

    underflow    share of all elements that were not 0 and became 0, of either sign
    saturation   share of all elements whose scaled magnitude lay beyond M
    SQNR         10 log10(sum x^2 / sum (x - x')^2), in dB, over finite elements; inf if nothing was lost

Exact zeros are no underflow. What is not finite is counted apart.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from octavo.formats import Format, decode, format_of
from octavo.kernels import expanded, has_blocks
from octavo.scaling import as_matrix, expand_scale
from octavo.tensor import Operand, QuantizedTensor


@dataclass(frozen=True)
class Statistics:
    """Figures of one cast; shares between 0 and 1."""

    amax: float
    underflow: float
    saturation: float
    nonfinite: int
    sqnr_db: float

    def as_dict(self) -> dict[str, float]:
        """The figures by name."""
        return asdict(self)


def statistics(x: Tensor, quantized: QuantizedTensor) -> Statistics:
    """What quantizing x did; `quantized` is the outcome, of x's shape."""
    if x.shape != quantized.shape:
        raise ValueError(f"x has shape {tuple(x.shape)} and its codes {tuple(quantized.shape)}: they must be the same")
    matrix = as_matrix(quantized.codes)
    scale = expand_scale(decode(quantized.scale), quantized.granularity, (matrix.shape[0], matrix.shape[1]))
    return cast_statistics(as_matrix(x), matrix, scale, quantized.format)


@torch.no_grad()
def cast_statistics(x: Tensor, codes: Tensor, scale: Tensor, format: Format) -> Statistics:
    """The same for a matrix x [M, K], its codes [M, K] and a scale that broadcasts against them."""
    x32, code = x.detach().float(), decode(codes)
    finite = x32.isfinite()
    magnitude = torch.where(finite, x32.abs(), 0.0)
    count = max(x32.numel(), 1)
    flushed = finite & (x32 != 0) & (code == 0)
    # Beyond M before the clamp: in float64, where the quotient does not round to M.
    beyond = finite & (magnitude.double() / scale.double() > format.max * (1 + 2.0**-23))
    error = torch.where(finite, code * scale - x32, 0.0).double()
    signal, noise = magnitude.double().square().sum().item(), error.square().sum().item()
    return Statistics(
        amax=magnitude.amax().item() if x32.numel() else 0.0,
        underflow=flushed.sum().item() / count,
        saturation=beyond.sum().item() / count,
        nonfinite=int((~finite).sum().item()),
        sqnr_db=_decibel(signal, noise),
    )


def operand_statistics(x: Tensor, operand: Operand) -> tuple[Statistics, float] | None:
    """What casting x [M, K] to an operand of a product did, and the largest of its scales; None of an empty one.

    Of an operand in both layouts it is the row-wise one that is looked at. Padding does not count.
    """
    codes, scale, matrix = operand.codes, operand.scale, x
    if codes is None:
        codes, scale, matrix = operand.codes_t, operand.scale_t, x.t()
    if codes is None or scale is None or not matrix.numel():
        return None
    rows, columns = matrix.shape
    # Without those of padding; one for each code where blocks share them.
    shown = scale[:rows] if scale.dim() else scale
    if has_blocks(scale, codes.shape[0]):
        shown = expanded(scale, codes)[:rows, :columns]
    figures = cast_statistics(matrix, codes[:rows, :columns], shown, format_of(codes.dtype))
    return figures, shown.max().item()


def _decibel(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 and math.isfinite(noise) else -math.inf
