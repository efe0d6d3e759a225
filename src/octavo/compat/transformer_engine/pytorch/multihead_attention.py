"""`te.MultiheadAttention`: Octavo's, with Transformer Engine's signature, children and initialisation.

Source: transformer_engine/pytorch/attention/multi_head_attention.py of Transformer Engine 2.
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
    DotProductAttention,
    Mask,
    attention_call,
    mask_type_of,
    refuse_context_parallel,
    refuse_softmax,
)
from octavo.compat.transformer_engine.pytorch.inference_params import InferenceParams
from octavo.compat.transformer_engine.pytorch.layernorm_linear import LayerNormLinear
from octavo.compat.transformer_engine.pytorch.linear import Linear
from octavo.modules import CachedWeight
from octavo.modules import MultiheadAttention as OctavoMultiheadAttention
from octavo.modules.kv_cache import Cache
from octavo.modules.multihead_attention import AttentionType, RotaryAngles
from octavo.modules.norm import Normalization
from octavo.modules.query_key_norm import query_key_norm
from octavo.recipes import Recipe
from octavo.runtime import quantized_init


class MultiheadAttention(OctavoMultiheadAttention):
    """Self or cross attention with its projections, with TE's arguments; FP8 inside `te.autocast`.

    Args:
        hidden_size, num_attention_heads, kv_channels, attention_dropout, attn_mask_type, window_size, num_gqa_groups,
            input_layernorm, return_layernorm_output, attention_type, fuse_qkv_params, zero_centered_gamma,
            qkv_weight_interleaved, rotary_pos_interleaved, bias, normalization, qkv_format, qk_norm_type, qk_norm_eps,
            qk_norm_before_rope: as of `octavo.MultiheadAttention`; attention's dropout is 0.1 here.
        layernorm_epsilon: added to the variance, or to the mean of squares.
        init_method, output_layer_init_method: fill the weights of q, k, v and of `proj`; normal(0, 0.023) if None.
        layer_number: kept as an attribute.
        tp_group, tp_size, sequence_parallel, get_rng_state_tracker, fuse_wgrad_accumulation, params_dtype, device,
            name: as of `te.Linear`.
        return_bias: the bias of `proj` is not added but returned, second.
        set_parallel_mode: changes nothing with one rank.
        seq_length, micro_batch_size: for warming up kernels, which Octavo's need not.
        softmax_type: "vanilla".

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: as of `octavo.MultiheadAttention`.
    """

    def __init__(
        self, hidden_size: int, num_attention_heads: int, kv_channels: int | None = None,
        attention_dropout: float = 0.1, layernorm_epsilon: float = 1e-5, init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None, layer_number: int | None = None,
        attn_mask_type: str = "causal", window_size: tuple[int, int] | None = None, tp_group: Any | None = None,
        tp_size: int = 1, num_gqa_groups: int | None = None, fuse_wgrad_accumulation: bool = False,
        get_rng_state_tracker: Callable[[], Any] | None = None, sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None, return_bias: bool = False, return_layernorm_output: bool = False,
        input_layernorm: bool = False, attention_type: AttentionType = "self", set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False, zero_centered_gamma: bool = False, qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False, ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        bias: bool = True, normalization: Normalization = "LayerNorm", device: torch.device | str = "cuda",
        qkv_format: str = "sbhd", name: str | None = None, qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6, qk_norm_before_rope: bool = False, seq_length: int | None = None,
        micro_batch_size: int | None = None, softmax_type: str = "vanilla",
    ) -> None:  # fmt: skip
        refuse_ranks("MultiheadAttention", tp_group, tp_size)
        refuse_softmax("MultiheadAttention", softmax_type)
        refuse_planned(
            "MultiheadAttention",
            ub_overlap_ag=ub_overlap_ag, ub_overlap_rs=ub_overlap_rs, ub_overlap_rs_dgrad=ub_overlap_rs_dgrad,
            ub_bulk_dgrad=ub_bulk_dgrad, ub_bulk_wgrad=ub_bulk_wgrad,
        )  # fmt: skip
        mask_type = mask_type_of(attn_mask_type)
        # Octavo's own children are checked and thrown away: on "meta" they cost nothing.
        with quantized_init(False):
            super().__init__(
                hidden_size, num_attention_heads, kv_channels, num_gqa_groups, attention_type=attention_type,
                input_layernorm=input_layernorm, return_layernorm_output=return_layernorm_output,
                fuse_qkv_params=fuse_qkv_params, qkv_weight_interleaved=qkv_weight_interleaved, bias=bias,
                attention_dropout=attention_dropout, attn_mask_type=mask_type, window_size=window_size,
                qkv_format=qkv_format, normalization=normalization, eps=layernorm_epsilon,
                zero_centered_gamma=zero_centered_gamma, qk_norm_type=qk_norm_type, qk_norm_eps=qk_norm_eps,
                qk_norm_before_rope=qk_norm_before_rope, rotary_pos_interleaved=rotary_pos_interleaved, device="meta",
            )  # fmt: skip
        self._modules.clear()
        self.attn_mask_type, self.return_bias = mask_type, bool(return_bias)
        self.layer_number = 1 if layer_number is None else layer_number
        self.name, self.sequence_parallel, self.tp_size = name, bool(sequence_parallel), 1
        place = placed(device)
        # In TE's order, which optimizers number parameters by.
        self.q_norm = query_key_norm(qk_norm_type, self.kv_channels, qk_norm_eps, False, device=place)
        self.k_norm = query_key_norm(qk_norm_type, self.kv_channels, qk_norm_eps, False, device=place)
        shared: dict[str, Any] = {
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation, "get_rng_state_tracker": get_rng_state_tracker,
            "sequence_parallel": sequence_parallel, "params_dtype": params_dtype, "device": place, "bias": bias,
        }  # fmt: skip
        norm: dict[str, Any] = {
            "eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }  # fmt: skip
        self._add_te_projections(
            norm if input_layernorm else None, fuse_qkv_params, {"init_method": init_method, **shared}
        )
        self._add_rest(attention_dropout, window_size, {"init_method": output_layer_init_method, **shared})

    def _add_projections(
        self, norm: dict[str, Any] | None, fused: bool, bias: bool, recipe: Recipe | None, **place: Any
    ) -> None:
        """None of Octavo's: those of TE's name come afterwards."""

    def _add_te_projections(self, norm: dict[str, Any] | None, fused: bool, shared: dict[str, Any]) -> None:
        """What makes q, k and v."""
        num_q, num_kv = self.num_attention_heads * self.kv_channels, self.num_gqa_groups * self.kv_channels
        rows = {"query": num_q, "key": num_kv, "value": num_kv}
        of_self = self.attention_type == "self"
        first = dict(rows) if of_self else {"query": rows["query"]}
        if of_self:
            self._first, named = ("qkv", "linear_qkv") if norm is None else ("layernorm_qkv", "layernorm_linear_qkv")
        else:
            self._first, named = (
                ("query_layer", "linear_q") if norm is None else ("layernorm_query", "layernorm_linear_q")
            )
        # TE keeps a lone query layer's weight under its plain name.
        split = None if fused or (norm is None and not of_self) else first
        made = Linear if norm is None else LayerNormLinear
        layer = made(
            self.hidden_size, sum(first.values()), parameters_split=split, name=_name(self.name, named),
            **(norm or {}), **shared,
        )  # fmt: skip
        self.add_module(self._first, layer)
        if not of_self:
            del rows["query"]
            self.key_value = Linear(
                self.hidden_size, sum(rows.values()), parameters_split=None if fused else rows,
                name=_name(self.name, "linear_kv"), **shared,
            )  # fmt: skip

    def _add_rest(self, dropout: float, window_size: tuple[int, int] | None, shared: dict[str, Any]) -> None:
        """Attention itself, and the way back."""
        self.core_attention = DotProductAttention(
            self.num_attention_heads, self.kv_channels, self.num_gqa_groups, dropout, self.qkv_format,
            self.attn_mask_type, window_size, layer_number=self.layer_number, attention_type=self.attention_type,
        )  # fmt: skip
        rows, named = self.num_attention_heads * self.kv_channels, _name(self.name, "proj")
        self.proj = Linear(rows, self.hidden_size, return_bias=self.return_bias, name=named, **shared)

    def forward(
        self, hidden_states: Tensor, attention_mask: Mask | None = None, encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None, window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None, checkpoint_core_attention: bool = False,
        inference_params: InferenceParams | None = None, rotary_pos_emb: RotaryAngles | None = None,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None, *, kv_cache: Cache | None = None,
        cached_weight: CachedWeight | None = None,
    ) -> Any:  # fmt: skip
        """y of the input's shape; with `return_bias` and `return_layernorm_output` a tuple (y, b, n) of what is asked.

        Args:
            hidden_states, encoder_output, rotary_pos_emb: as of `octavo.MultiheadAttention`.
            is_first_microbatch: as of `te.Linear`, for all weights.
            inference_params: generation: keeps keys and values, and gives those of all tokens so far.
            attention_mask and the rest: as of `te.DotProductAttention`.
            kv_cache, cached_weight: Octavo's names of inference_params and is_first_microbatch.
        """
        refuse_planned(
            "MultiheadAttention",
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            pad_between_seqs=pad_between_seqs,
        )
        mask_type = mask_type_of(attn_mask_type)
        call = attention_call(
            mask_type or self.attn_mask_type,
            attention_mask=attention_mask,
            attn_mask_type=mask_type,
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention or None,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
        )
        made: Any = super().forward(
            hidden_states,
            encoder_output=encoder_output if self.attention_type == "cross" else None,
            rotary_pos_emb=rotary_pos_emb,
            kv_cache=kv_cache if inference_params is None else inference_params.cache,
            cached_weight=cached_weight_of(is_first_microbatch, cached_weight),
            **call,
        )
        if not self.return_bias:
            return made
        # (y, b), or ((y, b), n)
        return (*made[0], made[1]) if self.return_layernorm_output else made

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
        refuse_ranks("MultiheadAttention", tp_group, 1)


def _name(owner: str | None, part: str) -> str | None:
    return None if owner is None else f"{owner}.{part}"


__all__ = ["MultiheadAttention"]
