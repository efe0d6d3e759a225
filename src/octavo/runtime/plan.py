"""LinearPlan: everything that a Linear's forward and backward need to know, decided when the forward begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from octavo.recipes import Accumulate, OperandName
from octavo.runtime.checkpointing import Call
from octavo.runtime.counting import GemmCount, current_count
from octavo.runtime.layer_state import LayerState
from octavo.tensor import CurrentQuantizer, DelayedQuantizer, Quantizer, QuantizeSpec, StaticQuantizer

Observer = Callable[[OperandName, Quantizer], Quantizer]


class LinearPlan(NamedTuple):
    """Quantizers of the three operands, and how each product runs.

    Attributes:
        input, weight, grad_output: quantizers.
        accumulate: how each product sums.
        dgrad_fp8, wgrad_fp8: False runs that product in the dtype of the forward.
        weight_spec: what the weight's codes are, to tell whether a cached weight still fits.
        name, counter: for `count_gemms`.
    """

    input: Quantizer
    weight: Quantizer
    grad_output: Quantizer
    accumulate: Accumulate
    dgrad_fp8: bool
    wgrad_fp8: bool
    weight_spec: QuantizeSpec
    name: str
    counter: GemmCount | None


def plan_linear(call: Call, state: LayerState, name: str, observer: Observer | None = None) -> LinearPlan:
    """The plan of one call, whose recipe is not None."""
    assert call.recipe is not None, "a layer in high precision needs no plan"
    specs = call.recipe.linear
    delayed = call.recipe.delayed is not None
    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_quantizer: Quantizer
    if delayed:
        from_x, from_w, from_dy = call.from_data
        fixed_x, fixed_w = (None, None) if call.repeats is None else (used.scale for used in call.repeats)
        note_x, note_w = (None, None) if call.used is None else call.used
        input_quantizer = DelayedQuantizer(
            specs.input, state.input, gather=call.gather, from_data=from_x, scale=fixed_x, used=note_x
        )
        weight_quantizer = DelayedQuantizer(
            specs.weight, state.weight, gather=call.gather, from_data=from_w, scale=fixed_w, used=note_w
        )
        grad_quantizer = DelayedQuantizer(specs.grad_output, state.grad_output, gather=True, from_data=from_dy)
    else:
        input_quantizer = _stateless(specs.input)
        weight_quantizer = _stateless(specs.weight)
        grad_quantizer = _stateless(specs.grad_output)
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
        specs.weight,
        name,
        current_count(),
    )


def _stateless(spec: QuantizeSpec) -> Quantizer:
    return StaticQuantizer(spec) if spec.scaling == "static" else CurrentQuantizer(spec)
