"""Activation checkpointing: a recompute repeats the recipe and the scales of its first forward, and gathers nothing.

Every forward of a layer is described by a `Call`. `octavo.checkpoint` records the calls of the first forward on a tape
and hands them out again, in order, to the recompute: exact for any number of pending forwards. `torch.utils.checkpoint`
(non-reentrant) works too: a forward inside a backward repeats the last call of its layer, which is the one that it
recomputes unless several forwards with different scales are pending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from octavo.recipes import Recipe
from octavo.runtime.autocast import (
    calibrated_recipe,
    current_context,
    current_frame,
    hidden_training,
    in_backward,
    recipe_in_force,
    trains,
)
from octavo.runtime.counting import counting_with, current_count
from octavo.runtime.layer_state import LayerState, UsedScales


class Call(NamedTuple):
    """What one forward of a layer runs with.

    Attributes:
        recipe: None for high precision.
        gather: amaxes of this call join the step's.
        used: with delayed scaling, where the scales of this call are noted as it runs.
        repeats: of a recompute, the call that it repeats, whose scales it takes.
        from_data: per operand, measure the scale.
    """

    recipe: Recipe | None
    gather: bool
    used: UsedScales | None = None
    repeats: UsedScales | None = None
    from_data: tuple[bool, bool, bool] = (False, False, False)


class _Tape:
    """The calls of one checkpointed function, in order; `outer` is that of the checkpoint around it."""

    def __init__(self, outer: _Tape | None) -> None:
        self.outer = outer
        self.calls: list[Call] = []
        self.recorded = False
        self.position = 0

    def repeated(self) -> Call | None:
        """The call that a recompute repeats now; None in a first forward."""
        if not self.recorded:
            # The first forward of a checkpoint inside one that is being recomputed repeats that one's calls.
            call = None if self.outer is None else self.outer.repeated()
            if call is not None:
                self.calls.append(call)
            return call
        if self.position >= len(self.calls):
            raise RuntimeError(
                "a recompute runs more FP8 layers than its first forward did: the checkpointed function must do the"
                " same both times"
            )
        self.position += 1
        return self.calls[self.position - 1]

    def record(self, call: Call) -> None:
        """Note a call of a first forward, for the checkpoints around this one too."""
        self.calls.append(call)
        if self.outer is not None:
            self.outer.record(call)


# A forward without gradients makes the codes of one layout, one with gradients those of two.
_DRAWN_TWICE = (
    "the recipe rounds input or weight stochastically, and the recompute of a reentrant checkpoint would draw other"
    " numbers than its first forward, which ran without gradients: use use_reentrant=False"
)


class _Current(threading.local):
    tape: _Tape | None = None


_CURRENT = _Current()


def layer_call(state: LayerState, own: Recipe | None, name: str | None) -> Call:
    """What the forward that begins now runs with."""
    if torch.compiler.is_compiling():
        return _fresh_call(state, own, name)
    tape = _CURRENT.tape
    if tape is None and torch._C._current_graph_task_id() == -1:
        call, used = _kept_call(state, own, name)
    else:
        call, used = _call_of_checkpoint(state, own, name, tape)
    if torch.is_grad_enabled():
        state.used = used
    else:
        state.used_without_grad = used
    return call


def _kept_call(state: LayerState, own: Recipe | None, name: str | None) -> tuple[Call, Call]:
    """(the call, what a recompute of it would repeat), of the forward before if nothing has changed that decides."""
    # Read once: another thread may put its own in its place.
    last = state.decided
    if last is not None and last[0] == _what_decides(state, own, name):
        _, call, used = last
        if call.gather:
            _take_part(state)
        return call, used
    call, used = _noting_call(state, own, name, None)
    # After the decision, which may have changed the state.
    state.decided = _what_decides(state, own, name), call, used
    return call, used


def _what_decides(state: LayerState, own: Recipe | None, name: str | None) -> tuple[object, ...]:
    frame = current_frame()
    operand = state.input
    return (
        own,
        name,
        state.high_precision,
        torch.is_grad_enabled(),
        None if frame is None else (frame.enabled, frame.recipe, frame.calibrating),
        state.recipe,
        operand.format_max,
        operand.from_data,
        state.weight.from_data,
        state.grad_output.from_data,
    )


def _call_of_checkpoint(
    state: LayerState, own: Recipe | None, name: str | None, tape: _Tape | None
) -> tuple[Call, Call]:
    """As `_kept_call`, of a forward on a tape or inside a backward."""
    repeated = None if tape is None else tape.repeated()
    if repeated is None and in_backward():
        repeated = _repeated_call(state)
        if repeated is not None and tape is not None:
            tape.record(repeated)
    if repeated is not None:
        return repeated, repeated
    call, used = _noting_call(state, own, name, tape)
    if _draws(call) and trains() and not torch.is_grad_enabled():
        raise RuntimeError(_DRAWN_TWICE)
    if tape is not None:
        tape.record(used)
    return call, used


def _noting_call(state: LayerState, own: Recipe | None, name: str | None, tape: _Tape | None) -> tuple[Call, Call]:
    call = _fresh_call(state, own, name)
    if call.recipe is not None and call.recipe.delayed is not None:
        # A tape keeps the scales of every call, a layer those of its last one.
        call = call._replace(used=state.noted_scales() if tape is None else UsedScales())
    return call, call if call.used is None else call._replace(gather=False, used=None, repeats=call.used)


def _fresh_call(state: LayerState, own: Recipe | None, name: str | None) -> Call:
    if state.high_precision:
        return Call(None, False)
    recipe = recipe_in_force(own, name)
    calibrated = calibrated_recipe(own, name)
    gathered_for = recipe or calibrated
    if gathered_for is None or gathered_for.delayed is None:
        return Call(recipe, False)
    if not state.follows(gathered_for):
        state.adopt_recipe(gathered_for)
    gather = calibrated is not None or trains()
    if gather:
        _take_part(state)
    flags = state.input.from_data, state.weight.from_data, state.grad_output.from_data
    return Call(recipe, gather, from_data=flags)


def _take_part(state: LayerState) -> None:
    """Note that amaxes are gathered, and in whose context."""
    state.takes_part = True
    context = current_context()
    if context is not None:
        state.context = context


def _repeated_call(state: LayerState) -> Call | None:
    """The call that a recompute by torch's own checkpoint repeats; None if this is no recompute."""
    if not torch.is_grad_enabled():
        used: Call | None = state.used_without_grad
        return used
    # A non-reentrant recompute runs under saved-tensor hooks; a reentrant one has none, and had no gradients at first.
    reentrant = torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    used = state.used_without_grad if reentrant else state.used
    if used is None or (reentrant and used.recipe is not None and used.recipe.delayed is not None):
        raise RuntimeError(
            "an FP8 layer runs inside a backward, and its first forward is not known: a reentrant"
            " torch.utils.checkpoint runs it without gradients, so that delayed scaling would never see an amax. Use"
            " octavo.checkpoint, or use_reentrant=False"
        )
    if reentrant and _draws(used):
        raise RuntimeError(_DRAWN_TWICE)
    return used


