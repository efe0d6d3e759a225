"""Quantizers: a spec and the state it needs make one; called with a matrix it gives an `Operand`.

A quantizer serves one operand of a layer. Wrapping it is how a layer is watched or changed from outside: whatever is
called like one is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels import (
    CastOutput,
    ScaleRule,
    amax,
    amax_by_row_and_column,
    cast_transpose,
    partial_amax,
    row_cast,
    stochastic_cast,
)
from octavo.scaling import ROW, TENSOR
from octavo.tensor import operand_state
from octavo.tensor.operand_state import OperandState
from octavo.tensor.spec import QuantizeSpec
from octavo.tensor.users_line import warn_user

# How a scale is measured while a history is still empty.
MEASURED = ScaleRule()


# What a cast gives is the operand of a product.
Operand = CastOutput


class Quantizer(Protocol):
    """Makes an operand of a matrix."""

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K] in the layouts asked for, and on request the sums over its rows."""
        ...


class StatelessQuantizer(ABC):
    """A quantizer that nothing but its spec decides on.

    Args:
        spec: format, granularity and scale rule.
    """

    def __init__(self, spec: QuantizeSpec) -> None:
        self.spec = spec
        self._origin: tuple[object, ...] = (spec,)

    def origin(self) -> tuple[object, ...] | None:
        """What decides on the codes of given data: another quantizer makes the same if its is of the same objects.

        None if no other quantizer could.
        """
        return self._origin

    def note(self, operand: Operand) -> None:  # noqa: B027 - whoever has no state has nothing to note
        """What another quantizer of the same origin made is taken as this one's."""

    @abstractmethod
    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """As `Quantizer`."""

    def again(self, x: Tensor, scale: Tensor, after: Tensor) -> Operand:
        """The column-wise codes of an x that was cast row-wise before, `scale` being that cast's.

        `after`: a scale of the backward, see `_not_before`.
        """
        return self(x, False, True)


class CurrentQuantizer(StatelessQuantizer):
    """Current ("just in time") scaling: one pass for the amax, one for the codes; of rows alone, one for both."""

    @property
    def measures_rows(self) -> bool:
        """True if the row-wise codes alone are those of `octavo.kernels.row_cast`."""
        return self.spec.granularity is ROW and not self.spec.inf_to_nan

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K] under scales measured from it."""
        spec = self.spec
        by_row: Tensor | None
        by_column: Tensor | None
        if spec.granularity is TENSOR:
            by_row = by_column = self.largest(x)
        elif self.measures_rows and rowwise and not (columnwise or column_sum):
            return Operand(*row_cast(x, spec.format, spec.rule), None, None)
        else:
            # One scale a row of each layout: a row of the transposed matrix is a column of x.
            by_row, by_column = amax_by_row_and_column(x, rowwise, columnwise)
        return cast_transpose(
            x,
            spec.format,
            by_row if rowwise else None,
            by_column if columnwise else None,
            rule=spec.rule,
            inf_to_nan=spec.inf_to_nan,
            column_sum=column_sum,
        )

    def again(self, x: Tensor, scale: Tensor, after: Tensor) -> Operand:
        """As `StatelessQuantizer.again`; measured again, since a scale does not tell its multiplier to the last bit."""
        spec = self.spec
        amaxes = self.largest(x) if spec.granularity is TENSOR else amax_by_row_and_column(x, False, True)[1]
        assert amaxes is not None, "they were asked for"
        return _cast_with(spec, x, _not_before(amaxes, after), spec.rule)

    def largest(self, x: Tensor) -> Tensor:
        """What the scale of a whole x is made of: maxima [P] of parts of it."""
        return partial_amax(x)


class PredictedQuantizer(CurrentQuantizer):
    """A scale that provides for a bound of the amax: one pass for the codes, and none before.

    Args:
        spec: of one scale a tensor; its rule makes the scale of the bound.
        bound: [1], float32, no smaller than the amax of whatever is cast.
    """

    def __init__(self, spec: QuantizeSpec, bound: Tensor) -> None:
        super().__init__(spec)
        self._bound, self._origin = bound, (spec, bound)

    def largest(self, x: Tensor) -> Tensor:
        """The bound."""
        return self._bound


def _cast_with(spec: QuantizeSpec, x: Tensor, columnwise: Tensor, rule: ScaleRule | None = None) -> Operand:
    return cast_transpose(x, spec.format, None, columnwise, rule=rule, inf_to_nan=spec.inf_to_nan)


def _not_before(value: Tensor, after: Tensor) -> Tensor:
    """`value`, scales or amaxes; in compiled code by a computation that needs `after`, a scale of something else.

    A cast that depends on nothing of the backward the compiler's partitioner moves into the forward, and keeps its
    codes where the input was to be kept. No amax is below -scale, which is negative.
    """
    if not torch.compiler.is_compiling():
        return value
    # (A sum of one; of an empty matrix of none.)
    return torch.maximum(value, -after.reshape(-1)[:1].sum())


class UsedScale:
    """The scale that an operand was last cast with: what a recompute of that cast must take again."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale: Tensor | None = None


