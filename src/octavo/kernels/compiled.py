"""Kernels under the compiler on a GPU: Triton kernels that Inductor sees, launches and allocates for by itself.

An opaque operator costs compiled code the dispatcher's way to Python at every call, longer than a small kernel runs. A
`triton_op` dissolves into the same kernels that eager code launches, with the same arguments, so that casts round the
same; what is around them stays Inductor's.
"""

from __future__ import annotations

import os

import torch
import torch._inductor.config
from torch import Tensor
from torch.library import triton_op, wrap_triton

from octavo.formats import format_named
from octavo.kernels import sum_kernel
from octavo.kernels.amax import triton_kernel as amax_kernels
from octavo.kernels.cast_transpose import launch as cast_kernels
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.known_writes import remember_writes
from octavo.kernels.repeated_launches import share_repeats

# Off by default in torch 2.11 to 2.13, and then every launch goes through Triton's own launcher, which asks the driver
# about each pointer. The processes in which Inductor compiles decide on it too, and are told by the environment alone;
# they start with the first compilation, which is when this file is imported.
if hasattr(torch._inductor.config, "static_launch_user_defined_triton_kernels"):
    torch._inductor.config.static_launch_user_defined_triton_kernels = True
    os.environ.setdefault("TORCHINDUCTOR_STATIC_LAUNCH_USER_DEFINED_TRITON_KERNELS", "1")

remember_writes(amax_kernels.partial_amax_kernel, cast_kernels.cast_transpose_kernel, sum_kernel.join_sums_kernel)
share_repeats(amax_kernels.partial_amax_kernel)
share_repeats(cast_kernels.cast_transpose_kernel, gathers="gathered")
share_repeats(sum_kernel.join_sums_kernel)


@triton_op("octavo::partial_amax_inductor", mutates_args=())
def partial_amax_inductor(x: Tensor) -> Tensor:
    """`octavo.kernels.amax.partial_amax`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out, numbers, constants = amax_kernels.prepare_partial(x)
    wrap_triton(amax_kernels.partial_amax_kernel)[(constants[-1],)](
        x, out, *numbers, *constants, num_warps=amax_kernels.WARPS
    )
    return out


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
    """`octavo.kernels.cast_transpose.cast_transpose`; an empty tensor for what is not wanted."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rule = None if epsilon is None else ScaleRule(epsilon, power_of_two)
    outputs, programs, tensors, numbers, constants = cast_kernels.prepare(
        x, format_named(format), rowwise, rowwise if shared else columnwise, rule, gathered, inf_to_nan, column_sum
    )
    wrap_triton(cast_kernels.cast_transpose_kernel)[(programs,)](
        *tensors, *numbers, *constants, num_warps=cast_kernels.WARPS
    )
    codes, scale, codes_t, scale_t, parts = outputs
    sums = None if parts is None else joined_sums(parts, x.shape[1])
    if scale is not None and rowwise is not None and rowwise.dim() != 2:
        scale = scale.reshape(())
    if scale_t is not None and columnwise is not None and columnwise.dim() != 2:
        scale_t = scale_t.reshape(())
    codes, scale, codes_t, scale_t, sums = (
        x.new_empty(0) if out is None else out for out in (codes, scale, codes_t, None if shared else scale_t, sums)
    )
    return codes, scale, codes_t, scale_t, sums


def joined_sums(parts: Tensor, columns: int) -> Tensor:
    """`octavo.kernels.sum_kernel.joined_sums`, in an operator that dissolves into kernels."""
    programs, numbers, constants = sum_kernel.join_arguments(parts.shape[0] // columns, columns)
    sums = parts.new_empty((columns,))
    wrap_triton(sum_kernel.join_sums_kernel)[(programs,)](parts, sums, *numbers, *constants, num_warps=sum_kernel.WARPS)
    return sums
