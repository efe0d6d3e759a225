"""Kernels under the compiler on a GPU: Triton kernels that Inductor sees, launches and allocates for by itself.

An opaque operator costs compiled code the dispatcher's way to Python at every call, longer than a small kernel runs. A
`triton_op` dissolves into the same kernels that eager code launches, with the same arguments, so that casts round the
same; what is around them stays Inductor's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from octavo.formats import format_named
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.cast_transpose import triton_kernel as cast_kernels
from octavo.kernels.cast_transpose.rule import ScaleRule


@triton_op("octavo::partial_amax_inductor", mutates_args=())
def partial_amax_inductor(x: Tensor) -> Tensor:
    """`octavo.kernels.amax.partial_amax`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out, inputs, constants = amax_kernels.prepare_partial(x)
    wrap_triton(amax_kernels.partial_amax_kernel)[(out.shape[0],)](*inputs, *constants, num_warps=amax_kernels.WARPS)
    return out


@triton_op("octavo::amax_by_row_and_column_inductor", mutates_args=())
def amax_by_row_and_column_inductor(x: Tensor, row: bool, column: bool) -> tuple[Tensor, Tensor]:
    """`octavo.kernels.amax.amax_by_row_and_column`; an empty tensor for what is not wanted."""
    x = x if x.stride(1) == 1 else x.contiguous()
    outputs, programs, inputs, constants = amax_kernels.prepare_by_row_and_column(x, row, column)
    wrap_triton(amax_kernels.amax_by_row_and_column_kernel)[(programs,)](
        *inputs, *constants, num_warps=amax_kernels.WARPS
    )
    by_row, by_column = (x.new_empty(0, dtype=torch.float32) if out is None else out for out in outputs)
    return by_row, by_column


@triton_op("octavo::cast_transpose_inductor", mutates_args={"gathered"})
def cast_transpose_inductor(
    x: Tensor,
    format: str,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    epsilon: str | None,
    power_of_two: bool,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
    shared: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`octavo.kernels.cast_transpose.cast_transpose`; an empty tensor for what is not wanted. The sums are partial."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rule = None if epsilon is None else ScaleRule(epsilon, power_of_two)
    outputs, programs, inputs, constants = cast_kernels.prepare(
        x, format_named(format), rowwise, rowwise if shared else columnwise, rule, gathered, inf_to_nan, column_sum
    )
    wrap_triton(cast_kernels.cast_transpose_kernel)[(programs,)](*inputs, *constants, num_warps=cast_kernels.WARPS)
    codes, scale, codes_t, scale_t, sums = outputs
    codes, scale, codes_t, scale_t, sums = (
        x.new_empty(0) if out is None else out for out in (codes, scale, codes_t, None if shared else scale_t, sums)
    )
    return codes, scale, codes_t, scale_t, sums
