"""Quantizers: a spec and the state it needs make one; called with a matrix it gives an `Operand`.

A quantizer serves one operand of a layer. Wrapping it is how a layer is watched or changed from outside: whatever is
called like one is one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.kernels import amax, cast_transpose, pad_row_scale, scale_from_amax
from octavo.scaling import COLUMN, ROW, TENSOR, Granularity
from octavo.tensor.operand_state import OperandState
from octavo.tensor.spec import QuantizeSpec


class Operand(NamedTuple):
    """A matrix [M, K] as codes in one or both layouts, each K-major and padded to multiples of 16, with its scale.

    codes [M', K'] with scale [] or [M', 1]; codes_t [K', M'] with scale_t [] or [K', 1].
    """

    codes: Tensor | None
    scale: Tensor | None
    codes_t: Tensor | None
    scale_t: Tensor | None

    @property
    def row_wise(self) -> tuple[Tensor, Tensor]:
        """codes and scale, for an operand that was made with them."""
        assert self.codes is not None, "the row-wise layout was not asked for"
        assert self.scale is not None, "codes come with their scale"
        return self.codes, self.scale

    @property
    def column_wise(self) -> tuple[Tensor, Tensor]:
        """codes_t and scale_t, for an operand that was made with them."""
        assert self.codes_t is not None, "the transposed layout was not asked for"
        assert self.scale_t is not None, "codes come with their scale"
        return self.codes_t, self.scale_t

    @property
    def transposed(self) -> Operand:
        """The operand of the transposed matrix: the layouts change places."""
        return Operand(self.codes_t, self.scale_t, self.codes, self.scale)


class Quantizer(Protocol):
    """Makes an operand of a matrix."""

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Codes of x [M, K] in the layouts asked for."""
        ...


class CurrentQuantizer:
    """Current ("just in time") scaling: one pass for the amax, one for the codes."""

    def __init__(self, spec: QuantizeSpec) -> None:
        self.spec = spec

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Codes of x [M, K] under scales measured from it."""
        spec = self.spec
        if spec.granularity is TENSOR:
            multiplier, scale = self._scale(x, TENSOR)
            out = cast_transpose(
                x,
                spec.format,
                multiplier if rowwise else None,
                multiplier if columnwise else None,
                inf_to_nan=spec.inf_to_nan,
            )
            return Operand(out.codes, scale if rowwise else None, out.codes_t, scale if columnwise else None)
        # One scale a row of each layout: a row of the transposed matrix is a column of x.
        by_row = self._scale(x, ROW) if rowwise else (None, None)
        by_column = self._scale(x, COLUMN) if columnwise else (None, None)
        out = cast_transpose(x, spec.format, by_row[0], by_column[0], inf_to_nan=spec.inf_to_nan)
        scale_t = by_column[1]
        return Operand(
            out.codes,
            None if by_row[1] is None else pad_row_scale(by_row[1]),
            out.codes_t,
            None if scale_t is None else pad_row_scale(scale_t.reshape(-1, 1)),
        )

    def _scale(self, x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
        return scale_from_amax(amax(x, granularity), self.spec.format, self.spec.epsilon_text, self.spec.power_of_two)


class DelayedQuantizer:
    """Delayed scaling: the scale comes from `state`, the amax of this cast is gathered there.

    While the state knows no scale (`from_data`) the scale is measured, as current scaling would.
    """

    def __init__(
        self,
        spec: QuantizeSpec,
        state: OperandState,
        *,
        gather: bool,
        from_data: bool,
        scale: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.state = state
        self.gather = gather
        self.from_data = from_data
        self.fixed = scale

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Codes of x [M, K] under the state's scale; its amax is gathered."""
        state = self.state
        if self.fixed is not None:
            multiplier, scale = self.fixed
        elif self.from_data:
            multiplier, scale = scale_from_amax(amax(x), self.spec.format)
        else:
            multiplier, scale = state.multiplier, state.scale
        out = cast_transpose(
            x,
            self.spec.format,
            multiplier if rowwise else None,
            multiplier if columnwise else None,
            inf_to_nan=self.spec.inf_to_nan,
        )
        if self.gather:
            state.gather(out.amax)
        return Operand(out.codes, scale if rowwise else None, out.codes_t, scale if columnwise else None)


class StaticQuantizer:
    """A scale given once and for all: calibrated, or known."""

    def __init__(self, spec: QuantizeSpec) -> None:
        self.spec = spec

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool) -> Operand:
        """Codes of x [M, K] under the given scale."""
        value = self.spec.static_scale
        assert value is not None, "a static spec holds its scale"
        scale = torch.full((), value, dtype=torch.float32, device=x.device)
        multiplier = torch.full((), 1.0 / value, dtype=torch.float32, device=x.device)
        out = cast_transpose(
            x,
            self.spec.format,
            multiplier if rowwise else None,
            multiplier if columnwise else None,
            inf_to_nan=self.spec.inf_to_nan,
        )
        return Operand(out.codes, scale if rowwise else None, out.codes_t, scale if columnwise else None)
