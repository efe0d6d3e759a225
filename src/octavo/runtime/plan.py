"""LinearPlan: everything that a Linear's forward and backward need to know, decided when the forward begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from octavo.recipes import Accumulate, OperandName
from octavo.runtime.checkpointing import Call
from octavo.runtime.counting import GemmCount, current_count
from octavo.runtime.layer_state import LayerState
from octavo.runtime.weight_bound import takes_bound
from octavo.scaling import PRODUCT_BLOCKS
from octavo.tensor import (
    BlockQuantizer,
    CurrentQuantizer,
    DelayedQuantizer,
    OperandState,
    PairedQuantizer,
    PredictedQuantizer,
    Quantizer,
    QuantizeSpec,
    StatelessQuantizer,
    StaticQuantizer,
    StochasticQuantizer,
    casts_together,
)

Observer = Callable[[OperandName, Quantizer], Quantizer]


class LinearPlan(NamedTuple):
    """Quantizers of the three operands, and how each product runs.

    Attributes:
        input, weight, grad_output: quantizers.
        accumulate: how each product sums.
        dgrad_fp8, wgrad_fp8: False runs that product in the dtype of the forward.
        keeps_input: the input is kept for wgrad and cast again; False keeps its codes, as a watched layer always does.
        weight_spec, weight_spec_t: what the weight's codes are, row-wise and column-wise, to tell whether a cached
            weight still fits.
        owner: stands for the layer: its state of gradients, which is never shared and, unlike the layer's whole state,
            does not lead back to the plan. States must go with their model, not with the next garbage collection.
        name, counter: for `count_gemms`.
        group: the state of the input, one with layers that run on the same one; None of a layer that has no such.
        keeps_weight: the weight is cast again for dgrad; False keeps its codes, as a watched layer always does.
        together: `octavo.tensor.cast_together` takes the quantizers of input and weight.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    accumulate: Accumulate
    dgrad_fp8: bool
    wgrad_fp8: bool
    keeps_input: bool
    weight_spec: QuantizeSpec
    weight_spec_t: QuantizeSpec
    owner: OperandState
    name: str
    counter: GemmCount | None
    group: OperandState | None = None
    keeps_weight: bool = False
    together: bool = False


def plan_linear(call: Call, state: LayerState, name: str, observer: Observer | None = None) -> LinearPlan:
    """The plan of one call, whose recipe is not None; that of the call before, if it was the same."""
    if torch.compiler.is_compiling():
        return _planned(call, state, name, observer, None)
    counter = current_count()
    # Numbers and objects that compare by identity first.
    made_for = (call, name, observer, counter)
    # Read once: another thread may put its own in its place.
    last = state.plan
    if last is not None and last[0] == made_for:
        kept: LinearPlan = last[1]
        return kept
    plan = _planned(call, state, name, observer, counter)
    state.plan = (made_for, plan)
    return plan


def _planned(
    call: Call, state: LayerState, name: str, observer: Observer | None, counter: GemmCount | None
) -> LinearPlan:
    assert call.recipe is not None, "a layer in high precision needs no plan"
    specs = call.recipe.linear
    # Of an operand without history; None of one that has one.
    input_made = _stateless(specs.input, specs.input_t)
    weight_made = _stateless(specs.weight, specs.weight_t)
    grad_made = _stateless(specs.grad_output, specs.grad_output_t)
    from_x, from_w, from_dy = call.from_data
    used, repeats = call.used, call.repeats
    note_x, note_w = (None, None) if used is None else (used.input, used.weight)
    # A measured scale is measured again: a layer remembers its last call, and each measured one of its own.
    fixed_x = None if repeats is None or from_x else repeats.input.scale
    fixed_w = None if repeats is None or from_w else repeats.weight.scale
    input_quantizer: Quantizer = input_made or DelayedQuantizer(
        specs.input, state.input, gather=call.gather, from_data=from_x, scale=fixed_x, used=note_x
    )
    weight_quantizer: Quantizer = weight_made or DelayedQuantizer(
        specs.weight, state.weight, gather=call.gather, from_data=from_w, scale=fixed_w, used=note_w
    )
    grad_quantizer: Quantizer = grad_made or DelayedQuantizer(
        specs.grad_output, state.grad_output, gather=True, from_data=from_dy
    )
    if state.weight_bound is not None and takes_bound(specs):
        weight_quantizer = PredictedQuantizer(specs.weight, state.weight_bound.amax)
    if observer is not None:
        input_quantizer = observer("input", input_quantizer)
        weight_quantizer = observer("weight", weight_quantizer)
        grad_quantizer = observer("grad_output", grad_quantizer)
    return LinearPlan(
        input_quantizer,
        weight_quantizer,
        grad_quantizer,
        call.recipe.accumulate,
        specs.dgrad_fp8,
        specs.wgrad_fp8,
        # Whoever wraps a quantizer is told of each cast once.
        specs.wgrad_fp8 and call.recipe.saved_input == "high_precision" and observer is None,
        specs.weight,
        specs.weight_t,
        state.grad_output,
        name,
        counter,
        state.input,
        specs.dgrad_fp8 and call.recipe.saved_weight == "high_precision" and observer is None,
        casts_together(input_quantizer, weight_quantizer),
    )


def _stateless(spec: QuantizeSpec, transposed: QuantizeSpec) -> Quantizer | None:
    """What makes an operand, whose transposed layout may have a spec of its own; None if it has a history."""
    if spec.scaling == "delayed":
        return None
    return _of_one_spec(spec) if transposed is spec else PairedQuantizer(_of_one_spec(spec), _of_one_spec(transposed))


def _of_one_spec(spec: QuantizeSpec) -> StatelessQuantizer:
    if spec.rounding == "stochastic":
        return StochasticQuantizer(spec)
    if spec.granularity in PRODUCT_BLOCKS:
        return BlockQuantizer(spec)
    return StaticQuantizer(spec) if spec.scaling == "static" else CurrentQuantizer(spec)
