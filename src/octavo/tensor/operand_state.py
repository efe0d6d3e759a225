"""OperandState: what delayed scaling remembers of one operand.

Three rules keep it right under autograd, the compiler and checkpointing:

- The scale of a forward operand is not written in place. An update makes a new tensor and gives it the name, so that
  what compiled code read in a forward stays as it was until its backward is through. (Eager code has the scale of each
  cast with its codes.) Only of an operand that is captured in a CUDA graph are addresses kept, since a replay reads
  those it knows: its casts take a copy of the scale, or give out their own.
- The scale of a gradient is written in place, past autograd's version counter (`Tensor.data`): the backward of a step
  is meant to see the update made at the end of that step's forward, in eager and in compiled code alike.
- Amaxes gather by max into one small tensor of fixed identity. 0 means that nothing was gathered.

An update leaves the histories of all its operands in one table [n, L]. Where the next one is of the same operands in
the same order, it takes the table as it is; a row of it is looked up only for who asks for one history. Operands that
are captured are updated where they lie, by a call that was prepared for them (`close_captured_step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels import delayed_update_in_place
from octavo.scaling import AmaxComputeAlgo, resized_history, scale_from_multiplier

Tensors = tuple[Tensor, ...] | list[Tensor]


class StepRule(NamedTuple):
    """How an update goes: the length of the histories, and arguments of `octavo.kernels.delayed_update`."""

    length: int
    maxima: tuple[float, float]
    first: int
    margin: int
    algorithm: AmaxComputeAlgo


class _Prepared(NamedTuple):
    """An update of captured operands, and for what it was prepared: three tensors of each."""

    rule: StepRule
    tensors: list[Tensor]
    run: Callable[[], None]


class OperandState:
    """Scale, the gathered amax and the past amaxes of one operand; float32.

    Attributes:
        scale: [], value = code * scale.
        gathered: [], the amax of the current step so far.
        history: [L]; position 0 is unused here and stands for `gathered` in a state dict.
        table, row: the history is this row of a table, which holds those of other operands too; or None.
        late_bound: the operand is a gradient, see the module.
        from_data: the scale is not known yet: measure it from the data until the next update.
        is_known: the state came from a state dict.
        closed_before: an update has been made.
        shared: it may be that of several layers.
        captured: a CUDA graph reads or writes this state, so that all of it stays where it is.
        prepared: the last update of captured operands of which this one was the first.
        aliases: what the last update of others wrote to, and aliases of it; of the first of them.
    """

    scale: Tensor
    gathered: Tensor
    table: Tensor | None
    row: int
    _history: Tensor | None
    shared: bool = False
    prepared: _Prepared | None = None
    aliases: tuple[list[Tensor], list[Tensor]] | None = None

    def __init__(self, device: torch.device | None = None, *, late_bound: bool = False) -> None:
        self.late_bound = late_bound
        self.from_data = False
        self.closed_before = False
        self.format_max: float | None = None
        self.captured = False
        # Also for a model that is built under inference_mode: whether it trains later is not known.
        with torch.inference_mode(False):
            self.reset(device)

    def reset(self, device: torch.device | None = None) -> None:
        """Back to scale 1 and no history, on `device`."""
        self.is_known = False
        if self.captured and device == self.scale.device:
            for fixed, value in ((self.scale, 1.0), (self.gathered, 0.0), (self.history, 0.0)):
                fixed.data.fill_(value)
            return
        self.captured = False
        self.scale = torch.ones((), dtype=torch.float32, device=device)
        self.gathered = torch.zeros((), dtype=torch.float32, device=device)
        self.history = torch.zeros(1, dtype=torch.float32, device=device)
        self._mark_fixed()

    @property
    def history(self) -> Tensor:
        """[L]; see the class."""
        if self._history is None:
            assert self.table is not None, "left there by an update"
            self._history = self.table[self.row]
        return self._history

    @history.setter
    def history(self, history: Tensor) -> None:
        self._history = history
        self.table, self.row = None, 0

    def take_row(self, table: Tensor, row: int) -> None:
        """Have row `row` of a table [n, L] for its history."""
        self.table, self.row = table, row
        self._history = None

    def _mark_fixed(self) -> None:
        """Tell the compiler's CUDA graphs which tensors stay where they are, so that they may be written to."""
        # What torch._dynamo.mark_static_address does, which imports all of the compiler.
        for fixed in (self.gathered, self.scale) if self.late_bound else (self.gathered,):
            fixed._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]

    def measure_next(self) -> None:
        """Forget the scale: it comes from the next data."""
        with torch.inference_mode(False):
            self.reset(self.gathered.device)
        self.from_data = True

    @property
    def multiplier(self) -> Tensor:
        """[], code = cast(value * multiplier)."""
        return scale_from_multiplier(self.scale)

    def gather(self, amax: Tensor) -> None:
        """Merge the amax of one cast into this step's, by max."""
        self.gathered.copy_(torch.maximum(self.gathered, amax))

    def _set_scale(self, scale: Tensor) -> None:
        if self.late_bound or self.captured:
            self.scale.data.copy_(scale)
        else:
            self.scale = scale

    def provide_for(self, format_max: float) -> None:
        """Be cast to a format of this largest value from now on; the scale goes on providing for the amaxes so far."""
        if self.format_max not in (None, format_max):
            self._set_scale(self.scale_for(format_max))
        self.format_max = format_max

    def scale_for(self, format_max: float) -> Tensor:
        """[], the scale that provides for the same amaxes in a format of this largest value."""
        before = self.format_max
        if before is None or before == format_max:
            return self.scale
        return self.scale * torch.where(self.history.amax() > 0, before / format_max, 1.0)

    def has_gathered_by_now(self) -> bool:
        """For compiled code, which cannot look: True if this step has gathered, by the order of things.

        A forward operand has; a gradient has not before the second update, since the first precedes the first backward.
        """
        return not self.late_bound or self.closed_before

    def resize(self, length: int) -> None:
        """Give the history another length, keeping the newest.

        Raises:
            RuntimeError: it is captured in a CUDA graph with the length that it has.
        """
        if length == self.history.shape[0]:
            return
        if self.captured:
            raise RuntimeError(
                f"amax_history_len is {length}, and a CUDA graph was captured with {self.history.shape[0]}: go on with"
                " the recipe of the capture, or convert the model anew and capture it again"
            )
        self.history = resized_history(self.history, length)

    def saved(self) -> dict[str, Tensor]:
        """The two tensors of a state dict: `scale` [], NaN if not known yet, and `amax_history` [L], copies."""
        history = self.history.clone()
        history[0] = self.gathered
        scale = torch.full_like(self.scale, float("nan")) if self.from_data else self.scale.detach().clone()
        return {"scale": scale, "amax_history": history}

    def load(self, scale: Tensor, history: Tensor) -> None:
        """Take over what `saved` gave, on the device at hand.

        Raises:
            ValueError: the scale is not one number, positive and finite or NaN for one not known yet; or the history is
                no vector.
        """
        if scale.numel() != 1 or float(scale) <= 0 or float(scale) == float("inf"):
            found = f"{scale.item()}" if scale.numel() == 1 else f"shape {tuple(scale.shape)}: a frozen checkpoint?"
            raise ValueError(f"a scale must be one positive finite number, or NaN if not known yet; found {found}")
        if history.dim() != 1 or history.numel() == 0:
            raise ValueError(f"an amax history must be a vector of length 1 or more, found {tuple(history.shape)}")
        device = self.gathered.device
        self.reset(device)
        # It provides for the format of whatever runs next, not of what ran here before.
        self.format_max = None
        self.is_known = True
        self.from_data = bool(scale.isnan())
        if not self.from_data:
            self.scale.data.copy_(scale.reshape(()))
        loaded = history.detach().to(device=device, dtype=torch.float32, copy=True)
        if self.captured:
            self.history.copy_(resized_history(loaded, self.history.shape[0]))
        else:
            self.history = loaded
        if float(history[0]) > 0:
            self.gathered.copy_(loaded[0])
            self.closed_before = True

    def move(self, device: torch.device) -> None:
        """Follow a weight to another device; meta storage becomes real anew."""
        old = self.scale.device
        if device == old:
            return
        if old.type == "meta" or device.type == "meta":
            self.reset(device)
            return
        with torch.inference_mode(False):
            for name in ("scale", "gathered", "history"):
                setattr(self, name, getattr(self, name).to(device))
        self.captured = False
        self._mark_fixed()

    def __getstate__(self) -> dict[str, Any]:
        # A history of its own: the table holds those of other layers too.
        state = {**self.__dict__, "captured": False, "history": self.history.clone()}
        state |= {"prepared": None, "aliases": None}
        for name in ("table", "row", "_history"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def histories_of(operands: Sequence[OperandState], length: int) -> Tensor:
    """[n, L], with each history of this length: the table that the last update left, if it was of these operands."""
    table = _table_of(operands)
    if table is not None and table.shape[1] == length:
        return table
    for operand in operands:
        operand.resize(length)
    return torch.stack([operand.history for operand in operands])


def _table_of(operands: Sequence[OperandState]) -> Tensor | None:
    """The table that holds the histories of these operands in their order, and no others; or None."""
    table = operands[0].table
    if table is None or table.shape[0] != len(operands):
        return None
    together = all(operand.table is table and operand.row == row for row, operand in enumerate(operands))
    return table if together else None


def close_step(operands: Sequence[OperandState], histories: Tensor, scales: Tensors, gathered: Sequence[bool]) -> None:
    """Take over the results of an update, each operand's, and begin to gather anew.

    Args:
        operands: on one device; late bound or not, captured or not.
        histories, scales: what the update made, [n, L] and n of [].
        gathered: whether the operand took part in the update.
    """
    if stays_in_place():
        for operand in operands:
            # Also where compiled code casts, which does not tell.
            operand.captured = True
    scale_places: list[Tensor] = []
    new_scales: list[Tensor] = []
    fixed, values = _histories_in_place(operands, histories)
    for row, (operand, scale, took_part) in enumerate(zip(operands, scales, gathered, strict=True)):
        if not operand.captured:
            operand.take_row(histories, row)
        if operand.captured or operand.late_bound:
            scale_places.append(operand.scale)
            new_scales.append(scale)
        else:
            operand.scale = scale
        operand.from_data = operand.from_data and not took_part
        operand.closed_before = True
    places = _past_autograd(operands[0], [*(operand.gathered for operand in operands), *scale_places])
    fixed += places[len(operands) :]
    if fixed:
        torch._foreach_copy_(fixed, [*values, *new_scales])
    torch._foreach_zero_(places[: len(operands)])


def _past_autograd(owner: OperandState, tensors: list[Tensor]) -> list[Tensor]:
    """Aliases of these past autograd's version counters: those of the last step, if it was of the same tensors."""
    if torch.compiler.is_compiling():
        return [tensor.data for tensor in tensors]
    known = owner.aliases
    if known is None or len(known[0]) != len(tensors) or not all(map(is_, known[0], tensors)):
        known = owner.aliases = tensors, [tensor.data for tensor in tensors]
    return known[1]


def _histories_in_place(operands: Sequence[OperandState], histories: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Where histories of captured operands are to be written and what; at once if they are a table."""
    captured = [row for row, operand in enumerate(operands) if operand.captured]
    if not captured:
        return [], []
    table = _table_of(operands) if len(captured) == len(operands) else None
    if table is not None:
        return [table], [histories]
    rows = histories.unbind()
    return [operands[row].history for row in captured], [rows[row] for row in captured]


def close_captured_step(operands: Sequence[OperandState], rule: StepRule) -> None:
    """Update captured operands where they lie, and begin to gather anew.

    What was prepared for the last such step serves again where every tensor is still the same one.

    Args:
        operands: on one device, all captured, all with a known scale.
        rule: how.
    """
    first = operands[0]
    tensors = [tensor for o in operands for tensor in (o._history, o.scale, o.gathered)]
    known = first.prepared
    same = known is not None and known.rule == rule and len(known.tensors) == len(tensors)
    if known is None or not (same and all(map(is_, known.tensors, tensors))):
        known = first.prepared = _prepared(operands, rule)
    known.run()
    for operand in operands:
        operand.closed_before = True


def _prepared(operands: Sequence[OperandState], rule: StepRule) -> _Prepared:
    for operand in operands:
        operand.resize(rule.length)
    histories, scales = [operand.history for operand in operands], [operand.scale for operand in operands]
    gathered = [operand.gathered for operand in operands]
    run = delayed_update_in_place(histories, scales, gathered, *rule[1:])
    return _Prepared(rule, [tensor for three in zip(histories, scales, gathered, strict=True) for tensor in three], run)


def stays_in_place() -> bool:
    """True while a CUDA graph is captured: what a replay is to find again may get no new address."""
    return not torch.compiler.is_compiling() and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_captured(x: Tensor) -> bool:
    """True if what is done to x now becomes part of a CUDA graph; cheaper than `stays_in_place`."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
