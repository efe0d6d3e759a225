"""octavo.GroupedLinear: the linear layers of several experts, each over its own part of the tokens, in FP8.

    x [M, in] is cut into groups of m_0, m_1, ... tokens, one an expert
    y_e = x_e w_e^T + b_e       x_e [m_e, in], w_e [out, in], b_e [out], y_e [m_e, out]

Parameters are `weight0`, `weight1`, ... and `bias0`, `bias1`, ..., as Transformer Engine names them. Delayed scaling
keeps a state for each expert, beside them in the state dict under `expert0_input_scale` and the like. The layer gives
the bits of one `octavo.Linear` an expert; tokens that pad a group inside never change a result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.functional.grouped_linear import GroupedCall, bounds_of, grouped_linear, grouped_linear_apart
from octavo.functional.grouped_on_device import DeviceCall, grouped_linear_on_device, unsupported_reasons
from octavo.functional.grouped_sizes import check_size_tensor, sizes_on_host
from octavo.kernels import amax
from octavo.modules.given_input import check_input
from octavo.modules.layernorm_linear import check_cached_weight, fp8_dtype, reset_linear
from octavo.modules.linear import CachedWeight
from octavo.modules.mlp_part import MLPPart
from octavo.modules.owned_parts import own_parts
from octavo.recipes import Recipe
from octavo.runtime import layer_call
from octavo.runtime.autocast import in_backward

_REMEDY = ". Give m_splits as a list (which waits for the device, if it comes from there)"


class Expert(MLPPart):
    """FP8 state of one expert, whose parameters are the layer's own: `expert0` is that of `weight0` and `bias0`."""

    @property
    def index(self) -> str:
        """What the names of its parameters end in."""
        return self.prefix.removeprefix("expert")

    @property
    def weight(self) -> Any:
        """The layer's, [out, in]."""
        return getattr(self._owner(), f"weight{self.index}")

    @property
    def bias(self) -> Any:
        """The layer's, [out] or None."""
        return getattr(self._owner(), f"bias{self.index}")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A new weight becomes the layer's."""
        setattr(self._owner(), f"{name}{self.index}", param)

    @property
    def shown_name(self) -> str:
        """As of a Linear; without a name, an expert of a layer."""
        return self.layer_name or f"GroupedLinear.{self.prefix}"

    def taken_out(self, state_dict: dict[str, Any], prefix: str) -> tuple[dict[str, Tensor], bool]:
        """Its entries, taken out of the layer's; and whether there is a new weight."""
        entries = self.delayed_state.taken_out(state_dict, f"{prefix}{self.prefix}_")
        return entries, f"{prefix}weight{self.index}" in state_dict


