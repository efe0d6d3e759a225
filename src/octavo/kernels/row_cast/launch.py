"""row_cast on a GPU: launches of its kernels, one program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from octavo.formats import Format
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.codes import CODE_DTYPES
from octavo.kernels.launcher import Launcher, WithOptions
from octavo.kernels.layout import padded
from octavo.kernels.norm_cast.norm import Norm
from octavo.kernels.norm_cast.reference import output_dtype
from octavo.kernels.row_cast.triton_kernel import gated_row_cast_kernel, norm_row_cast_kernel, row_cast_kernel
from octavo.kernels.tile import INTERPRETED, THROUGH_DTYPES, key_of, key_of_numbers, with_contiguous_rows
from octavo.scaling.rules import LARGEST_MULTIPLIER, SMALLEST_MULTIPLIER

# Elements of a row that a thread has: 64 bytes of bf16, four loads of 16.
_BY_THREAD = 32
_MOST_WARPS = 16
# Products and sums stay apart.
OPTIONS = {"enable_fp_fusion": False}
_launch_row = Launcher(row_cast_kernel)
_launch_gated = Launcher(gated_row_cast_kernel)
_launch_norm = Launcher(WithOptions(norm_row_cast_kernel, **OPTIONS))


def row_cast_triton(x: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.row_cast.row_cast`, without its `unsupported_reasons`."""
    x = with_contiguous_rows(x)
    codes, scale = _written(x, format)
    constants, warps = _constants(x, format, rule)
    numbers = (*x.shape, x.stride(0))
    key = (key_of(x), key_of_numbers(*numbers), format.name, constants)
    _launch_row(codes.shape[0], key, (x, codes, scale), numbers, constants, warps)
    return codes, scale


def gated_row_cast_triton(
    gate: Tensor, up: Tensor | None, activation: str, format: Format, rule: ScaleRule, through: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As `octavo.kernels.row_cast.gated_row_cast`, without `unsupported_reasons`."""
    gate = with_contiguous_rows(gate)
    second = gate if up is None else with_contiguous_rows(up)
    codes, scale = _written(gate, format)
    common, warps = _constants(gate, format, rule)
    constants = (activation, up is not None, THROUGH_DTYPES[through], INTERPRETED, *common)
    numbers = (*gate.shape, gate.stride(0), second.stride(0))
    key = (key_of(gate, second), key_of_numbers(*numbers), format.name, constants)
    _launch_gated(codes.shape[0], key, (gate, second, codes, scale), numbers, constants, warps)
    return codes, scale


def norm_row_cast_triton(
    x: Tensor,
    norm: Norm,
    weight: Tensor | None,
    bias: Tensor | None,
    format: Format,
    rule: ScaleRule,
    return_output: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """As `octavo.kernels.row_cast.norm_row_cast`, without `unsupported_reasons`."""
    dtype = output_dtype(x, norm)
    x = with_contiguous_rows(x)
    codes, scale = _written(x, format)
    output = x.new_empty(x.shape, dtype=dtype) if return_output else None
    rstd = x.new_empty(x.shape[0], dtype=torch.float32)
    mean = torch.empty_like(rstd) if norm.kind == "layer" else None
    # A pointer that the flags leave unused may be any.
    tensors = tuple(x if one is None else one for one in (x, weight, bias, codes, scale, output, mean, rstd))
    common, warps = _constants(x, format, rule)
    constants = (
        norm.kind == "layer", norm.epsilon, weight is not None, bias is not None, float(norm.zero_centered),
        THROUGH_DTYPES[dtype], output is not None, INTERPRETED, *common,
    )  # fmt: skip
    numbers = (*x.shape, x.stride(0))
    key = (key_of(x, weight, bias), dtype, key_of_numbers(*numbers), format.name, constants)
    _launch_norm(codes.shape[0], key, tensors, numbers, constants, warps)
    return codes, scale, output, mean, rstd


def _written(x: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Codes and scales of a matrix, to be written."""
    rows, columns = map(padded, x.shape)
    return x.new_empty((rows, columns), dtype=format.dtype), x.new_empty((rows, 1), dtype=torch.float32)


def _constants(x: Tensor, format: Format, rule: ScaleRule) -> tuple[tuple[Any, ...], int]:
    """What all three kernels end with, and warps of a program."""
    block = triton.next_power_of_2(padded(x.shape[1]))
    constants = (
        rule.epsilon, rule.power_of_two, format.max, SMALLEST_MULTIPLIER, LARGEST_MULTIPLIER, CODE_DTYPES[format.name],
        block,
    )  # fmt: skip
    return constants, min(_MOST_WARPS, max(1, block // (32 * _BY_THREAD)))
