"""`te.LayerNormMLP`: `octavo.LayerNormMLP` with Transformer Engine's signature, initialisation and attributes.

Source: transformer_engine/pytorch/module/layernorm_mlp.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable
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
from octavo.modules import LayerNormMLP as OctavoLayerNormMLP
from octavo.modules.linear import quantize_parameter
from octavo.modules.norm import Normalization
from octavo.runtime import quantized_init


class LayerNormMLP(OctavoLayerNormMLP):
    """A normalisation and an MLP with TE's arguments, in FP8 inside `te.autocast`.

    Args:
        hidden_size, ffn_hidden_size, eps, normalization, activation, zero_centered_gamma, bias, checkpoint: as of
            `octavo.LayerNormMLP`.
        sequence_parallel, fuse_wgrad_accumulation, tp_group, tp_size, get_rng_state_tracker, params_dtype, device,
            name: as of `te.Linear`.
        return_bias: the bias of fc2 is not added but returned, second.
        init_method, output_layer_init_method: fill fc1's weight and fc2's in place; normal(0, 0.023) if None.
        return_layernorm_output: the forward gives the normalised input as well, last.
        return_layernorm_output_gathered, set_parallel_mode: change nothing with one rank.
        seq_length, micro_batch_size: for warming up kernels, which Octavo's need not.

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: an unknown activation or normalization.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, eps: float = 1e-5, sequence_parallel: bool = False,
        return_bias: bool = False, get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any | None = None, tp_size: int = 1, init_method: InitMethod | None = None, bias: bool = True,
        normalization: Normalization = "LayerNorm", activation: str = "gelu",
        activation_params: dict[str, Any] | None = None, output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False, params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None, micro_batch_size: int | None = None, set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False, device: torch.device | str = "cuda", ub_overlap_ag: bool = False,
        name: str | None = None, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False, delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None, checkpoint: bool = False,
    ) -> None:  # fmt: skip
        refuse_ranks("LayerNormMLP", tp_group, tp_size)
        refuse_planned(
            "LayerNormMLP",
            activation_params=activation_params,
            ub_overlap_ag=ub_overlap_ag,
            ub_overlap_rs=ub_overlap_rs,
            ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad,
            ub_bulk_wgrad=ub_bulk_wgrad,
            delay_wgrad_compute=delay_wgrad_compute,
            symmetric_ar_type=symmetric_ar_type,
        )
        # In high precision, and codes once they are drawn as TE draws.
        with quantized_init(False):
            super().__init__(
                hidden_size, ffn_hidden_size, bias, placed(device), params_dtype, activation=activation,
                normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma,
                return_layernorm_output=return_layernorm_output, checkpoint=checkpoint,
            )  # fmt: skip
        self.layer_name = name
        self.sequence_parallel, self.set_parallel_mode, self.tp_size = bool(sequence_parallel), set_parallel_mode, 1
        self.fuse_wgrad_accumulation = bool(fuse_wgrad_accumulation)
        self.use_bias, self.return_bias = bool(bias), bool(return_bias)
        self.apply_bias = self.use_bias and not self.return_bias
        self._drawings = (
            Drawing(init_method, get_rng_state_tracker),
            Drawing(output_layer_init_method, get_rng_state_tracker),
        )
        self.reset_parameters()
        for part in self.parts:
            quantize_parameter(part)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Draw the parameters anew, unless `defer_init`."""
        if defer_init:
            return
        self.reset_norm_parameters()
        self._drawings[0].fill([self.fc1_weight], [self.fc1_bias])
        self._drawings[1].fill([self.fc2_weight], [self.fc2_bias])

    def forward(
        self, inp: Tensor, is_first_microbatch: bool | None = None, *, cached_weight: CachedWeight | None = None
    ) -> Any:
        """y [..., hidden_size]; with `return_bias` and `return_layernorm_output` a tuple (y, b, n) of what is asked.

        Args:
            inp: [..., hidden_size].
            is_first_microbatch, cached_weight: as of `te.Linear`, for both weights.
        """
        made = super().forward(inp, cached_weight=cached_weight_of(is_first_microbatch, cached_weight))
        if not self.return_bias:
            return made
        out, *normed = made if isinstance(made, tuple) else (made,)
        bias = self.fc2_bias
        return out, None if bias is None else bias.to(out.dtype), *normed

    def taken_parameters(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        """Weights on their way to `main_grad` if that is where their gradients go; without the bias handed out."""
        fc1_weight, fc1_bias, fc2_weight, fc2_bias = super().taken_parameters()
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            fc1_weight, fc2_weight = into_main_grad(fc1_weight), into_main_grad(fc2_weight)
        return fc1_weight, fc1_bias, fc2_weight, fc2_bias if self.apply_bias else None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """Histories and scales in TE's layout, copies: the columns of fc1, then those of fc2."""
        return fp8_meta(*(part.delayed_state for part in self.parts))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        drop_extra_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


__all__ = ["LayerNormMLP"]
