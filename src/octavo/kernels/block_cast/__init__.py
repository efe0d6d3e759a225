"""block_cast: one read of a matrix, its codes in both layouts under scales by block.

    codes   [M', K'']    cast(x / scale)        1x128: one scale for 128 neighbours of a row of x
    codes_t [K', M'']    cast(x / scale_t)^T    1x128: one for 128 neighbours of a column of x
                                                128x128: the same codes, the transposed scales
                                                MX: as 1x128, but 32 neighbours, and a scale in E8M0
    column_sum [K]       sum of x over its rows, in float32

M' is M rounded up to a multiple of 16, M'' of 128 (of MX 32); likewise K. Scales are in the layout that the product
reads, `octavo.kernels.block_cast.layout`. A product's blocks lie along its K, which is M in the weight gradient:
activations and gradients are quantized twice, each time from high precision, and weights once (under MX twice, too).

The amax of every block comes from the same read: a tile of 128 x 128 holds 128 blocks of either kind. Bytes moved an
element of bf16: 2 read, 2 written, and 4 / 128 a scale; current scaling with one scale a tensor reads twice. The
Triton twin knows blocks of 128; MX is cast by the reference on every device. `block_cast_pair` casts two matrices, by
one launch where it can.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.formats import Format, format_named
from octavo.kernels.block_cast.layout import (
    BLOCK,
    block_of,
    block_under,
    check_granularity,
    expanded,
    has_blocks,
    is_by_row,
    lay_out,
    scale_dtype,
    scale_shape,
    whole_blocks,
)
from octavo.kernels.block_cast.reference import block_cast_reference
from octavo.kernels.cast_transpose import CastOutput, ScaleRule
from octavo.kernels.layout import padded
from octavo.kernels.library import register
from octavo.kernels.triton_support import cast_reasons, runs_compiled, runs_on
from octavo.scaling import BLOCK_1X128, MX, Granularity, ScaleRounding, granularity_named


def block_cast(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool = True,
    columnwise: bool = True,
    *,
    inf_to_nan: bool = False,
    column_sum: bool = False,
) -> CastOutput:
    """Codes of a matrix x [M, K] (any floating dtype, any strides) under scales by block.

    Args:
        x: the matrix.
        format: of both layouts.
        granularity: BLOCK_1X128, or BLOCK_128X128 for weights; or MX.
        rule: how scales come from amaxes.
        rowwise, columnwise: give `codes`, give `codes_t`.
        inf_to_nan: ±inf becomes NaN instead of ±M: for gradients, so that a loss scaler still sees the overflow.
        column_sum: give the sums as well.

    Raises:
        ValueError: x is no floating-point matrix, or the granularity another one.
    """
    if torch.compiler.is_compiling():
        return _compiled(x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum)
    return CastOutput(*_launch(x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum))


class BlockCast(NamedTuple):
    """A cast that is to be made: arguments of `block_cast`."""

    x: Tensor
    format: Format
    granularity: Granularity
    rule: ScaleRule
    rowwise: bool = True
    columnwise: bool = True


def block_cast_pair(x: BlockCast, w: BlockCast) -> tuple[CastOutput, CastOutput]:
    """Codes of two matrices x [M, K] and w [N, L], bit for bit those of two calls of `block_cast`.

    One launch where both lie on one GPU, are of bf16 or fp16 (each of its own) and not empty, and have contiguous rows
    in words of two elements, see `octavo.kernels.amax.packed_kernel.is_packed`. Else it is two calls.

    Raises:
        ValueError: as `block_cast`.
    """
    if torch.compiler.is_compiling() or not _is_one_launch(x, w):
        return block_cast(*x), block_cast(*w)
    from octavo.kernels.block_cast.pair_kernel import block_cast_pair_triton

    of_x, of_w = block_cast_pair_triton(x, w)
    return CastOutput(*of_x), CastOutput(*of_w)


def unsupported_reasons(x: Tensor, format: Format, granularity: Granularity = BLOCK_1X128) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    blocks = [] if _has_twin(granularity) else [f"scales by {granularity}: the kernel has blocks of 128 only"]
    return cast_reasons(x, format) + blocks


def _has_twin(granularity: Granularity) -> bool:
    return granularity is not MX


def _launches(x: Tensor, format: Format, granularity: Granularity, rowwise: bool, columnwise: bool) -> bool:
    """Whether the Triton twin casts x [M, K] in eager code."""
    launches = x.is_cuda and x.numel() and x.shape[1] != 1 and (rowwise or columnwise) and _has_twin(granularity)
    return bool(launches) and runs_on(x.device.index, format.name)


def _is_one_launch(x: BlockCast, w: BlockCast) -> bool:
    if x.x.get_device() != w.x.get_device():
        return False
    for matrix, format, granularity, _, rowwise, columnwise in (x, w):
        check_granularity(granularity)
        if matrix.dim() != 2 or matrix.stride(1) != 1:
            return False
        if not _launches(matrix, format, granularity, rowwise, columnwise):
            return False
    from octavo.kernels.amax.packed_kernel import is_packed

    return is_packed(x.x) and is_packed(w.x)


def _launch(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"block_cast takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}")
    check_granularity(granularity)
    if _launches(x, format, granularity, rowwise, columnwise):
        from octavo.kernels.block_cast.triton_kernel import block_cast_triton

        return block_cast_triton(x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum)
    return block_cast_reference(x, format, granularity, rule, rowwise, columnwise, inf_to_nan, column_sum)


def _compiled(
    x: Tensor,
    format: Format,
    granularity: Granularity,
    rule: ScaleRule,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> CastOutput:
    # Inductor makes a constant of every integer that is 1, the number of rows included, and one row is then what one
    # column is, see `one_column_reasons`. (The operator launches as eager code does.)
    several = x.shape[0] != 1 and x.shape[1] != 1
    launches = x.is_cuda and several and (rowwise or columnwise) and _has_twin(granularity)
    native = launches and runs_compiled(x.device.index, format.name)
    operator = _inductor_operator() if native else _operator
    outputs = operator(x, format.name, granularity.name, *rule, rowwise, columnwise, inf_to_nan, column_sum)
    wanted = (rowwise, rowwise, columnwise, columnwise, column_sum)
    codes, scale, codes_t, scale_t, sums = (out if want else None for out, want in zip(outputs, wanted, strict=True))
    return CastOutput(codes, scale, codes_t, scale_t, sums)


def _inductor_operator() -> Any:
    from octavo.kernels.block_cast.compiled import block_cast_inductor

    return block_cast_inductor


def _operator_implementation(
    x: Tensor,
    format: str,
    granularity: str,
    epsilon: str,
    power_of_two: bool,
    rounding: ScaleRounding,
    rowwise: bool,
    columnwise: bool,
    inf_to_nan: bool,
    column_sum: bool,
) -> tuple[Tensor, ...]:
    blocks, rule = granularity_named(granularity), ScaleRule(epsilon, power_of_two, rounding)
    outputs = _launch(x, format_named(format), blocks, rule, rowwise, columnwise, inf_to_nan, column_sum)
    # An operator returns tensors only, none of them twice: what was left out is an empty one.
    return tuple(x.new_empty(0) if out is None else out for out in outputs)


def _fake(
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
) -> tuple[Tensor, ...]:
    (rows, columns), dtype, blocks = x.shape, format_named(format).dtype, granularity_named(granularity)

    def layout(wanted: bool, tall: int, wide: int) -> tuple[Tensor, Tensor]:
        if not wanted:
            return x.new_empty(0), x.new_empty(0)
        codes = x.new_empty((padded(tall), whole_blocks(wide, block_of(blocks))), dtype=dtype)
        return codes, x.new_empty(scale_shape(tall, wide, blocks), dtype=scale_dtype(blocks))

    sums = x.new_empty((columns,), dtype=torch.float32) if column_sum else x.new_empty(0)
    return *layout(rowwise, rows, columns), *layout(columnwise, columns, rows), sums


_operator = register(
    "block_cast(Tensor x, str format, str granularity, str epsilon, bool power_of_two, str rounding, bool rowwise,"
    " bool columnwise, bool inf_to_nan, bool column_sum) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_implementation,
    _fake,
)

__all__ = [
    "BLOCK",
    "BlockCast",
    "block_cast",
    "block_cast_pair",
    "block_cast_reference",
    "block_of",
    "block_under",
    "expanded",
    "has_blocks",
    "is_by_row",
    "lay_out",
    "scale_dtype",
    "scale_shape",
    "unsupported_reasons",
    "whole_blocks",
]
