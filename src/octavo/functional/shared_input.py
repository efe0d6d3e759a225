"""Layers on one input quantize it once: q, k and v, gate and up.

What was quantized last is kept as long as that very tensor lives and its version stays. Another layer takes it, once,
on the same stream, if it would make the same codes (the same spec, and the same state or none) and if

- it is of the same group: layers that `convert` found to run on one input, which have one state for it; or
- a normalisation in front of it made the codes (`octavo.functional.norm_ahead`); or
- the input is an activation that autograd made, and no CUDA graph is being captured.

Anything else may be a buffer that is filled again and again by what raises no version: a collective, a DLPack or NumPy
view, somebody's kernel, the replay of a graph. So it is cast anew.

Eager code only: compiled code has each cast in its graph, where those that repeat one another are dropped. Operators
the compiler compares by itself, in graphs that have a backward; on a GPU the casts are Triton kernels, which
`octavo.kernels.repeated_launches` compares, with a backward and without.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.runtime import LinearPlan
from octavo.tensor import Operand, OperandState, Quantizer


class _Cast(NamedTuple):
    """How an input was quantized."""

    dtype: torch.dtype
    origin: tuple[Any, ...]
    columnwise: bool


class _Made:
    __slots__ = ("captured", "cast", "group", "on_taken", "operand", "stream", "takers", "version", "x")

    def __init__(self, x: Tensor, cast: _Cast, operand: Operand, group: OperandState | None, *takers: object) -> None:
        self.x = weakref.ref(x, _forget)
        self.version = x._version
        self.stream, self.captured = _stream_of(x), _is_captured(x)
        self.cast = cast
        self.operand = operand
        self.group = group
        self.takers = [*takers]
        self.on_taken: Callable[[], None] | None = None

    def fits(self, x: Tensor, dtype: torch.dtype, origin: tuple[Any, ...], columnwise: bool, owner: object) -> bool:
        """True if these are the codes that `owner` would make of x, and it has not had them."""
        cast = self.cast
        return (
            self.x() is x
            and self.version == x._version
            and cast.dtype is dtype
            and (cast.columnwise or not columnwise)
            and not any(taker is owner for taker in self.takers)
            and same_origin(cast.origin, origin)
        )

    def is_for(self, x: Tensor, group: OperandState | None) -> bool:
        """True if x is sure to be what it was, for a layer of this group."""
        if self.stream != _stream_of(x) or self.captured != _is_captured(x):
            return False
        return self.group is _FOLLOWERS or self.group is group is not None or not (self.captured or x.is_leaf)


class _Last(threading.local):
    made: _Made | None = None


_LAST = _Last()
# Stands for the group of all layers behind a normalisation.
_FOLLOWERS: Any = object()


def quantize_input(
    x: Tensor,
    plan: LinearPlan,
    dtype: torch.dtype,
    columnwise: bool,
    cast: Callable[[Tensor], Operand] | None = None,
) -> Operand:
    """Codes of an input x [..., K], as the matrix [M, K] of `dtype`, row-wise and on request column-wise too.

    Args:
        x: the input.
        plan: of the layer, which takes what another one made, and never twice the same.
        dtype: of what is quantized.
        columnwise: both layouts are wanted.
        cast: makes what the plan's quantizer would make of the matrix, and is called where that one would be.
    """
    quantizer, owner, group = plan.input, plan.owner, plan.group
    origin = getattr(quantizer, "origin", None)
    where = None if origin is None or torch.compiler.is_compiling() or x.is_inference() else origin()
    if where is None:
        return _cast_anew(x, plan, dtype, columnwise, cast)
    made = _LAST.made
    if made is not None and made.fits(x, dtype, where, columnwise, owner) and made.is_for(x, group):
        quantizer.note(made.operand)  # type: ignore[attr-defined]
        if made.on_taken is not None:
            made.on_taken()
            made.on_taken = None
        made.takers.append(owner)
        return made.operand
    operand = _cast_anew(x, plan, dtype, columnwise, cast)
    _LAST.made = _Made(x, _Cast(dtype, where, columnwise), operand, group, owner) if _may_be_taken(x, group) else None
    return operand


def _cast_anew(
    x: Tensor, plan: LinearPlan, dtype: torch.dtype, columnwise: bool, cast: Callable[[Tensor], Operand] | None
) -> Operand:
    rows = _as_matrix(x, dtype)
    return plan.input(rows, True, columnwise) if cast is None else cast(rows)


def keep_for_followers(
    x: Tensor,
    operand: Operand,
    quantizer: Quantizer,
    dtype: torch.dtype,
    columnwise: bool,
    on_taken: Callable[[], None] | None,
) -> None:
    """Let the layers behind a normalisation find the codes of its output x [..., K].

    Args:
        x: the output.
        operand: what `quantizer` makes of it.
        quantizer: of the input of the first of them.
        dtype, columnwise: as of `quantize_input`.
        on_taken: called when the first of them takes the codes.
    """
    origin = getattr(quantizer, "origin", None)
    where = None if origin is None or torch.compiler.is_compiling() or x.is_inference() else origin()
    if where is not None:
        _LAST.made = _Made(x, _Cast(dtype, where, columnwise), operand, _FOLLOWERS)
        _LAST.made.on_taken = on_taken


def same_origin(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """True if quantizers of these origins make the same codes of the same data."""
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


def _may_be_taken(x: Tensor, group: OperandState | None) -> bool:
    """True if there can be another layer that `is_for` lets have the codes of x."""
    if not x.is_leaf:
        return True
    # A weak reference would keep `torch.utils.swap_tensors`, and with it `module.to`, from a parameter.
    return group is not None and group.shared and not isinstance(x, nn.Parameter)


def _stream_of(x: Tensor) -> int:
    """Which stream the codes of x are made on now."""
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


def _is_captured(x: Tensor) -> bool:
    """True if what is done to x now becomes part of a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _forget(reference: weakref.ref[Tensor]) -> None:
    made = _LAST.made
    if made is not None and made.x is reference:
        _LAST.made = None


def _as_matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    rows = as_rows(x)
    return rows if rows.dtype is dtype else rows.to(dtype)


def as_rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
