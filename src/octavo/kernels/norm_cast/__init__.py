"""norm_cast: LayerNorm or RMSNorm of rows and the cast of its result, in one pass over memory.

    mean [M]     of each row (LayerNorm)          rstd [M] = 1 / sqrt(variance + epsilon), RMSNorm: mean of squares
    y            = ((x - mean) rstd) weight + bias          float32, each step rounded; then rounded `through` a dtype
    codes   [M', K'] = cast(y / scale)            codes_t [K', M'] = codes^T
    gathered []  = max(gathered, largest finite |y|)

M' and K' are M and K rounded up to a multiple of 16; what is added is zero. Bytes moved an element of bf16: 2 read and
2 written, against 2 + 2 + 2 + 2 of a normalisation and then a cast. With current scaling, where the scale comes from
the result, `norm_output` writes the result with its amax, so that only the cast is left.

mean and rstd are what the backward needs. They are float32 sums in the twin's own order, see its docstring; all else
is the reference's to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.library import register
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import (
    Result,
    norm_cast_reference,
    norm_output_reference,
    output_dtype,
)
from octavo.kernels.operands import check_matrix, check_scale, check_through, fake_codes, merge, one_part, present
from octavo.kernels.triton_support import cast_reasons, runs_on, uses_triton


class NormCastOutput(NamedTuple):
    """codes [M', K'], their scale [], codes_t [K', M'], output [M, K], mean [M], rstd [M]; None for what is not."""

    codes: Tensor
    scale: Tensor
    codes_t: Tensor | None
    output: Tensor | None
    mean: Tensor | None
    rstd: Tensor


class NormOutput(NamedTuple):
    """output [M, K] in high precision, amaxes [P] of its parts, mean [M] (None of RMSNorm), rstd [M]."""

    output: Tensor
    amaxes: Tensor
    mean: Tensor | None
    rstd: Tensor


def norm_cast(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    scale: Tensor,
    *,
    gathered: Tensor | None = None,
    columnwise: bool = True,
    return_output: bool = False,
) -> NormCastOutput:
    """Codes of the normalised rows of a matrix x [M, K] (any floating dtype, any strides), by a scale that is known.

    Args:
        x: the matrix.
        norm: which normalisation, and what its result is rounded through.
        weight, bias: [K] of any floating dtype, or None.
        format: of the codes.
        scale: float32 [].
        gathered: float32 [], to which the amax of the result is added by max, in place.
        columnwise: give codes_t as well.
        return_output: give the result in high precision as well: of dtype `norm.through`, or that of x.

    Raises:
        ValueError: an argument has another shape or dtype, or the kind of normalisation is unknown.
    """
    _check("norm_cast", x, norm, weight, bias)
    check_scale("norm_cast", scale)
    if not torch.compiler.is_compiling():
        return NormCastOutput(*_launch(x, norm, weight, bias, format, scale, gathered, columnwise, return_output))
    codes, used, codes_t, output, mean, rstd, largest = _operator(
        x, weight, bias, norm.kind, norm.epsilon_text, norm.zero_centered, norm.through, format.name, scale,
        gathered is not None, columnwise, return_output,
    )  # fmt: skip
    merge(gathered, largest)
    return NormCastOutput(
        codes,
        used,
        codes_t if columnwise else None,
        output if return_output else None,
        mean if norm.kind == "layer" else None,
        rstd,
    )


def norm_output(x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> NormOutput:
    """The normalised rows of x [M, K] in high precision, with parts of their amax as `cast_transpose` takes them.

    Args: as of `norm_cast`; the result has dtype `norm.through`, or that of x.
    """
    _check("norm_output", x, norm, weight, bias)
    if not torch.compiler.is_compiling():
        return NormOutput(*_launch_output(x, norm, weight, bias))
    output, amaxes, mean, rstd = _output_operator(
        x, weight, bias, norm.kind, norm.epsilon_text, norm.zero_centered, norm.through
    )
    return NormOutput(output, amaxes, mean if norm.kind == "layer" else None, rstd)


def unsupported_reasons(x: Tensor, format: Format) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return cast_reasons(x, format)


def _check(operation: str, x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None) -> None:
    check_matrix(operation, "x [M, K]", x)
    check_through(operation, norm.through)
    if norm.kind not in ("layer", "rms"):
        raise ValueError(f"unknown normalisation {norm.kind!r}: expected 'layer' or 'rms'")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.shape != (x.shape[1],):
            raise ValueError(
                f"{name} has shape {tuple(given.shape)}; for x of shape {tuple(x.shape)} it takes [{x.shape[1]}]"
            )


def _launch(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    scale: Tensor,
    gathered: Tensor | None,
    columnwise: bool,
    return_output: bool,
    own_scale: bool = False,
) -> Result:
    if x.is_cuda and x.numel() and x.shape[1] != 1 and runs_on(x.device.index, format.name):
        from octavo.kernels.norm_cast.triton_kernel import norm_cast_triton

        return norm_cast_triton(x, norm, weight, bias, format, scale, gathered, columnwise, return_output, own_scale)
    return norm_cast_reference(x, norm, weight, bias, format, scale, gathered, columnwise, return_output)


def _launch_output(
    x: Tensor, norm: Norm, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    # Triton does not compile the statistics of one column: there the number of columns is no tensor.
    if uses_triton(x) and x.numel() and x.shape[1] != 1:
        from octavo.kernels.norm_cast.triton_kernel import norm_output_triton

        return norm_output_triton(x, norm, weight, bias)
    return norm_output_reference(x, norm, weight, bias)


def _implementation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    through: torch.dtype | None,
    format: str,
    scale: Tensor,
    gather: bool,
    columnwise: bool,
    return_output: bool,
) -> tuple[Tensor, ...]:
    gathered = x.new_zeros((), dtype=torch.float32) if gather else None
    norm = Norm(kind, epsilon, zero_centered, through)
    outputs = _launch(
        x, norm, weight, bias, format_named(format), scale, gathered, columnwise, return_output, own_scale=True
    )
    return present(*outputs, gathered, like=x)


def _fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    through: torch.dtype | None,
    format: str,
    scale: Tensor,
    gather: bool,
    columnwise: bool,
    return_output: bool,
) -> tuple[Tensor, ...]:
    norm = Norm(kind, epsilon, zero_centered, through)
    return present(
        *fake_codes(x, x.shape, format, columnwise=columnwise),
        x.new_empty(x.shape, dtype=output_dtype(x, norm)) if return_output else None,
        x.new_empty((x.shape[0],), dtype=torch.float32) if kind == "layer" else None,
        x.new_empty((x.shape[0],), dtype=torch.float32),
        x.new_empty((), dtype=torch.float32) if gather else None,
        like=x,
    )


def _output_implementation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    through: torch.dtype | None,
) -> tuple[Tensor, ...]:
    output, amaxes, mean, rstd = _launch_output(x, Norm(kind, epsilon, zero_centered, through), weight, bias)
    return present(output, one_part(amaxes), mean, rstd, like=x)


def _output_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: str,
    epsilon: str,
    zero_centered: bool,
    through: torch.dtype | None,
) -> tuple[Tensor, ...]:
    return present(
        x.new_empty(x.shape, dtype=output_dtype(x, Norm(kind, epsilon, zero_centered, through))),
        x.new_empty((1,), dtype=torch.float32),
        x.new_empty((x.shape[0],), dtype=torch.float32) if kind == "layer" else None,
        x.new_empty((x.shape[0],), dtype=torch.float32),
        like=x,
    )


_NORM = "Tensor x, Tensor? weight, Tensor? bias, str kind, str epsilon, bool zero_centered, ScalarType? through"
_operator = register(
    f"norm_cast({_NORM}, str format, Tensor scale, bool gather, bool columnwise, bool return_output)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _implementation,
    _fake,
)
_output_operator = register(
    f"norm_output({_NORM}) -> (Tensor, Tensor, Tensor, Tensor)", _output_implementation, _output_fake
)

__all__ = [
    "Norm",
    "NormCastOutput",
    "NormOutput",
    "norm_cast",
    "norm_cast_reference",
    "norm_output",
    "norm_output_reference",
    "unsupported_reasons",
]
