"""`octavo.autocast`: where FP8 is on, and with which recipe."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from octavo.recipes import CurrentScaling, Recipe, check_recipe
from octavo.runtime.layer_state import any_layer_was_built
from octavo.runtime.update import end_step

DEFAULT_RECIPE: Recipe = CurrentScaling()

# How many operations autograd has recorded in this thread.
_recorded = torch._C._autograd._get_sequence_nr


class Frame(NamedTuple):
    """One entered context. (A frozen dataclass takes three times as long to make.)

    Attributes:
        enabled, recipe, group, calibrating: as given.
        outer: the context around it.
    """

    enabled: bool
    recipe: Recipe | None
    group: object | None
    calibrating: bool
    outer: Frame | None

    @property
    def ends_step(self) -> bool:
        """True for the outermost context that gathers amaxes: its exit is the end of a step."""
        frame = self.outer
        while frame is not None:
            if frame.enabled or frame.calibrating:
                return False
            frame = frame.outer
        return self.enabled or self.calibrating


class _Stack(threading.local):
    """The current context of each thread: the other global of Octavo. (Dynamo cannot trace a ContextVar.)

    Attributes:
        top: the innermost context.
        hidden_training: a reentrant checkpoint runs a first forward, without gradients though they are wanted.
        owner: stands for the contexts of this thread, so that theirs end no step of another thread's.
    """

    # Set by each thread, not as defaults of the class: Dynamo of torch 2.11 would read the class's.
    def __init__(self) -> None:
        self.top: Frame | None = None
        self.hidden_training = False
        self.owner = object()


_STACK = _Stack()


class autocast:
    """Context: layers inside run in FP8 with `recipe`.

        with octavo.autocast(recipe=DelayedScaling(amax_history_len=16)):
            y = model(x)
        y.sum().backward()      # outside; uses the precision of the forward

    Contexts nest and can be entered again; the innermost decides, and `enabled=False` inside really switches off. The
    exit of the outermost enabled one, with gradients enabled, ends a step of delayed scaling. An exception updates
    nothing and calls no collective.

    Only Octavo's layers look at it: convert a model first (`octavo.convert`), or build it with them. Leaving it in a
    thread that trains, in a process that has never built such a layer, gives a warning. Where there are some, nothing
    tells whether those of this model are among them, since compiled code and CUDA graphs run them without a trace;
    `octavo.count_gemms` does, in eager code.

    Args:
        enabled: False runs the layers inside in high precision.
        recipe: None leaves converted layers their own recipe; others take `CurrentScaling()`.
        amax_group: process group over which amaxes agree; the default group if None.
        calibrating: amaxes of inputs and weights are gathered, also where FP8 is off or gradients are.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        amax_group: object | None = None,
        calibrating: bool = False,
    ) -> None:
        check_recipe(recipe)
        for name, flag in (("enabled", enabled), ("calibrating", calibrating)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} is {flag!r}: it must be True or False; a recipe is given as recipe=…")
        self.enabled = enabled
        self.recipe = recipe
        self.amax_group = amax_group
        self.calibrating = calibrating
        # Asked here, and not where a context is entered or left: at a graph break Dynamo runs those as frames of their
        # own, and drops what a frame that asks this writes to the stack.
        self._watches = not (torch.compiler.is_compiling() or any_layer_was_built())

    def __enter__(self) -> autocast:
        _STACK.top = Frame(self.enabled, self.recipe, self.amax_group, self.calibrating, _STACK.top)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        frame = _STACK.top
        assert frame is not None, "a context is left after it was entered"
        _STACK.top = frame.outer
        gathers = trains() or frame.calibrating
        if kind is None and frame.ends_step and gathers and not in_backward():
            end_step(_STACK.owner, frame.group, frame.recipe)
            if self._watches and frame.enabled and not any_layer_was_built():
                _notice_no_layer(frame)


def _notice_no_layer(frame: Frame) -> None:
    """Warn if this thread trains, and there has never been a layer that could take the recipe.

    No layer at all is the only sure sign: compiled code and CUDA graphs run those that are there without a trace.
    """
    if _recorded():
        recipe = frame.recipe or DEFAULT_RECIPE
        # Python shows the warning of one line of code once.
        warnings.warn(
            f"octavo.autocast: {type(recipe).__name__} changed nothing: no FP8 layer has been built in this process,"
            " and layers of torch.nn do not look at the context. Call octavo.convert(model, recipe) once"
            " before training, or build the model with octavo.Linear (what octavo.freeze made runs in FP8"
            " without a context)",
            stacklevel=3,
        )


def current_frame() -> Frame | None:
    """The innermost context of this thread, for whoever asks what is in force."""
    return _STACK.top


def current_context() -> object | None:
    """What stands for the contexts of this thread; None outside of all of them."""
    return None if _STACK.top is None else _STACK.owner


def trains() -> bool:
    """True if a backward may follow what runs now."""
    return torch.is_grad_enabled() or _STACK.hidden_training


@contextmanager
def hidden_training() -> Iterator[None]:
    """Context: gradients are wanted although they are off."""
    outer, _STACK.hidden_training = _STACK.hidden_training, True
    try:
        yield
    finally:
        _STACK.hidden_training = outer


def recipe_in_force(own: Recipe | None, name: str | None) -> Recipe | None:
    """The recipe of a layer called `name` whose own recipe is `own`; None for high precision."""
    frame = _STACK.top
    if frame is None:
        recipe = own
    elif not frame.enabled:
        recipe = None
    else:
        recipe = frame.recipe or own or DEFAULT_RECIPE
    return None if recipe is None else recipe.for_layer(name)


def calibrated_recipe(own: Recipe | None, name: str | None) -> Recipe | None:
    """The recipe for which amaxes are gathered whether or not FP8 is on; None where nothing is calibrated."""
    frame = _STACK.top
    if frame is None or not frame.calibrating:
        return None
    recipe = frame.recipe or own
    return None if recipe is None else recipe.for_layer(name)


def in_backward() -> bool:
    """True while autograd runs a backward in this thread: a forward then is a checkpoint's recompute."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
