"""amax: one read of a matrix, the largest finite magnitude of the whole, of each row, of each column.

Price: a pass over memory of its own (2 bytes an element in bf16), which delayed scaling does without.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo.kernels.amax.reference import amax_by_row_and_column_reference, amax_reference
from octavo.kernels.launcher import Prepared
from octavo.kernels.library import register
from octavo.kernels.triton_support import device_reasons, runs_compiled, uses_triton
from octavo.scaling import COLUMN, ROW, TENSOR, Granularity

# What runs calls of late, by all that decides on it.
_PREPARED = Prepared()


def amax(x: Tensor, granularity: Granularity = TENSOR) -> Tensor:
    """Largest finite magnitude of a matrix x [M, K], any floating dtype and strides.

    Returns:
        float32: [] for TENSOR, [M, 1] for ROW, [1, K] for COLUMN. inf and NaN are left out; 0 where nothing is left.
        float64 is rounded to float32 first, and what is infinite then is left out too.

    Raises:
        ValueError: x is no floating-point matrix, or the granularity another one.
    """
    if granularity is TENSOR:
        return partial_amax(x).amax()
    if granularity not in (ROW, COLUMN):
        raise ValueError(
            f"amax by tensor, row or column, found granularity {granularity.name}: use scaling.block_amax for blocks"
        )
    by_row, by_column = amax_by_row_and_column(x, granularity is ROW, granularity is COLUMN)
    largest = by_row if granularity is ROW else by_column
    assert largest is not None, "one of the two was asked for"
    return largest


def partial_amax(x: Tensor) -> Tensor:
    """Maxima [P] of parts of a matrix x [M, K], of which the largest is its amax; P is the implementation's choice.

    `cast_transpose` takes them as they are, without a launch to join them.
    """
    if torch.compiler.is_compiling():
        return _compiled_partial(x)
    return _launch_partial(x)


def amax_by_row_and_column(x: Tensor, row: bool = True, column: bool = True) -> tuple[Tensor | None, Tensor | None]:
    """(amax of each row [M, 1], of each column [1, K]) of a matrix x [M, K] in one read; None for one not wanted."""
    if torch.compiler.is_compiling():
        return _compiled_by_row_and_column(x, row, column)
    return _launch_by_row_and_column(x, row, column)


def unsupported_reasons(x: Tensor) -> list[str]:
    """Why the Triton twin does not run for this call; then the PyTorch reference does."""
    return device_reasons(x.device)


def _check(x: Tensor) -> None:
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"amax takes a floating-point matrix [M, K], found {x.dtype} of shape {tuple(x.shape)}")


def _launch_partial(x: Tensor) -> Tensor:
    if not x.is_cuda:
        _check(x)
        return _partial_by_reference(x)
    key = (x.dtype, x.shape, x.stride(), x.get_device(), x.data_ptr() % 16 == 0)
    partial = _PREPARED.get(key)
    if partial is None:
        _check(x)
        partial = _partial_by_reference
        if uses_triton(x) and x.numel():
            from octavo.kernels.amax import triton_kernel

            partial = triton_kernel.prepared_partial(x)
        _PREPARED.keep(key, partial)
    result: Tensor = partial(x)
    return result


def _partial_by_reference(x: Tensor) -> Tensor:
    return amax_reference(x, TENSOR).reshape(1)


def _launch_by_row_and_column(
    x: Tensor, row: bool, column: bool, apart: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    if not x.is_cuda:
        _check(x)
        return amax_by_row_and_column_reference(x, row, column)
    key = (x.dtype, x.shape, x.stride(), x.get_device(), x.data_ptr() % 16 == 0, row, column, apart)
    both = _PREPARED.get(key)
    if both is None:
        _check(x)
        both = functools.partial(amax_by_row_and_column_reference, row=row, column=column)
        if uses_triton(x) and x.numel():
            from octavo.kernels.amax import triton_kernel

            both = triton_kernel.prepared_by_row_and_column(x, row, column, apart)
        _PREPARED.keep(key, both)
    by_row, by_column = both(x)
    return by_row, by_column


def _compiled_partial(x: Tensor) -> Tensor:
    if x.is_cuda and runs_compiled(x.device.index):
        from octavo.kernels.compiled import partial_amax_inductor

        operator = partial_amax_inductor
    else:
        operator = _partial_operator
    result: Tensor = operator(x)
    return result


def _compiled_by_row_and_column(x: Tensor, row: bool, column: bool) -> tuple[Tensor | None, Tensor | None]:
    # Opaque on a GPU too: torch 2.11 cannot lower a Triton kernel whose outputs must start at zero (an assertion).
    by_row, by_column = _by_row_and_column_operator(x, row, column)
    return by_row if row else None, by_column if column else None


def _by_row_and_column(x: Tensor, row: bool, column: bool) -> tuple[Tensor, Tensor]:
    # An operator's outputs share no memory, and are tensors only: what was left out is an empty one.
    by_row, by_column = _launch_by_row_and_column(x, row, column, apart=True)
    return (
        x.new_empty(0, dtype=torch.float32) if by_row is None else by_row,
        x.new_empty(0, dtype=torch.float32) if by_column is None else by_column,
    )


_partial_operator = register(
    "partial_amax(Tensor x) -> Tensor", _launch_partial, lambda x: x.new_empty(1, dtype=torch.float32)
)
_by_row_and_column_operator = register(
    "amax_by_row_and_column(Tensor x, bool row, bool column) -> (Tensor, Tensor)",
    _by_row_and_column,
    lambda x, row, column: (
        x.new_empty((x.shape[0], 1) if row else (0,), dtype=torch.float32),
        x.new_empty((1, x.shape[1]) if column else (0,), dtype=torch.float32),
    ),
)

__all__ = [
    "amax",
    "amax_by_row_and_column",
    "amax_by_row_and_column_reference",
    "amax_reference",
    "partial_amax",
    "unsupported_reasons",
]
