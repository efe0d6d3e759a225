"""`octavo.make_graphed_callables`: forward and backward of modules as CUDA graphs, delayed scaling included.

`torch.cuda.make_graphed_callables` does the capturing. What it cannot know of is done here:

- A graph holds addresses. The states of all layers are marked as captured: their updates write in place from then on.
- A graph does again what was captured. A scale that is not known yet would be measured for ever, so it is measured
  before; and a replay is taken only where the layers would do the same as then, else they run themselves.
- A replay runs no Python of the layers, so it is noted here that they took part in the step.
- The warm-up runs on sample data. Scales that are known, histories and gathered amaxes are afterwards what they were.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octavo.recipes import Recipe
from octavo.runtime.autocast import current_context, current_frame, in_backward, recipe_in_force, trains
from octavo.runtime.counting import current_count
from octavo.runtime.layer_state import LayerState, registered_states
from octavo.runtime.optimizer_steps import STALE_STEPS, optimizer_steps
from octavo.runtime.update import update_states
from octavo.runtime.weight_bound import WeightBound, takes_bound
from octavo.scaling import resized_history
from octavo.tensor import OperandState, warn_user

Samples = tuple[Tensor, ...]
# Of an operand: its scale.
_is_unknown = attrgetter("from_data")


class _Kept(NamedTuple):
    """What an operand's state was."""

    operand: OperandState
    scale: Tensor
    gathered: Tensor
    history: Tensor
    known: bool
    closed_before: bool
    captured: bool


