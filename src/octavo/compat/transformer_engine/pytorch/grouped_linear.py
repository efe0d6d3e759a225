"""`te.GroupedLinear`: `octavo.GroupedLinear` with Transformer Engine's signature, initialisation and attributes.

Source: transformer_engine/pytorch/module/grouped_linear.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.compat.transformer_engine.pytorch.construction import (
    Drawing,
    InitMethod,
    cached_weight_of,
    drop_extra_state,
    placed,
    refuse_planned,
    refuse_ranks,
)
from octavo.compat.transformer_engine.pytorch.main_grad import into_main_grad
from octavo.compat.transformer_engine.pytorch.scaling_views import fp8_meta
from octavo.modules import CachedWeight
from octavo.modules import GroupedLinear as OctavoGroupedLinear
from octavo.modules.linear import quantize_parameter
from octavo.runtime import quantized_init


class GroupedLinear(OctavoGroupedLinear):
    """One Linear an expert with TE's arguments, in FP8 inside `te.autocast`.

    Args:
        num_gemms: how many experts.
        in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size,
            get_rng_state_tracker, rng_tracker_name, init_method, bias, params_dtype, parallel_mode, device, name: as
            of `te.Linear`.
        return_bias: biases are not added but returned: (output, [bias of each expert]).

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: no expert at all, or an unknown parallel_mode.
    """

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        device: torch.device | str = "cuda", ub_overlap_rs: bool = False, ub_overlap_ag: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, save_original_input: bool = False,
        name: str | None = None,
    ) -> None:  # fmt: skip
        refuse_ranks("GroupedLinear", tp_group, tp_size, parallel_mode)
        refuse_planned(
            "GroupedLinear",
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_ag=ub_overlap_ag,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.fuse_wgrad_accumulation = False
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        # In high precision, and codes once they are drawn as TE draws.
        with quantized_init(False):
            super().__init__(num_gemms, in_features, out_features, self.use_bias, placed(device), params_dtype)
        self.layer_name = name
        self.sequence_parallel, self.parallel_mode, self.tp_size = bool(sequence_parallel), parallel_mode, 1
        self.apply_bias = self.use_bias and not self.return_bias
        self._drawing = Drawing(init_method, get_rng_state_tracker, rng_tracker_name)
        self.reset_parameters()
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        for part in self.parts:
            quantize_parameter(part)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew, unless `defer_init`."""
        if not defer_init:
            self._drawing.fill(super().weights, super().biases)

    @property
    def weights(self) -> list[Any]:
        """Of each expert, [out, in], on its way to `main_grad` if that is where its gradient goes."""
        weights = super().weights
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            return [into_main_grad(weight) for weight in weights]
        return weights

    @property
    def biases(self) -> list[Any]:
        """What is added for each expert, [out]; None with `return_bias`."""
        return super().biases if not self.return_bias else [None] * self.num_gemms

    def forward(
        self,
        inp: Tensor,
        m_splits: Sequence[int] | Tensor,
        is_first_microbatch: bool | None = None,
        *,
        cached_weight: CachedWeight | None = None,
    ) -> Any:
        """y [..., out_features]; with `return_bias`, (y, [bias of each expert]).

        Args:
            inp, m_splits: as x and m_splits of `octavo.GroupedLinear`.
            is_first_microbatch, cached_weight: as of `te.Linear`, for all weights.
        """
        out = super().forward(inp, m_splits, cached_weight=cached_weight_of(is_first_microbatch, cached_weight))
        if not self.return_bias:
            return out
        return out, [None if bias is None else bias.to(out.dtype) for bias in super().biases]

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Histories and scales in TE's layout, copies: the columns of the first expert, then those of the next."""
        return fp8_meta(*(part.delayed_state for part in self.parts))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


__all__ = ["GroupedLinear"]
