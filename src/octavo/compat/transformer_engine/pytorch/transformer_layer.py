"""`te.TransformerLayer`: `octavo.TransformerLayer` with Transformer Engine's signature, children and initialisation.

Biases of the projections are added in their products, not with dropout and residual: less work, other roundings.
Source: transformer_engine/pytorch/transformer.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.compat.transformer_engine.pytorch.construction import (
    InitMethod,
    cached_weight_of,
    placed,
    refuse_planned,
    refuse_ranks,
)
from octavo.compat.transformer_engine.pytorch.dot_product_attention import (
    Mask,
    attention_call,
    mask_type_of,
    refuse_context_parallel,
)
from octavo.compat.transformer_engine.pytorch.inference_params import InferenceParams
from octavo.compat.transformer_engine.pytorch.layernorm_mlp import LayerNormMLP
from octavo.compat.transformer_engine.pytorch.multihead_attention import MultiheadAttention
from octavo.compat.transformer_engine.pytorch.norm import LayerNorm, RMSNorm
from octavo.modules import TransformerLayer as OctavoTransformerLayer
from octavo.modules.multihead_attention import RotaryAngles
from octavo.modules.norm import Normalization
from octavo.modules.transformer_layer import LayerType
from octavo.runtime import quantized_init


class TransformerLayer(OctavoTransformerLayer):
    """One layer of a transformer with TE's arguments, in FP8 inside `te.autocast`.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, hidden_dropout, attention_dropout,
            kv_channels, self_attn_mask_type, window_size, enc_dec_attn_mask_type,
            apply_residual_connection_post_layernorm, output_layernorm, parallel_attention_mlp, layer_type,
            drop_path_rate, fuse_qkv_params, zero_centered_gamma, qkv_weight_interleaved, bias, activation,
            normalization, attn_input_format, rotary_pos_interleaved, qk_norm_type, qk_norm_eps, qk_norm_before_rope: as
            of `octavo.TransformerLayer`; both dropouts are 0.1 here.
        layernorm_epsilon, init_method, output_layer_init_method, layer_number, tp_group, tp_size, params_dtype,
            get_rng_state_tracker, fuse_wgrad_accumulation, seq_length, micro_batch_size, sequence_parallel,
            set_parallel_mode, device, name, softmax_type: as of `te.MultiheadAttention`.
        enc_dec_window_size: window of a decoder's attention to the encoder's output.
        ub_tp_comm_overlap: not built; the other `ub_` arguments say how it is done.

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: as of `octavo.TransformerLayer`.
    """

    def __init__(
        self, hidden_size: int, ffn_hidden_size: int, num_attention_heads: int, num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5, hidden_dropout: float = 0.1, attention_dropout: float = 0.1,
        init_method: InitMethod | None = None, output_layer_init_method: InitMethod | None = None,
        layer_number: int | None = None, kv_channels: int | None = None, self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None, tp_group: Any | None = None, tp_size: int = 1,
        params_dtype: torch.dtype | None = None, get_rng_state_tracker: Callable[[], Any] | None = None,
        fuse_wgrad_accumulation: bool = False, seq_length: int | None = None, micro_batch_size: int | None = None,
        sequence_parallel: bool = False, apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False, parallel_attention_mlp: bool = False, layer_type: LayerType = "encoder",
        drop_path_rate: float = 0.0, set_parallel_mode: bool = False, fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False, zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
        ub_tp_comm_overlap: bool = False, ub_overlap_ag: bool = True, ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = True, ub_bulk_wgrad: bool = True, bias: bool = True,
        activation: str = "gelu", normalization: Normalization = "LayerNorm", device: torch.device | str = "cuda",
        attn_input_format: str = "sbhd", name: str | None = None, qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False, softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        refuse_ranks("TransformerLayer", tp_group, tp_size)
        refuse_planned("TransformerLayer", ub_tp_comm_overlap=ub_tp_comm_overlap)
        masks = mask_type_of(self_attn_mask_type), mask_type_of(enc_dec_attn_mask_type)
        # Octavo's own children are checked and thrown away: on "meta" they cost nothing.
        with quantized_init(False):
            super().__init__(
                hidden_size, ffn_hidden_size, num_attention_heads, num_gqa_groups, layer_type=layer_type,
                self_attn_mask_type=masks[0], window_size=window_size, enc_dec_attn_mask_type=masks[1],
                hidden_dropout=hidden_dropout, drop_path_rate=drop_path_rate, output_layernorm=output_layernorm,
                parallel_attention_mlp=parallel_attention_mlp, attn_input_format=attn_input_format, bias=bias,
                apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm,
                activation=activation, normalization=normalization, eps=layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma, kv_channels=kv_channels, device="meta",
            )  # fmt: skip
        self._modules.clear()
        self.self_attn_mask_type, self.window_size = masks[0], window_size
        self.enc_dec_attn_mask_type, self.enc_dec_window_size = masks[1], enc_dec_window_size
        self.layer_number, self.name, self.kv_channels = layer_number, name, kv_channels
        self.apply_residual_connection_post_layernorm = apply_residual_connection_post_layernorm
        self.output_layernorm, self.sequence_parallel, self.tp_size = output_layernorm, bool(sequence_parallel), 1
        shared: dict[str, Any] = {
            "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "params_dtype": params_dtype, "get_rng_state_tracker": get_rng_state_tracker,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "sequence_parallel": sequence_parallel,
            "return_layernorm_output": apply_residual_connection_post_layernorm, "bias": bias,
            "zero_centered_gamma": zero_centered_gamma, "normalization": normalization, "device": placed(device),
        }  # fmt: skip
        of_attention: dict[str, Any] = {
            "kv_channels": kv_channels, "attention_dropout": attention_dropout, "layernorm_epsilon": layernorm_epsilon,
            "layer_number": layer_number, "num_gqa_groups": num_gqa_groups, "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved, "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format, "qk_norm_type": qk_norm_type, "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope, "softmax_type": softmax_type,
        }  # fmt: skip
        widths = hidden_size, ffn_hidden_size, num_attention_heads
        self._add_children(widths, shared, of_attention, activation, layernorm_epsilon)

    def _add_children(
        self,
        widths: tuple[int, int, int],
        shared: dict[str, Any],
        of_attention: dict[str, Any],
        activation: str,
        eps: float,
    ) -> None:
        """Those of TE's names, in TE's order, which optimizers number parameters by."""
        hidden_size, ffn_hidden_size, num_attention_heads = widths
        name = self.name
        own = {**shared, "return_layernorm_output": shared["return_layernorm_output"] and not self.output_layernorm}
        self.self_attention = MultiheadAttention(
            hidden_size, num_attention_heads, attn_mask_type=self.self_attn_mask_type, window_size=self.window_size,
            input_layernorm=not self.output_layernorm, name=_name(name, "self_attention"), **of_attention, **own,
        )  # fmt: skip
        self.inter_attention = None
        if self.layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size, num_attention_heads, attn_mask_type=self.enc_dec_attn_mask_type,
                window_size=self.enc_dec_window_size, input_layernorm=True, attention_type="cross",
                name=_name(name, "inter_attention"), **of_attention, **shared,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, eps, activation=activation, name=_name(name, "layernorm_mlp"), **shared
        )
        self.layernorm = None
        if self.output_layernorm:
            kind = RMSNorm if shared["normalization"] == "RMSNorm" else LayerNorm
            self.layernorm = kind(
                hidden_size, eps, params_dtype=shared["params_dtype"], device=shared["device"],
                zero_centered_gamma=shared["zero_centered_gamma"],
            )  # fmt: skip

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Mask | None = None, self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Mask | None = None, enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None, is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False, inference_params: InferenceParams | None = None,
        rotary_pos_emb: RotaryAngles | None = None, core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None, alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None, max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None, fast_zero_fill: bool = True, pad_between_seqs: bool | None = None,
    ) -> Tensor:  # fmt: skip
        """y of the input's shape.

        Args:
            hidden_states: [S, B, hidden], [B, S, hidden] or [T, hidden], by attn_input_format.
            encoder_output: what a decoder attends to besides; an encoder does not look at it.
            enc_dec_attn_mask, enc_dec_attn_mask_type, enc_dec_window_size: of that attention.
            self_attn_mask_type: instead of the layer's.
            is_first_microbatch: as of `te.Linear`, for all weights.
            attention_mask and the rest: of self attention, as of `te.MultiheadAttention`.
        """
        refuse_planned("TransformerLayer", pad_between_seqs=pad_between_seqs)
        mask_type = mask_type_of(self_attn_mask_type)
        cross_type = mask_type_of(enc_dec_attn_mask_type)
        recomputed = checkpoint_core_attention or None
        call = attention_call(
            mask_type or self.self_attn_mask_type,
            attention_mask=attention_mask,
            attn_mask_type=mask_type,
            window_size=window_size,
            checkpoint_core_attention=recomputed,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        of_encoder = attention_call(
            cross_type or self.enc_dec_attn_mask_type,
            attention_mask=enc_dec_attn_mask,
            attn_mask_type=cross_type,
            window_size=enc_dec_window_size,
            checkpoint_core_attention=recomputed,
        )
        return super().forward(
            hidden_states,
            encoder_output=encoder_output if self.layer_type == "decoder" else None,
            enc_dec_call=of_encoder,
            rotary_pos_emb=rotary_pos_emb,
            kv_cache=None if inference_params is None else inference_params.cache,
            cached_weight=cached_weight_of(is_first_microbatch),
            **call,
        )

    def set_context_parallel_group(self, cp_group: Any, *_: Any, **__: Any) -> None:
        """Accept a group of one rank.

        Raises:
            NotImplementedError: of more.
        """
        refuse_context_parallel(cp_group)

    def set_tensor_parallel_group(self, tp_group: Any | None) -> None:
        """Accept a group of one rank, or None.

        Raises:
            NotImplementedError: of more.
        """
        refuse_ranks("TransformerLayer", tp_group, 1)


def _name(owner: str | None, part: str) -> str | None:
    return None if owner is None else f"{owner}.{part}"


__all__ = ["TransformerLayer"]