def _draws(call: Call) -> bool:
    return call.recipe is not None and call.recipe.linear.forward_draws


def _side_effects_in_forward_only(allowed: bool) -> bool:
    """Set Dynamo's rule for side effects of a checkpointed function; gives back what it was."""
    config: Any = torch._dynamo.config
    before: bool = config.skip_fwd_side_effects_in_bwd_under_checkpoint
    config.skip_fwd_side_effects_in_bwd_under_checkpoint = allowed
    return before


# Dynamo runs it while it traces. (torch.compiler.assume_constant_result sets this, and imports Dynamo to do so.)
_side_effects_in_forward_only._dynamo_marked_constant = True  # type: ignore[attr-defined]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, bit-invisible to FP8 layers with every recipe.

    Args:
        function: what is recomputed in the backward instead of keeping its activations.
        args, kwargs: its arguments, and those of `torch.utils.checkpoint.checkpoint`.
        use_reentrant: which of torch's two implementations.
    """
    if torch.compiler.is_compiling():
        # The compiler recomputes inside its own graph, where the scales are inputs that no update writes to. What a
        # layer notes of its forward must not be noted again by the recompute: Dynamo may leave it out there.
        before = _side_effects_in_forward_only(True)
        result = torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
        _side_effects_in_forward_only(before)
        return result
    if not torch.is_grad_enabled():
        # Nothing is recomputed from here: an evaluation, or the first forward of a reentrant checkpoint around this.
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    # A backward may run in a thread of its own, where nobody counts.
    tape, counter = _Tape(_CURRENT.tape), current_count()

    def run(*inner: Any, **inner_kwargs: Any) -> Any:
        outer, _CURRENT.tape = _CURRENT.tape, tape
        tape.position = 0
        hides = use_reentrant and not tape.recorded
        try:
            with hidden_training() if hides else nullcontext(), counting_with(counter):
                return function(*inner, **inner_kwargs)
        finally:
            tape.recorded = True
            _CURRENT.tape = outer

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