class DelayedQuantizer:
    """Delayed scaling: the scale comes from `state`, the amax of this cast is gathered there.

    While the state knows no scale (`from_data`) the scale is measured, as current scaling would.

    Args:
        spec: format, and what becomes of inf.
        state: scale and gathered amax.
        gather: the amax joins the step's.
        from_data: measure the scale.
        scale: [], taken instead of the state's.
        used: told the scale of each cast.
        alike: stands for all that cast with a `scale` of this value; None: none but those of the same state do.
    """

    def __init__(
        self,
        spec: QuantizeSpec,
        state: OperandState,
        *,
        gather: bool,
        from_data: bool,
        scale: Tensor | None = None,
        used: UsedScale | None = None,
        alike: object | None = None,
    ) -> None:
        self.spec = spec
        self.state = state
        self.gather = gather
        self.from_data = from_data
        self.fixed = scale
        self.used = used
        self.alike = alike
        self._format_max = spec.format.max
        self._stochastic = spec.rounding == "stochastic"

    def origin(self) -> tuple[object, ...] | None:
        """As `StatelessQuantizer.origin`; the amax has been gathered in the same state, if it is."""
        if self.alike is not None:
            return self.spec.format, self.spec.inf_to_nan, self.alike
        if not self.state.shared:
            return None
        scale = self.state.scale if self.fixed is None else self.fixed
        return (
            self.spec.format,
            self.spec.inf_to_nan,
            self.spec.rounding,
            self.state,
            scale,
            self.gather,
            self.from_data,
        )

    def note(self, operand: Operand) -> None:
        """As `StatelessQuantizer.note`; its scale is noted."""
        if self.used is not None:
            self.used.scale = operand.scale

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K] under the state's scale; its amax is gathered."""
        spec, state, fixed = self.spec, self.state, self.fixed
        measured = self.from_data and fixed is None
        scale = state.scale if fixed is None else fixed
        if state.late_bound and not torch.compiler.is_compiling():
            # The layer may have run in another format since the forward of this backward.
            scale = state.scale_for(self._format_max)
        if state.captured and fixed is None and not (torch.compiler.is_compiling() or operand_state.is_captured(x)):
            # An update will write to it, and a backward may want it after that.
            scale = scale.clone()
        source = partial_amax(x) if measured else scale
        if self._stochastic:
            operand = self._rounded_by_chance(x, None if measured else scale, rowwise, columnwise, column_sum)
        else:
            operand = cast_transpose(
                x,
                spec.format,
                source if rowwise else None,
                source if columnwise else None,
                rule=MEASURED if measured else None,
                gathered=state.gathered if self.gather else None,
                inf_to_nan=spec.inf_to_nan,
                column_sum=column_sum,
            )
        given_out = operand.scale if rowwise else operand.scale_t
        # A cast into a CUDA graph gives out a scale of its own; whether this was one is asked only then.
        if given_out is not source and not torch.compiler.is_compiling() and operand_state.is_captured(x):
            self._note_capture(measured)
        if self.used is not None:
            self.used.scale = given_out
        return operand

    def again(self, x: Tensor, scale: Tensor, after: Tensor) -> Operand:
        """As `StatelessQuantizer.again`; its amax has been gathered."""
        if self.from_data and self.fixed is None:
            return _cast_with(self.spec, x, _not_before(partial_amax(x), after), MEASURED)
        return _cast_with(self.spec, x, _not_before(scale, after))

    def _rounded_by_chance(
        self, x: Tensor, scale: Tensor | None, rowwise: bool, columnwise: bool, column_sum: bool
    ) -> Operand:
        """The cast that rounds stochastically, under `scale` or a measured one."""
        if self.gather:
            self.state.gather(amax(x))
        return stochastic_cast(
            x,
            self.spec.format,
            TENSOR,
            rule=MEASURED if scale is None else None,
            scale=scale,
            rowwise=rowwise,
            columnwise=columnwise,
            inf_to_nan=self.spec.inf_to_nan,
            column_sum=column_sum,
        )

    def _note_capture(self, measured: bool) -> None:
        """What a graph reads stays where it is; a graph that measures a scale will always measure it."""
        self.state.captured = True
        if measured:
            warn_user(
                "a CUDA graph is being captured while a scale of delayed scaling is not known yet: every replay will"
                " measure it anew, at the price of current scaling. Run a step, its update included, and then capture"
            )


class StochasticQuantizer(StatelessQuantizer):
    """Codes rounded by chance, of any granularity, under measured scales or a given one.

    Price: see `octavo.kernels.stochastic_cast`; and no cast of this one is fused with what comes before it.
    """

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K]; each call draws anew."""
        spec, scale = self.spec, None
        if spec.static_scale is not None:
            scale = torch.full((), spec.static_scale, dtype=torch.float32, device=x.device)
        return stochastic_cast(
            x,
            spec.format,
            spec.granularity,
            rule=spec.rule if scale is None else None,
            scale=scale,
            rowwise=rowwise,
            columnwise=columnwise,
            inf_to_nan=spec.inf_to_nan,
            column_sum=column_sum,
        )

    def again(self, x: Tensor, scale: Tensor, after: Tensor) -> Operand:
        """Not to be had: a recipe that rounds stochastically has its codes kept."""
        raise RuntimeError("codes that were rounded stochastically cannot be made again: keep them")


class StaticQuantizer(StatelessQuantizer):
    """A scale given once and for all: calibrated, or known."""

    def __call__(self, x: Tensor, rowwise: bool, columnwise: bool, column_sum: bool = False) -> Operand:
        """Codes of x [M, K] under the given scale."""
        value = self.spec.static_scale
        assert value is not None, "a static spec holds its scale"
        scale = torch.full((), value, dtype=torch.float32, device=x.device)
        return cast_transpose(
            x,
            self.spec.format,
            scale if rowwise else None,
            scale if columnwise else None,
            inf_to_nan=self.spec.inf_to_nan,
            column_sum=column_sum,
        )