def make_graphed_callables(
    callables: nn.Module | tuple[nn.Module, ...],
    sample_args: Samples | tuple[Samples, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
) -> Any:
    """`torch.cuda.make_graphed_callables` for modules with FP8 layers: a replay gives the layers' own bits.

        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            model = octavo.make_graphed_callables(model, (x,))
        ...
        model(x).sum().backward()
        octavo.update_scales(model)        # or octavo.autocast around the forward, entered here as well

    Call it inside the contexts in which the modules will run. A replay is taken wherever the layers would do the same
    again; elsewhere (inputs of another shape or dtype, keyword arguments, evaluation, gradients off, another recipe or
    none in force, calibration, an observer, `count_gemms`, a scale that a new checkpoint has made unknown) the layers
    run themselves.

    Args:
        callables: a module or a tuple of modules, in the order in which they run. Each becomes its graphed self.
        sample_args: CUDA tensors like the real ones in shape, dtype and requires_grad, for each module a tuple. Where a
            scale is not known yet, the first step's comes from them: let them be like the real ones in size too.
        num_warmup_iters, allow_unused_input, pool: as torch's.

    Returns:
        the module or the tuple of modules that was given.

    Raises:
        ValueError: not on a CUDA device; not a module; a layer is watched by an observer; FP8 is not on here; a sample
            tells no scale.
        RuntimeError: products are being counted; gradients are off.
    """
    modules = callables if isinstance(callables, tuple) else (callables,)
    samples: Any = sample_args if isinstance(callables, tuple) else (sample_args,)
    _check(modules, samples)
    layers = [_layers_of(module) for module in modules]
    before = [(module.forward, module.training) for module in modules]
    make: Any = torch.cuda.make_graphed_callables
    with _states_kept(list(dict.fromkeys(layer.delayed_state for some in layers for layer in some))) as states:
        for module, arguments in zip(modules, samples, strict=True):
            _run_once(module, arguments, allow_unused_input)
        _learn_scales(states)
        # A graph that nobody holds any more but a cycle must not be freed while another one is captured.
        gc.collect()
        make(callables, sample_args, num_warmup_iters, allow_unused_input, pool)
    for module, module_layers, (forward, training), arguments in zip(modules, layers, before, samples, strict=True):
        captured = _Captured(forward, module.forward, training, tuple(_kind(sample) for sample in arguments))
        module.forward = GraphedForward(module, module_layers, captured)
    return callables


class _Captured(NamedTuple):
    """What was captured of a module.

    Attributes:
        forward: as the module had it.
        replay: as torch made it.
        training: the mode that was captured.
        inputs: shape and dtype of each, and whether it required a gradient.
    """

    forward: Callable[..., Any]
    replay: Callable[..., Any]
    training: bool
    inputs: tuple[tuple[torch.Size, torch.dtype, bool], ...]


def _kind(sample: Tensor) -> tuple[torch.Size, torch.dtype, bool]:
    return sample.shape, sample.dtype, sample.requires_grad


class GraphedForward:
    """The forward of a graphed module: a replay where the layers would do what was captured, else the layers."""

    def __init__(self, module: nn.Module, layers: list[Any], captured: _Captured) -> None:
        """Note what was in force at the capture.

        Args:
            module: whose forward this becomes.
            layers: its FP8 layers.
            captured: what was captured.
        """
        self._module, self._layers = module, layers
        self._forward, self._replay, self._training, self._inputs = captured
        self._recipes = self._in_force()
        # A context's recipe that was found to be the same.
        self._same: Recipe | None = None
        self._bounds = self._bounds_of_weights()
        self._moved = self._in_high_precision()
        self._delayed = [
            layer.delayed_state
            for layer, recipe in zip(layers, self._recipes, strict=True)
            if recipe is not None and recipe.delayed is not None
        ]
        # What was not known at the capture has taken no part in it.
        self._known = [operand for state in self._delayed for operand in state.operands if not operand.from_data]
        self._steps = -1
        self._replayed = False
        self._warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's forward.

        Raises:
            RuntimeError: it is a recompute, inside a backward, of a forward that was a replay.
        """
        if torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        if in_backward():
            if self._replayed:
                raise RuntimeError(
                    f"{type(self._module).__name__}, a graphed module, runs inside a backward: a recompute would take"
                    " the scales of now, not those of its first forward. Put the checkpoint inside, and graph that"
                )
            return self._forward(*args, **kwargs)
        self._replayed = not kwargs and self._fits(args) and self._would_do_the_same()
        if not self._replayed:
            return self._forward(*args, **kwargs)
        for layer, bound in zip(self._layers, self._bounds, strict=True):
            if bound is not None:
                bound.follow(layer.weight_parts())
        context = current_context()
        for state in self._delayed:
            state.takes_part = True
            if context is not None:
                state.context = context
        self._notice_forgotten_update()
        return self._replay(*args)

    def _in_force(self) -> list[Recipe | None]:
        return [
            None if layer.delayed_state.high_precision else recipe_in_force(layer.recipe, layer.layer_name)
            for layer in self._layers
        ]

    def _in_high_precision(self) -> list[bool]:
        """Which layers are, whatever recipe is in force."""
        return [layer.delayed_state.high_precision for layer in self._layers]

    def _bounds_of_weights(self) -> list[WeightBound | None]:
        return [layer.delayed_state.weight_bound for layer in self._layers]

    def _fits(self, args: tuple[Any, ...]) -> bool:
        """True for tensors like the samples: torch copies them over those, and would convert or spread others."""
        if len(args) != len(self._inputs):
            return False
        for x, (shape, dtype, has_gradient) in zip(args, self._inputs, strict=True):
            if not isinstance(x, Tensor) or x.shape != shape or x.dtype is not dtype:
                return False
            if x.requires_grad and not has_gradient and torch.is_grad_enabled():
                self._warn_of_gradient()
                return False
        return True

    def _warn_of_gradient(self) -> None:
        if not self._warned:
            self._warned = True
            warn_user(
                f"{type(self._module).__name__} was graphed with a sample that requires no gradient, and is given an"
                " input that does: the layers run themselves. Graph it with sample.requires_grad_()"
            )

    def _would_do_the_same(self) -> bool:
        frame = current_frame()
        return (
            self._module.training == self._training
            and trains()
            and not (frame is not None and frame.calibrating)
            and current_count() is None
            and not any(layer.observer is not None for layer in self._layers)
            and not any(map(_is_unknown, self._known))
            and self._in_high_precision() == self._moved
            and self._has_same_recipes(None if frame is None or not frame.enabled else frame.recipe)
            and self._bounds_of_weights() == self._bounds
        )

    def _has_same_recipes(self, given: Recipe | None) -> bool:
        """True if each layer's recipe is equal to the captured one; `given` is what a context has for all of them."""
        if given is not None and given is self._same:
            return True
        same = self._in_force() == self._recipes
        if same and given is not None and not given.overrides:
            self._same = given
        return same

    def _notice_forgotten_update(self) -> None:
        """Warn once if optimizers have stepped and no update has followed, as the layers do."""
        steps = optimizer_steps()
        if not self._delayed or steps == self._steps:
            return
        self._steps = steps
        for state in self._delayed:
            state.stale_steps += 1
        stale = self._delayed[0].stale_steps
        if stale == STALE_STEPS + 1:
            # The other layers have nothing to add.
            for other in registered_states():
                other.stale_steps = max(other.stale_steps, stale)
            warn_user(
                f"{type(self._module).__name__}: an optimizer stepped {STALE_STEPS} times and the scales of delayed"
                " scaling did not follow: call octavo.update_scales(model) once a step, or run the forward inside"
                " octavo.autocast"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of a module has no graph: its layers run themselves."""
        return copy.deepcopy(self._forward, memo)


def _check(modules: Sequence[Any], samples: Sequence[Samples]) -> None:
    """Refuse what could not be captured, or would capture something else than was meant."""
    if current_count() is not None:
        raise RuntimeError(
            "octavo.count_gemms is active, and a graph's replays run no Python to count with: leave it before capturing"
        )
    if not torch.is_grad_enabled():
        raise RuntimeError("gradients are off: nothing of the backward could be captured; leave torch.no_grad first")
    frame = current_frame()
    if frame is not None and not frame.enabled:
        raise ValueError(
            "FP8 is switched off here, by octavo.autocast(enabled=False), and the graphs would hold products in high"
            " precision: call it outside of that context, or torch.cuda.make_graphed_callables if that is what you want"
        )
    if len(modules) != len(samples):
        raise ValueError(f"{len(modules)} modules and {len(samples)} tuples of sample arguments: give one for each")
    for module, arguments in zip(modules, samples, strict=True):
        if not isinstance(module, nn.Module):
            raise ValueError(
                f"{module!r} is no module, and which layers a function calls is not known: wrap it in an nn.Module that"
                " holds them"
            )
        named = [(f"sample argument {place}", value) for place, value in enumerate(arguments)]
        for name, tensor in [*named, *module.named_parameters()]:
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is {tensor!r}: sample arguments are tensors, and nothing else")
            if not _lies_on_cuda(tensor):
                raise ValueError(
                    f"{name} lies on {tensor.device}: CUDA graphs need a CUDA device; move the module and samples there"
                )
        layers = _layers_of(module)
        if layers and not any(recipe_in_force(layer.recipe, layer.layer_name) for layer in layers):
            raise ValueError(
                f"no recipe is in force for the {len(layers)} FP8 layers of {type(module).__name__}, and the graphs"
                " would hold products in high precision: call it inside octavo.autocast(recipe=...), as they will run"
            )
        for layer in layers:
            if layer.observer is not None:
                raise ValueError(
                    f"{layer.layer_name or type(layer).__name__} has an observer, which a graph would not call: take it"
                    " off before capturing"
                )


def _lies_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _layers_of(module: nn.Module) -> list[Any]:
    return [layer for layer in module.modules() if isinstance(layer.__dict__.get("delayed_state"), LayerState)]


@contextmanager
def _states_kept(states: list[LayerState]) -> Iterator[list[LayerState]]:
    """Context: what a warm-up does to the states is undone, but for scales that were not known.

    After an error those are unknown again, and nothing counts as captured that was not before.
    """
    kept = [
        _Kept(o, o.scale.clone(), o.gathered.clone(), o.history.clone(), not o.from_data, o.closed_before, o.captured)
        for state in states
        for o in state.operands
    ]
    notes = [(state, state.context, state.takes_part) for state in states]
    try:
        yield states
    except BaseException:
        for one in kept:
            one.operand.captured, one.operand.from_data = one.captured, not one.known
        raise
    finally:
        _restore(kept)
        for state, context, takes_part in notes:
            state.context, state.takes_part = context, takes_part


def _run_once(module: nn.Module, arguments: Samples, allow_unused: bool) -> None:
    """Forward and backward on the samples, with the gradient of a mean; no `.grad` changes."""
    outputs = [out for out in _leaves(module(*arguments)) if out.requires_grad]
    inputs = [tensor for tensor in (*_leaves(arguments), *module.parameters()) if tensor.requires_grad]
    if outputs and inputs:
        gradients = [torch.full_like(out, 1.0 / max(1, out.numel())) for out in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=allow_unused)


def _leaves(values: Any) -> list[Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _learn_scales(states: list[LayerState]) -> None:
    """End a step for the states with an unknown scale, and give all histories their length; then all stays in place."""
    frame = current_frame()
    delayed = [state for state in states if state.update is not None]
    unknown = [state for state in delayed if any(operand.from_data for operand in state.operands)]
    update_states(unknown, None if frame is None else frame.group)
    for state in delayed:
        assert state.update is not None, "chosen for it"
        for operand in state.operands:
            operand.resize(state.update.amax_history_len)
        # A gradient's stays unknown where no backward comes by.
        predicted = state.weight_bound is not None and state.recipe is not None and takes_bound(state.recipe.linear)
        if state.input.from_data or (state.weight.from_data and not predicted):
            raise ValueError(
                "the sample arguments tell no scale for a layer whose scales are not known yet: its input or its weight"
                " is all zero, or it did not run. Give samples like the real data, or run a step first"
            )
    for state in states:
        for operand in state.operands:
            operand.captured = True


def _restore(kept: list[_Kept]) -> None:
    """What was known is as it was; of what was not, the scale stays, and no amax of the samples."""
    with torch.no_grad():
        for one in kept:
            if one.known:
                one.operand.scale.data.copy_(one.scale)
            one.operand.gathered.copy_(one.gathered)
            one.operand.history.copy_(resized_history(one.history, one.operand.history.shape[0]))
            one.operand.closed_before = one.closed_before
