"""MLPPart: what makes one linear part of a larger layer an FP8 one, where the layer itself holds the parameters."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from octavo.modules.linear import FP8LinearMixin, quantize_parameter
from octavo.recipes import Recipe


class MLPPart(FP8LinearMixin):
    """FP8 state of one of the two linear parts of an MLP, whose parameters are the MLP's own.

    Its entries in a state dict are the MLP's as well: `fc1_input_scale` and the like.
    """

    def __init__(self, owner: nn.Module, prefix: str, recipe: Recipe | None) -> None:
        super().__init__()
        self.prefix = prefix
        self.belongs_to(owner)
        self.become_fp8(recipe)
        quantize_parameter(self)

    def belongs_to(self, owner: nn.Module) -> None:
        """Say whose part this is."""
        self._owner: Any = weakref.ref(owner)

    @property
    def owner(self) -> nn.Module:
        """The layer whose part this is."""
        owner: nn.Module = self._owner()
        return owner

    @property
    def weight(self) -> Any:
        """The MLP's."""
        return getattr(self._owner(), f"{self.prefix}_weight")

    @property
    def bias(self) -> Any:
        """The MLP's."""
        return getattr(self._owner(), f"{self.prefix}_bias")

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """A new weight becomes the MLP's."""
        setattr(self._owner(), f"{self.prefix}_{name}", param)

    @property
    def shown_name(self) -> str:
        """As of a Linear; without a name, the part of an MLP."""
        return self.layer_name or f"LayerNormMLP.{self.prefix}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.delayed_state.is_used:
            destination.update(self.delayed_state.saved(f"{prefix.removesuffix('.')}_"))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Nothing: the MLP does it, whose entries they are."""

    def taken_out(self, state_dict: dict[str, Any], prefix: str) -> tuple[dict[str, Tensor], bool]:
        """This part's entries, taken out of the MLP's; and whether there is a new weight."""
        entries = self.delayed_state.taken_out(state_dict, f"{prefix}{self.prefix}_")
        return entries, f"{prefix}{self.prefix}_weight" in state_dict

    def load(self, entries: dict[str, Tensor], new_weight: bool) -> None:
        """Take over entries that were saved."""
        # With assign=True the weight may have come from another device.
        self.delayed_state.move(self.weight.device)
        self.delayed_state.load(entries, new_weight)
        self._weight_cache = None

    def extra_repr(self) -> str:
        """The recipe that is on without a context."""
        return "" if self.recipe is None else f"recipe={type(self.recipe).__name__}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_owner": None}
