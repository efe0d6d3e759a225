"""What Transformer Engine's layers of one product share: Linear, LayerNormLinear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.compat.transformer_engine.pytorch.construction import drop_extra_state
from octavo.compat.transformer_engine.pytorch.main_grad import into_main_grad
from octavo.compat.transformer_engine.pytorch.scaling_views import fp8_meta
from octavo.modules import FP8LinearMixin


class OneProduct(FP8LinearMixin):
    """Comes before the layer of Octavo's that it changes.

    Attributes:
        fuse_wgrad_accumulation: the weight's gradient is added to `weight.main_grad`.
        apply_bias: the product adds the bias, and no caller is handed it.
    """

    fuse_wgrad_accumulation: bool
    apply_bias: bool

    def matrix(self) -> Tensor:
        """The weight [out, in], on its way to `main_grad` if that is where its gradient goes."""
        weight = super().matrix()
        return into_main_grad(weight) if self.fuse_wgrad_accumulation and torch.is_grad_enabled() else weight

    def added_bias(self) -> Tensor | None:
        """None with `return_bias`."""
        return self.bias if self.apply_bias else None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Histories and scales in TE's layout: `fp8_meta["scaling_fwd"].scale` and the like; copies."""
        return fp8_meta(self.delayed_state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
