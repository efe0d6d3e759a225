"""octavo.Linear: an `nn.Linear` whose matrix products run in FP8.

    y = x w^T + b       x [..., in], w [out, in], b [out], y [..., out]

Parameters, their names, dtypes and initialisation are those of `nn.Linear`; delayed-scaling state rides beside them in
the state dict, under `input_scale`, `input_amax_history` and the like. FP8 is on inside `octavo.autocast`, or wherever
the layer has a recipe of its own; else the layer is an `nn.Linear` in every bit.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from octavo.functional import linear, quantize_weight
from octavo.kernels import amax
from octavo.modules.given_input import refuse_input
from octavo.recipes import Recipe, check_recipe
from octavo.runtime import (
    STALE_STEPS,
    Call,
    LayerState,
    LinearPlan,
    Observer,
    caches_weights,
    init_mode,
    layer_call,
    optimizer_steps,
    plan_linear,
    registered_states,
)
from octavo.runtime.autocast import in_backward, trains
from octavo.tensor import Operand, QuantizedTensor, QuantizeSpec, quantize, warn_user

CachedWeight = Literal["refresh", "reuse"]
Specs = tuple[QuantizeSpec, QuantizeSpec]
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FP8LinearMixin(nn.Module):
    """What makes a linear layer an FP8 one: state, recipe, cache; shared by all layouts of the weight.

    Attributes:
        recipe: used where no `octavo.autocast` says otherwise; None: high precision there.
        layer_name: qualified name in the converted model, for overrides and counts.
        delayed_state: amax histories and scales.
        observer: wraps the quantizers; None costs nothing.
        takes_recipes: `octavo.set_recipe` has given it one, or none.
    """

    # Entries of a state dict that do not make the weight new.
    beside_the_weight: ClassVar[tuple[str, ...]] = ("bias",)
    recipe: Recipe | None
    layer_name: str | None
    delayed_state: LayerState
    observer: Observer | None
    takes_recipes: bool = False
    weight: Any  # a Parameter; a QuantizedTensor if it exists in FP8 alone
    bias: Any  # a Parameter or None
    _weight_cache: KeptWeight | None

    def become_fp8(self, recipe: Recipe | None, name: str | None = None) -> None:
        """Give a linear layer what this class needs; parameters stay as they are."""
        check_recipe(recipe)
        self.recipe = recipe
        self.layer_name = name
        self.observer = None
        self.delayed_state = LayerState(self.weight.device)
        self._weight_cache = None
        if recipe is not None and recipe.delayed is not None:
            self.delayed_state.adopt_recipe(recipe)

    def become_plain(self) -> None:
        """Take away what `become_fp8` gave."""
        for name in ("recipe", "layer_name", "observer", "delayed_state", "_weight_cache"):
            del self.__dict__[name]
        self.__dict__.pop("takes_recipes", None)

    def matrix(self) -> Tensor:
        """The weight as [out, in]."""
        weight: Tensor = self.weight
        return weight

    def added_bias(self) -> Tensor | None:
        """What the product adds, [out]; None too for a layer that hands its bias out instead."""
        bias: Tensor | None = self.bias
        return bias

    def run(self, x: Tensor, cached_weight: CachedWeight | None) -> Tensor:
        """The forward of every layout: decide, quantize, multiply."""
        if cached_weight is not None and cached_weight not in ("refresh", "reuse"):
            raise ValueError(f"cached_weight is {cached_weight!r}: expected None, 'refresh' or 'reuse'")
        weight = self.matrix()
        if (
            not isinstance(x, Tensor)  # type: ignore[redundant-expr]  # users may give anything
            or x.shape[-1:] != weight.shape[1:]
            or not (x.is_floating_point() or x.dtype == weight.dtype)
        ):
            refuse_input(x, weight.shape[1], self)
        call = layer_call(self.delayed_state, self.recipe, self.layer_name)
        if call.recipe is None:
            return self._high_precision(x, weight, call)
        plan = self.planned(call, weight)
        operand = self.kept_operand(weight, plan, cached_weight)
        return linear(x, weight, self.added_bias(), plan, _out_dtype(x), operand)

    @property
    def shown_name(self) -> str:
        """What counts and warnings call the layer."""
        return self.layer_name or type(self).__name__

    def planned(self, call: Call, weight: Tensor) -> LinearPlan:
        """The plan of a call in FP8."""
        assert call.recipe is not None, "a call in high precision has no plan"
        if torch.compiler.is_compiling():
            # A name that compiled code depends on would make a graph for each layer of a model compiled by blocks.
            return plan_linear(call, self.delayed_state, "", self.observer)
        if call.recipe.delayed is not None:
            self._notice_forgotten_update(weight)
        if self.delayed_state.weight_bound is not None:
            self.delayed_state.weight_bound.follow(self.weight_parts())
        return plan_linear(call, self.delayed_state, self.shown_name, self.observer)

    def _high_precision(self, x: Tensor, weight: Tensor, call: Call) -> Tensor:
        if isinstance(weight, QuantizedTensor):
            weight = weight.dequantize()
        # What a checkpoint recomputes has been gathered.
        if call.gather and not in_backward():
            self.delayed_state.input.gather(amax(x.detach().reshape(x.shape[:-1].numel(), x.shape[-1])))
            self.delayed_state.weight.gather(amax(weight.detach()))
        return nn.functional.linear(x, weight, self.added_bias())

    def weight_parts(self) -> list[Tensor]:
        """The parameters that make up the weight."""
        return [self.weight]

    def kept_operand(self, weight: Tensor, plan: LinearPlan, mode: CachedWeight | None) -> Operand | None:
        """Codes of the weight that are kept, made now if need be; None if each call is to cast."""
        # Whether the weight has changed since cannot be traced: compiled code quantizes each call.
        if torch.compiler.is_compiling() or (mode is None and not caches_weights(self)):
            return None
        kept, gathers = self._weight_cache, getattr(plan.weight, "gather", False)
        specs = plan.weight_spec, plan.weight_spec_t
        # A call without gradients has no dgrad; one with them that follows makes the codes anew, in both layouts.
        columnwise = trains()
        if mode == "refresh" or kept is None or not kept.holds(self.weight_parts(), specs, columnwise):
            # Also under inference_mode: the next micro-batch may train.
            with torch.inference_mode(False), torch.no_grad():
                operand = quantize_weight(weight, plan, True, columnwise)
            kept = self._weight_cache = KeptWeight(self.weight_parts(), specs, operand, gathers)
        elif gathers and not kept.gathered:
            # Made by a call that gathers nothing, as those without gradients.
            self.delayed_state.weight.gather(amax(weight.detach()))
            kept.gathered = True
        if (note := getattr(plan.weight, "note", None)) is not None:
            note(kept.operand)
        return kept.operand

    def forget_cached_weight(self) -> None:
        """Let go of the codes."""
        self._weight_cache = None

    def _notice_forgotten_update(self, weight: Tensor) -> None:
        """Warn once if the optimizer has stepped and no update has followed."""
        state, version = self.delayed_state, _version(weight)
        if version == state.weight_version or not torch.is_grad_enabled():
            return
        state.weight_version = version
        state.stale_steps += 1
        if state.stale_steps == STALE_STEPS + 1:
            # The other layers have nothing to add.
            for other in registered_states():
                other.stale_steps = max(other.stale_steps, state.stale_steps)
            warn_user(
                f"{self.shown_name}: the weights changed {STALE_STEPS} times and the scales of"
                " delayed scaling did not follow: call octavo.update_scales(model) once a step, or run the forward"
                " inside octavo.autocast"
            )

    def extra_repr(self) -> str:
        """What `print(model)` shows: as before, and the recipe that is on without a context."""
        shown = super().extra_repr()
        return shown if self.recipe is None else f"{shown}, recipe={type(self.recipe).__name__}"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._weight_cache = None  # first: it refers to the weight that is about to be swapped
        module = super()._apply(fn, recurse)
        self.delayed_state.move(fn(torch.empty(0, device=self.delayed_state.device)).device)
        return module

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.delayed_state.is_used:
            destination.update(self.delayed_state.saved(prefix))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        entries = self.delayed_state.taken_out(state_dict, prefix)
        # Under whatever names a weight is kept, it is new if anything but what stands beside it is.
        names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        new_weight = any(name not in self.beside_the_weight for name in names)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        # With assign=True the weight may have come from another device.
        self.delayed_state.move(self.weight.device)
        self.delayed_state.load(entries, new_weight)
        self._weight_cache = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weight_cache": None, "observer": None}


class Linear(FP8LinearMixin, nn.Linear):
    """`nn.Linear` with FP8 matrix products.

    Args:
        in_features, out_features, bias, device, dtype: as `nn.Linear`, initialisation included.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.become_fp8(recipe)
        quantize_parameter(self)

    def forward(self, input: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor:
        """y = x w^T + b -> [..., out_features].

        Args:
            input: [..., in_features].
            cached_weight: for micro-batches between which the weight does not change. "refresh" quantizes the weight
                and keeps the codes, "reuse" takes them as long as the weight is the same, else it quantizes; None
                quantizes and keeps nothing. Only what is written into `weight.data` goes unnoticed.
        """
        return self.run(input, cached_weight)


def quantize_parameter(module: FP8LinearMixin) -> None:
    """Inside `octavo.quantized_init`, replace a new layer's weight by its codes."""
    mode = init_mode()
    if mode is None:
        return
    spec = mode.recipe.weight_spec
    if spec is None:
        return
    if spec.rounding != "nearest":
        raise ValueError(
            f"the recipe rounds weights {spec.rounding!r}, and a weight that exists in FP8 alone is rounded once, to"
            " nearest: give octavo.quantized_init another recipe, or keep the weight in high precision"
        )
    high = module.weight.detach()
    codes = quantize(
        high,
        spec.format,
        spec.granularity,
        scale=spec.static_scale,
        power_of_two=spec.power_of_two,
        epsilon=spec.epsilon,
        scale_rounding=spec.scale_rounding,
    )
    parameter = nn.Parameter(codes)
    if mode.keep_high_precision:
        held = _InitialValue(high.to("cpu", copy=True))
        parameter.get_high_precision_init_val = held.get  # type: ignore[attr-defined]
        parameter.clear_high_precision_init_val = held.clear  # type: ignore[attr-defined]
    module.weight = parameter


class _InitialValue:
    """Holds what a weight was before it was quantized, until it is cleared."""

    def __init__(self, value: Tensor) -> None:
        self.value: Tensor | None = value

    def get(self) -> Tensor | None:
        return self.value

    def clear(self) -> None:
        self.value = None


class KeptWeight:
    """Codes of a weight, row-wise or in both layouts, and what they were made of.

    Args:
        parts: the parameters that make up the weight.
        specs: of the codes, row-wise and column-wise.
        operand: the codes.
        gathered: their amax has been gathered.
    """

    def __init__(self, parts: list[Tensor], specs: Specs, operand: Operand, gathered: bool) -> None:
        self.operand, self.gathered = operand, gathered
        self._parts, self._contents, self._specs = [weakref.ref(part) for part in parts], _contents(parts), specs

    def holds(self, parts: list[Tensor], specs: Specs, columnwise: bool) -> bool:
        """True if these parts are the same tensors with the same values, and the layouts are there.

        (Of tensors of inference_mode nobody can know.)
        """
        return (
            (self.operand.codes_t is not None or not columnwise)
            and len(parts) == len(self._parts)
            and all(kept() is part and not part.is_inference() for kept, part in zip(self._parts, parts, strict=True))
            and self._specs == specs
            and self._contents == _contents(parts)
        )


def _contents(parts: list[Tensor]) -> list[tuple[int, int, int]]:
    """What tells that a weight holds other values: how often it changed, and where it lies (`weight.data = other`)."""
    return [(*_version(part), (part.codes if isinstance(part, QuantizedTensor) else part).data_ptr()) for part in parts]


def _version(weight: Tensor) -> tuple[int, int]:
    """How often a weight was changed in place (tensors of inference_mode do not count), and an optimizer stepped."""
    return -1 if weight.is_inference() else weight._version, optimizer_steps()


def _out_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the output: that of torch.autocast if it is on, else x's."""
    device = "cuda" if x.is_cuda else x.device.type
    if device == "meta":
        raise ValueError(
            f"input of shape {tuple(x.shape)} is on meta, where an FP8 layer has no values to cast: run the shapes with"
            " FP8 off (octavo.autocast(enabled=False)), or move the model with .to_empty(device=...), then load or"
            " initialise it"
        )
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in OUT_DTYPES:
        raise ValueError(f"input has dtype {dtype}: an FP8 layer takes float32, bfloat16 or float16")
    return dtype
