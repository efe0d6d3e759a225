"""The casts of activations under the compiler on a GPU: as `octavo.kernels.compiled` has those of Linears."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

import octavo.kernels.compiled  # noqa: F401 - sets how Inductor launches Triton kernels of others
from octavo.formats import format_named
from octavo.kernels.activation_backward_cast import triton_kernel as backward_kernels
from octavo.kernels.activation_cast import triton_kernel as cast_kernels
from octavo.kernels.known_writes import remember_writes
from octavo.kernels.tile import with_contiguous_rows

remember_writes(
    cast_kernels.activation_cast_kernel,
    cast_kernels.activation_output_kernel,
    backward_kernels.activation_backward_cast_kernel,
    backward_kernels.activation_backward_output_kernel,
)


@triton_op("octavo::activation_cast_inductor", mutates_args={"gathered"})
def activation_cast_inductor(
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
    channels: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`octavo.kernels.activation_cast.activation_cast`; an empty tensor for what is not wanted."""
    # A new scalar Inductor would fill before it is written, a vector it leaves alone.
    used = x.new_empty((1,), dtype=torch.float32)
    call = cast_kernels.prepare_cast(
        with_contiguous_rows(x), activation, format_named(format), scale, through, gathered, rowwise, columnwise,
        None if channels is None else channels.contiguous(), used,
    )  # fmt: skip
    wrap_triton(cast_kernels.activation_cast_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=cast_kernels.WARPS
    )
    codes, used, codes_t = call.outputs
    codes, codes_t = (x.new_empty(0) if out is None else out for out in (codes, codes_t))
    return codes, used.reshape(()), codes_t


@triton_op("octavo::activation_output_inductor", mutates_args=())
def activation_output_inductor(
    x: Tensor, activation: str, dtype: torch.dtype, channels: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`octavo.kernels.activation_cast.activation_output`."""
    channels = None if channels is None else channels.contiguous()
    call = cast_kernels.prepare_output(with_contiguous_rows(x), activation, dtype, channels)
    wrap_triton(cast_kernels.activation_output_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=cast_kernels.OUTPUT_WARPS
    )
    output, amaxes = call.outputs
    return output, amaxes


@triton_op("octavo::activation_backward_cast_inductor", mutates_args={"gathered"})
def activation_backward_cast_inductor(
    grad: Tensor,
    x: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`octavo.kernels.activation_backward_cast.activation_backward_cast`; an empty tensor for what is not wanted."""
    used = x.new_empty((1,), dtype=torch.float32)
    call = backward_kernels.prepare_backward(
        with_contiguous_rows(grad), with_contiguous_rows(x), activation, format_named(format), scale, through, gathered,
        inf_to_nan, column_sum, used,
    )  # fmt: skip
    wrap_triton(backward_kernels.activation_backward_cast_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=backward_kernels.warps_of(activation)
    )
    codes, used, codes_t, parts = call.outputs
    return codes, used.reshape(()), codes_t, x.new_empty(0) if parts is None else parts.sum(0)


@triton_op("octavo::activation_backward_output_inductor", mutates_args=())
def activation_backward_output_inductor(
    grad: Tensor, x: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`octavo.kernels.activation_backward_cast.activation_backward_output`."""
    call = backward_kernels.prepare_backward_output(
        with_contiguous_rows(grad), with_contiguous_rows(x), activation, dtype
    )
    wrap_triton(backward_kernels.activation_backward_output_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=backward_kernels.OUTPUT_WARPS
    )
    output, amaxes = call.outputs
    return output, amaxes