class GroupedLinear(nn.Module):
    """One Linear an expert with FP8 matrix products.

    Args:
        num_gemms: how many experts.
        in_features, out_features, bias, device, dtype: of each, as `nn.Linear`, initialisation included.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.

    Raises:
        ValueError: no expert at all.
    """

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        if type(num_gemms) is not int or num_gemms < 1:
            raise ValueError(f"num_gemms is {num_gemms!r}: it is the number of experts, an integer of 1 or more")
        self.num_gemms, self.in_features, self.out_features = num_gemms, in_features, out_features
        for index in range(num_gemms):
            one: Any = nn.Linear(in_features, out_features, bias, device=device, dtype=dtype)
            self.register_parameter(f"weight{index}", one.weight)
            self.register_parameter(f"bias{index}", one.bias)
        for index in range(num_gemms):
            self.add_module(f"expert{index}", Expert(self, f"expert{index}", recipe))

    @property
    def weights(self) -> list[Any]:
        """Of each expert, [out, in]."""
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    @property
    def biases(self) -> list[Any]:
        """Of each expert, [out] or None."""
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    @property
    def parts(self) -> list[Any]:
        """State of each expert."""
        return [getattr(self, f"expert{index}") for index in range(self.num_gemms)]

    @property
    def recipe(self) -> Recipe | None:
        """FP8 with this recipe also outside of `octavo.autocast`."""
        recipe: Recipe | None = self.parts[0].recipe
        return recipe

    @recipe.setter
    def recipe(self, recipe: Recipe | None) -> None:
        for part in self.parts:
            part.recipe = recipe

    @property
    def layer_name(self) -> str | None:
        """Qualified name, for overrides and counts; those of the experts end in ".expert0", ".expert1" and so on."""
        name: str | None = self.parts[0].layer_name
        # A layer that is converted by itself has no name of its own.
        return "" if name == "expert0" else name and name.removesuffix(".expert0")

    @layer_name.setter
    def layer_name(self, name: str | None) -> None:
        for part in self.parts:
            part.layer_name = None if name is None else f"{name}.{part.prefix}".removeprefix(".")

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        for weight, bias in zip(self.weights, self.biases, strict=True):
            reset_linear(weight, bias)

    def forward(
        self, x: Tensor, m_splits: Sequence[int] | Tensor, *, cached_weight: CachedWeight | None = None
    ) -> Tensor:
        """y [..., out_features].

        Args:
            x: [..., in_features], the tokens of expert 0 first, then those of expert 1 and so on.
            m_splits: tokens of each expert, 0 included: a sequence of integers, or an integer tensor [num_gemms] on the
                device of x, which is then not looked at from the host.
            cached_weight: as of `octavo.Linear`, for all weights.

        Raises:
            ValueError: shapes do not fit, sizes are no integers or do not sum to the tokens, or a parameter was
                replaced by one of another size.
        """
        check_cached_weight(cached_weight)
        check_input(x, self.in_features, self, "x")
        tokens = x.shape[:-1].numel()
        rows = x if x.dim() == 2 else x.reshape(tokens, self.in_features)
        if isinstance(m_splits, Tensor) and (m_splits.is_cuda or torch.compiler.is_compiling()):
            y = self._on_device(rows, m_splits, cached_weight)
        else:
            y = self._by_group(rows, self._checked(m_splits, tokens), cached_weight)
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _checked(self, m_splits: Sequence[int] | Tensor, tokens: int) -> tuple[int, ...]:
        """The sizes as integers."""
        splits = sizes_on_host(m_splits, self.num_gemms, "experts")
        if sum(splits) != tokens:
            raise ValueError(
                f"m_splits {list(splits)} sums to {sum(splits)}, and x has {tokens} tokens: every token belongs to one"
                " expert"
            )
        return splits

    def _check_parameters(self, weights: Sequence[Any], biases: Sequence[Any]) -> None:
        """Those that were put in the place of others are as large."""
        shapes = ("weight", weights, (self.out_features, self.in_features)), ("bias", biases, (self.out_features,))
        for name, given, shape in shapes:
            for index, one in enumerate(given):
                if (one is None and name == "weight") or (one is not None and tuple(one.shape) != shape):
                    found = "None" if one is None else f"of shape {tuple(one.shape)}"
                    raise ValueError(
                        f"{name}{index} is {found}: every {name} of this layer is {list(shape)}; build another"
                        " GroupedLinear for other extents"
                    )
        if 0 < sum(bias is None for bias in biases) < len(biases):
            missing = next(index for index, bias in enumerate(biases) if bias is None)
            raise ValueError(
                f"bias{missing} is None, and others are not: give all experts a bias, or none (zeros add 0)"
            )

    def _by_group(self, x: Tensor, splits: tuple[int, ...], cached_weight: CachedWeight | None) -> Tensor:
        """The sizes are known: decide, quantize, multiply."""
        calls = [layer_call(part.delayed_state, part.recipe, part.layer_name) for part in self.parts]
        weights, biases = self.weights, self.biases
        self._check_parameters(weights, biases)
        for part, call, weight, (start, stop) in zip(self.parts, calls, weights, bounds_of(splits), strict=True):
            # What a recompute in the backward sees has been seen before.
            if call.recipe is None and call.gather and not in_backward():
                part.delayed_state.input.gather(amax(x[start:stop].detach()))
                part.delayed_state.weight.gather(amax(weight.detach()))
        plans = [
            None if call.recipe is None else part.planned(call, weight)
            for part, call, weight in zip(self.parts, calls, weights, strict=True)
        ]
        chosen = tuple(plan for plan in plans if plan is not None)
        dtype = fp8_dtype(x) if chosen else x.dtype
        if len(chosen) < len(plans):
            return grouped_linear_apart(x, weights, biases, splits, plans, dtype)
        cached = tuple(
            part.kept_operand(weight, plan, cached_weight)
            for part, weight, plan in zip(self.parts, weights, chosen, strict=True)
        )
        return grouped_linear(x, weights, biases, GroupedCall(splits, chosen, dtype, cached))

    def _on_device(self, x: Tensor, m_splits: Tensor, cached_weight: CachedWeight | None) -> Tensor:
        """Only the device knows the sizes."""
        check_size_tensor(m_splits, self.num_gemms, x.device, "experts")
        calls = [layer_call(part.delayed_state, part.recipe, part.layer_name) for part in self.parts]
        recipe = calls[0].recipe
        if any(call.recipe is not recipe for call in calls):
            raise ValueError(f"m_splits is on {x.device} and the recipe differs between experts{_REMEDY}")
        weights, biases, plans = self.weights, self.biases, None
        self._check_parameters(weights, biases)
        if recipe is not None:
            plans = tuple(
                part.planned(call, weight) for part, call, weight in zip(self.parts, calls, weights, strict=True)
            )
        elif any(call.gather for call in calls):
            raise ValueError(f"m_splits is on {x.device}, and amaxes are being calibrated{_REMEDY}")
        dtype = fp8_dtype(x)
        features = self.in_features, self.out_features
        reasons = unsupported_reasons(x.device, dtype, None if plans is None else plans[0], features)
        if reasons:
            raise ValueError(
                f"m_splits is on {x.device}, and there is no grouped product for {'; '.join(reasons)}{_REMEDY}"
            )
        cached: tuple[Any, ...] = (None,) * self.num_gemms
        if plans is not None:
            cached = tuple(
                part.kept_operand(weight, plan, cached_weight)
                for part, weight, plan in zip(self.parts, weights, plans, strict=True)
            )
        return grouped_linear_on_device(x, m_splits, weights, biases, DeviceCall(plans, dtype, cached))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        found = [part.taken_out(state_dict, prefix) for part in self.parts]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        for part, (entries, new_weight) in zip(self.parts, found, strict=True):
            part.load(entries, new_weight)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        own_parts(self)

    def extra_repr(self) -> str:
        """Extents."""
        return (
            f"num_gemms={self.num_gemms}, in_features={self.in_features}, out_features={self.out_features},"
            f" bias={self.bias0 is not None}"
        )
