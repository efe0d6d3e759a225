"""Layers on one input quantize it once: q, k and v, gate and up.

What a layer quantized last is kept as long as that very tensor lives and stays as it was. The next layer takes it,
once, if it would make the same: the same spec, and the same state or none. (Layers whose inputs are scaled with delay
have a state each, unless `convert` found that they run on one input and gave them one.)

Eager code only: compiled code has each cast in its graph, where those that repeat one another are dropped. Operators
the compiler compares by itself, in graphs that have a backward; on a GPU the casts are Triton kernels, which
`octavo.kernels.repeated_launches` compares, with a backward and without.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from octavo.tensor import Operand, Quantizer


class _Made:
    __slots__ = ("columnwise", "dtype", "operand", "origin", "takers", "version", "x")

    def __init__(
        self, x: Tensor, dtype: torch.dtype, origin: tuple[Any, ...], columnwise: bool, operand: Operand, owner: object
    ) -> None:
        self.x = weakref.ref(x, _forget)
        self.version = x._version
        self.dtype = dtype
        self.origin = origin
        self.columnwise = columnwise
        self.operand = operand
        self.takers = [owner]


class _Last(threading.local):
    made: _Made | None = None


_LAST = _Last()


def quantize_input(x: Tensor, quantizer: Quantizer, owner: object, dtype: torch.dtype, columnwise: bool) -> Operand:
    """Codes of an input x [..., K], as the matrix [M, K] of `dtype`, row-wise and on request column-wise too.

    Args:
        x: the input.
        quantizer, owner: of the layer; an owner takes what another one made, and never twice the same.
        dtype: of what is quantized.
        columnwise: both layouts are wanted.
    """
    origin = getattr(quantizer, "origin", None)
    where = None if origin is None or torch.compiler.is_compiling() or x.is_inference() else origin()
    if where is None:
        return quantizer(_as_matrix(x, dtype), True, columnwise)
    made = _LAST.made
    if (
        made is not None
        and made.x() is x
        and made.version == x._version
        and made.dtype is dtype
        and (made.columnwise or not columnwise)
        and not any(taker is owner for taker in made.takers)
        and len(made.origin) == len(where)
        and all(a is b for a, b in zip(made.origin, where, strict=True))
    ):
        quantizer.note(made.operand)  # type: ignore[attr-defined]
        made.takers.append(owner)
        return made.operand
    operand = quantizer(_as_matrix(x, dtype), True, columnwise)
    _LAST.made = _Made(x, dtype, where, columnwise, operand, owner)
    return operand


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
