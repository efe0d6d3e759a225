"""`te.LayerNormLinear`: `octavo.LayerNormLinear` with Transformer Engine's signature, initialisation and attributes.

Source: transformer_engine/pytorch/module/layernorm_linear.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.construction import (
    Drawing,
    InitMethod,
    cached_weight_of,
    part_sizes,
    placed,
    refuse_planned,
    refuse_ranks,
)
from octavo.compat.transformer_engine.pytorch.one_product import OneProduct
from octavo.modules import CachedWeight
from octavo.modules import LayerNormLinear as OctavoLayerNormLinear
from octavo.modules.linear import quantize_parameter
from octavo.modules.norm import Normalization
from octavo.modules.split_linear import WeightInParts
from octavo.runtime import init_mode, quantized_init


class LayerNormLinear(OneProduct, OctavoLayerNormLinear):
    """A normalisation and a Linear with TE's arguments, in FP8 inside `te.autocast`.

    Args:
        in_features, out_features, sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size,
            get_rng_state_tracker, init_method, bias, return_bias, params_dtype, parallel_mode, parameters_split,
            device, name: as of `te.Linear`.
        eps, normalization, zero_centered_gamma: as of `octavo.LayerNormLinear`.
        return_layernorm_output: the forward gives the normalised input as well, last.
        return_layernorm_output_gathered: changes nothing with one rank.

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: parts do not add up, or an unknown parallel_mode or normalization.
    """

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any | None = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, init_method: InitMethod | None = None,
        bias: bool = True, normalization: Normalization = "LayerNorm", return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
        parameters_split: Iterable[str] | Mapping[str, int] | None = None, zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:  # fmt: skip
        refuse_ranks("LayerNormLinear", tp_group, tp_size, parallel_mode)
        refuse_planned(
            "LayerNormLinear",
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_name=ub_name,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        place = placed(device)
        # In high precision, and codes once they are drawn as TE draws.
        with quantized_init(False):
            super().__init__(
                in_features, out_features, bias, place, params_dtype, normalization=normalization, eps=eps,
                zero_centered_gamma=zero_centered_gamma, return_layernorm_output=return_layernorm_output,
            )  # fmt: skip
        self.layer_name = name
        self.sequence_parallel, self.parallel_mode, self.tp_size = bool(sequence_parallel), parallel_mode, 1
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self._drawing = Drawing(init_method, get_rng_state_tracker)
        if parameters_split is not None:
            self._split(part_sizes(parameters_split, out_features), place, params_dtype)
        self.reset_parameters()
        if parameters_split is None:
            quantize_parameter(self)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew, unless `defer_init`."""
        if not defer_init:
            self.reset_norm_parameters()
            self._drawing.fill(*self._drawn())

    def _drawn(self) -> tuple[list[Tensor], list[Tensor | None]]:
        return [self.weight], [self.bias]

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        cached_weight: CachedWeight | None = None,
    ) -> Any:
        """y [..., out_features]; with `return_bias` and `return_layernorm_output` a tuple (y, b, n) of what is asked.

        Args:
            inp: [..., in_features].
            is_first_microbatch, fp8_output, fp8_grad, cached_weight: as of `te.Linear`.
        """
        if fp8_output or fp8_grad:
            refuse_planned("LayerNormLinear", fp8_output=fp8_output, fp8_grad=fp8_grad)
        made = super().forward(inp, cached_weight=cached_weight_of(is_first_microbatch, cached_weight))
        if not self.return_bias:
            return made
        out, *normed = made if isinstance(made, tuple) else (made,)
        bias = self.bias
        return out, None if bias is None else bias.to(out.dtype), *normed

    def _split(self, sizes: dict[str, int], place: torch.device, dtype: torch.dtype | None) -> None:
        if self.fuse_wgrad_accumulation:
            refuse("te.LayerNormLinear(parameters_split=..., fuse_wgrad_accumulation=True)")
        if init_mode() is not None:
            refuse("te.LayerNormLinear(parameters_split=...) inside quantized_model_init")
        for name in ("weight", "bias"):
            del self._parameters[name]
        self.__class__ = SplitLayerNormLinear
        assert isinstance(self, SplitLayerNormLinear), "the class it has just been given"
        parts = {prefix.rstrip("_"): size for prefix, size in sizes.items()}
        self.add_parts(self.in_features, parts, self.use_bias, device=place, dtype=dtype)


class SplitLayerNormLinear(WeightInParts, LayerNormLinear):
    """`te.LayerNormLinear` whose output features belong to several parameters; made by `parameters_split`."""

    def _drawn(self) -> tuple[list[Tensor], list[Tensor | None]]:
        weights = [getattr(self, f"{name}_weight") for name in self.part_names]
        return weights, [getattr(self, f"{name}_bias") for name in self.part_names]


__all__ = ["LayerNormLinear", "SplitLayerNormLinear"]
