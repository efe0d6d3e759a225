"""Activation checkpointing: a recompute repeats the recipe and the scales of its first forward, and gathers nothing.

Every forward of a layer is described by a `Call`. `octavo.checkpoint` records the calls of the first forward on a tape
and hands them out again, in order, to the recompute: exact for any number of pending forwards. `torch.utils.checkpoint`
(non-reentrant) works too: a forward inside a backward repeats the last call of its layer, which is the one that it
recomputes unless several forwards with different scales are pending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from octavo.recipes import Recipe
from octavo.runtime.autocast import current_frame, in_backward, recipe_in_force
from octavo.runtime.layer_state import LayerState

Scales = tuple[Tensor, Tensor]  # multiplier, scale


class Call(NamedTuple):
    """What one forward of a layer runs with.

    Attributes:
        recipe: None for high precision.
        gather: amaxes of this call join the step's.
        input_scales, weight_scales: fixed for a recompute with delayed scaling; None takes the state's.
        from_data: per operand, measure the scale.
    """

    recipe: Recipe | None
    gather: bool
    input_scales: Scales | None = None
    weight_scales: Scales | None = None
    from_data: tuple[bool, bool, bool] = (False, False, False)


class _Tape:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.recorded = False
        self.position = 0

    def next(self) -> Call:
        if self.position >= len(self.calls):
            raise RuntimeError(
                "a recompute runs more FP8 layers than its first forward did: the checkpointed function must do the"
                " same both times"
            )
        self.position += 1
        return self.calls[self.position - 1]


class _Current(threading.local):
    tape: _Tape | None = None


_CURRENT = _Current()


def layer_call(state: LayerState, own: Recipe | None, name: str | None) -> Call:
    """What the forward that begins now runs with."""
    if torch.compiler.is_compiling():
        return _fresh_call(state, own, name, torch.is_grad_enabled())
    tape = _CURRENT.tape
    if tape is not None and tape.recorded:
        return tape.next()
    if in_backward():
        return _repeated_call(state)
    call = _fresh_call(state, own, name, torch.is_grad_enabled() or tape is not None)
    if tape is not None or torch.is_grad_enabled():
        used = _fixed(state, call)
        state.used = used
        if tape is not None:
            tape.calls.append(used)
    return call


def _fresh_call(state: LayerState, own: Recipe | None, name: str | None, trains: bool) -> Call:
    recipe = recipe_in_force(own, name)
    frame = current_frame()
    gather = trains or (frame is not None and frame.calibrating)
    if recipe is None or recipe.delayed is None:
        return Call(recipe, gather)
    if state.recipe is not recipe:
        state.adopt_recipe(recipe)
    if gather:
        state.ran, state.compiled = True, torch.compiler.is_compiling()
    flags = state.input.from_data, state.weight.from_data, state.grad_output.from_data
    return Call(recipe, gather, from_data=flags)


def _fixed(state: LayerState, call: Call) -> Call:
    """The call as its recompute runs it: with the very tensors that held the scales."""
    if call.recipe is None or call.recipe.delayed is None:
        return call._replace(gather=False)
    return call._replace(
        gather=False,
        input_scales=None if call.from_data[0] else (state.input.multiplier, state.input.scale),
        weight_scales=None if call.from_data[1] else (state.weight.multiplier, state.weight.scale),
    )


def _repeated_call(state: LayerState) -> Call:
    if state.used is None:
        raise RuntimeError(
            "an FP8 layer runs inside a backward without having run forward with gradients before: a reentrant"
            " torch.utils.checkpoint hides its first forward. Use octavo.checkpoint, or use_reentrant=False"
        )
    # A reentrant recompute, unlike a non-reentrant one, runs without saved-tensor hooks.
    used: Call = state.used
    is_delayed = used.recipe is not None and used.recipe.delayed is not None
    reentrant = torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    if is_delayed and reentrant:
        raise RuntimeError(
            "a reentrant torch.utils.checkpoint runs its first forward without gradients, so that delayed scaling"
            " would never see an amax. Use octavo.checkpoint, or use_reentrant=False"
        )
    return used


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, bit-invisible to FP8 layers with every recipe.

    Args:
        function: what is recomputed in the backward instead of keeping its activations.
        args, kwargs: its arguments, and those of `torch.utils.checkpoint.checkpoint`.
        use_reentrant: which of torch's two implementations.
    """
    if torch.compiler.is_compiling():
        # The compiler recomputes inside its own graph, where the scales are inputs that no update writes to.
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
    tape = _Tape()

    def run(*inner: Any, **inner_kwargs: Any) -> Any:
        outer, _CURRENT.tape = _CURRENT.tape, tape
        tape.position = 0
        try:
            return function(*inner, **inner_kwargs)
        finally:
            tape.recorded = True
            _CURRENT.tape = outer

    return torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
