"""The casts of gated MLPs under the compiler on a GPU: as `octavo.kernels.compiled` has those of Linears."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

import octavo.kernels.compiled  # noqa: F401 - sets how Inductor launches Triton kernels of others
from octavo.formats import format_named
from octavo.kernels.gated_backward_cast import triton_kernel as backward_kernels
from octavo.kernels.gated_cast import triton_kernel as cast_kernels
from octavo.kernels.known_writes import remember_writes
from octavo.kernels.tile import with_contiguous_rows

remember_writes(
    cast_kernels.gated_cast_kernel,
    cast_kernels.gated_output_kernel,
    backward_kernels.gated_backward_cast_kernel,
    backward_kernels.gated_backward_output_kernel,
)


@triton_op("octavo::gated_cast_inductor", mutates_args={"gathered"})
def gated_cast_inductor(
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale: Tensor,
    through: torch.dtype | None,
    gathered: Tensor | None,
    rowwise: bool,
    columnwise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`octavo.kernels.gated_cast.gated_cast`; an empty tensor for what is not wanted."""
    # A new scalar Inductor would fill before it is written, a vector it leaves alone.
    used = gate.new_empty((1,), dtype=torch.float32)
    call = cast_kernels.prepare_cast(
        with_contiguous_rows(gate), with_contiguous_rows(up), activation, format_named(format), scale, through,
        gathered, rowwise, columnwise, used,
    )  # fmt: skip
    wrap_triton(cast_kernels.gated_cast_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=cast_kernels.WARPS
    )
    codes, used, codes_t = call.outputs
    codes, codes_t = (gate.new_empty(0) if out is None else out for out in (codes, codes_t))
    return codes, used.reshape(()), codes_t


@triton_op("octavo::gated_backward_cast_inductor", mutates_args={"gathered_gate", "gathered_up"})
def gated_backward_cast_inductor(
    grad: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: str,
    format: str,
    scale_gate: Tensor,
    scale_up: Tensor,
    through: torch.dtype | None,
    gathered_gate: Tensor | None,
    gathered_up: Tensor | None,
    inf_to_nan: bool,
    sum_gate: bool,
    sum_up: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`octavo.kernels.gated_backward_cast.gated_backward_cast`; an empty tensor for what is not wanted."""
    used = (gate.new_empty((1,), dtype=torch.float32), gate.new_empty((1,), dtype=torch.float32))
    call = backward_kernels.prepare_backward(
        with_contiguous_rows(grad), with_contiguous_rows(gate), with_contiguous_rows(up), activation,
        format_named(format), (scale_gate, scale_up), through, (gathered_gate, gathered_up), inf_to_nan,
        (sum_gate, sum_up), used,
    )  # fmt: skip
    wrap_triton(backward_kernels.gated_backward_cast_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=backward_kernels.WARPS
    )
    (codes, scale, codes_t, parts), (codes_2, scale_2, codes_t_2, parts_2) = call.outputs
    sums, sums_2 = (gate.new_empty(0) if part is None else part.sum(0) for part in (parts, parts_2))
    return codes, scale.reshape(()), codes_t, sums, codes_2, scale_2.reshape(()), codes_t_2, sums_2


@triton_op("octavo::gated_output_inductor", mutates_args=())
def gated_output_inductor(gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`octavo.kernels.gated_cast.gated_output`."""
    call = cast_kernels.prepare_output(with_contiguous_rows(gate), with_contiguous_rows(up), activation, dtype)
    wrap_triton(cast_kernels.gated_output_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=cast_kernels.OUTPUT_WARPS
    )
    output, amaxes = call.outputs
    return output, amaxes


@triton_op("octavo::gated_backward_output_inductor", mutates_args=())
def gated_backward_output_inductor(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`octavo.kernels.gated_backward_cast.gated_backward_output`: both gradients, then the amaxes of both."""
    call = backward_kernels.prepare_backward_output(
        with_contiguous_rows(grad), with_contiguous_rows(gate), with_contiguous_rows(up), activation, dtype
    )
    wrap_triton(backward_kernels.gated_backward_output_kernel)[(call.programs,)](
        *call.tensors, *call.numbers, *call.constants, num_warps=backward_kernels.OUTPUT_WARPS
    )
    dgate, dup, amaxes, amaxes_2 = call.outputs
    return dgate, dup, amaxes, amaxes_2
