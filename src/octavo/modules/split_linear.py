"""Linear layers whose weight is kept in parts: query_weight, key_weight and value_weight for one product.

    w = [part 1; part 2; ...]        rows under one another
    y = x w^T + b

The parts are parameters, so that a state dict holds each under its own name; a call joins them, which reads and writes
the weight once more. (A fused weight, one parameter, does not.) FP8 sees one operand: one scale, one state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octavo.modules.layernorm_linear import LayerNormLinear, NormalisedInput, reset_linear
from octavo.modules.linear import CachedWeight, FP8LinearMixin
from octavo.modules.norm import Normalization
from octavo.recipes import Recipe
from octavo.runtime import init_mode


class WeightInParts(FP8LinearMixin):
    """What layers share whose weight is kept in parts.

    Attributes:
        part_names: in the order of their rows.
    """

    in_features: int
    out_features: int
    part_names: tuple[str, ...]

    def add_parts(self, in_features: int, parts: Mapping[str, int], bias: bool, **place: Any) -> None:
        """Give the layer `<name>_weight` [rows, in_features] and `<name>_bias` [rows] for each part."""
        if init_mode() is not None:
            raise ValueError(
                f"a weight in the parts {', '.join(parts)} cannot be made inside octavo.quantized_init, where it would"
                " be one tensor of codes with one scale: build the layer with fuse_qkv_params=True"
            )
        self.in_features, self.out_features = in_features, sum(parts.values())
        self.part_names = tuple(parts)
        for name, rows in parts.items():
            self.register_parameter(f"{name}_weight", nn.Parameter(torch.empty(rows, in_features, **place)))
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(rows, **place)) if bias else None)
        self.reset_parts()

    def reset_parts(self) -> None:
        """Draw each part as `nn.Linear` would draw the parameters of a layer of its own."""
        for name in self.part_names:
            reset_linear(getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias"))

    @property
    def weight(self) -> Any:
        """[out_features, in_features]: the parts, joined. Writing into it changes no parameter."""
        return _joined([getattr(self, f"{name}_weight") for name in self.part_names])

    @property
    def bias(self) -> Any:
        """[out_features], joined; None if there is none."""
        parts = [getattr(self, f"{name}_bias") for name in self.part_names]
        return None if parts[0] is None else _joined(parts)

    def _notice_forgotten_update(self, weight: Tensor) -> None:
        super()._notice_forgotten_update(getattr(self, f"{self.part_names[0]}_weight"))

    def weight_parts(self) -> list[Tensor]:
        """As they are in the state dict."""
        return [getattr(self, f"{name}_weight") for name in self.part_names]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class SplitLinear(WeightInParts):
    """`octavo.Linear` with its weight in parts.

    Args:
        in_features: as of `nn.Linear`.
        parts: name and rows of each.
        bias, device, dtype: as of `nn.Linear`.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.add_parts(in_features, parts, bias, device=device, dtype=dtype)
        self.become_fp8(recipe)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.reset_parts()

    def forward(self, input: Tensor, *, cached_weight: CachedWeight | None = None) -> Tensor:
        """y [..., out_features]; arguments as of `octavo.Linear`."""
        return self.run(input, cached_weight)

    def extra_repr(self) -> str:
        """Extents, parts, and the recipe that is on without a context."""
        return _shown(self, "")


class LayerNormSplitLinear(WeightInParts, LayerNormLinear):
    """`octavo.LayerNormLinear` with its weight in parts.

    Args:
        in_features: as of `nn.Linear`.
        parts: name and rows of each.
        bias, device, dtype: as of `nn.Linear`.
        normalization, eps, zero_centered_gamma, return_layernorm_output, recipe: as of `octavo.LayerNormLinear`.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        NormalisedInput.__init__(self)
        self.return_layernorm_output = return_layernorm_output
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.add_norm(in_features, normalization, eps, zero_centered_gamma, (True, True), **place)
        self.add_parts(in_features, parts, bias, **place)
        self.become_fp8(recipe)

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""
        self.reset_norm_parameters()
        self.reset_parts()

    def extra_repr(self) -> str:
        """Extents, parts and options, and the recipe that is on without a context."""
        return _shown(self, f", {self.shown_norm()}")


def _shown(layer: WeightInParts, options: str) -> str:
    parts = ", ".join(f"{name}={getattr(layer, f'{name}_weight').shape[0]}" for name in layer.part_names)
    shown = f"in_features={layer.in_features}, out_features={layer.out_features} ({parts}){options}"
    return shown if layer.recipe is None else f"{shown}, recipe={type(layer.recipe).__name__}"
