"""block_cast under the compiler on a GPU: the Triton kernel that Inductor sees and launches; see `kernels.compiled`."""

from __future__ import annotations

from torch import Tensor
from torch.library import triton_op, wrap_triton

from octavo.formats import format_named
from octavo.kernels.amax.packed_kernel import has_rows_of_words
from octavo.kernels.block_cast import triton_kernel
from octavo.kernels.block_cast.packed_kernel import packed_block_cast_kernel
from octavo.kernels.cast_transpose.rule import ScaleRule
from octavo.kernels.compiled import joined_sums
from octavo.kernels.known_writes import remember_writes
from octavo.kernels.repeated_launches import share_repeats
from octavo.scaling import granularity_named

remember_writes(triton_kernel.block_cast_kernel, packed_block_cast_kernel)
share_repeats(triton_kernel.block_cast_kernel)
share_repeats(packed_block_cast_kernel)


@triton_op("octavo::block_cast_inductor", mutates_args=())
def block_cast_inductor(
    x: Tensor,
    format: str,
    granularity: str,
    epsilon: str,
    power_of_two: bool,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`octavo.kernels.block_cast.block_cast`; an empty tensor for what is not wanted.

    `rounding` is that of MX scales, which the kernel does not make.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    kernel, outputs, programs, tensors, numbers, constants, warps = triton_kernel.prepare(
        x, format_named(format), granularity_named(granularity), ScaleRule(epsilon, power_of_two), rowwise, columnwise,
        inf_to_nan, column_sum, _is_packed(x),
    )  # fmt: skip
    wrap_triton(kernel)[(programs,)](*tensors, *numbers, *constants, num_warps=warps)
    codes, scale, codes_t, scale_t, parts = outputs
    sums = None if parts is None else joined_sums(parts, x.shape[1])
    codes, scale, codes_t, scale_t, sums = (
        x.new_empty(0) if out is None else out for out in (codes, scale, codes_t, scale_t, sums)
    )
    return codes, scale, codes_t, scale_t, sums


def _is_packed(x: Tensor) -> bool:
    """As `octavo.kernels.amax.packed_kernel.is_packed`, of a matrix that has no address yet.

    Inductor allocates aligned, and copies an input that is not aligned as the traced one was: what begins where its
    memory begins is aligned. Of a view that begins behind that nobody knows, since no guard asks where. Of numbers that
    are not known nothing is asked: each answer would be a graph of its own. One word a row would be a constant of the
    variant, as one column is: see `octavo.kernels.triton_support.one_column_reasons`.
    """
    known = all(isinstance(number, int) for number in (x.shape[1], x.stride(0), x.storage_offset()))
    return known and x.shape[1] != 2 and x.storage_offset() == 0 and has_rows_of_words(x)
