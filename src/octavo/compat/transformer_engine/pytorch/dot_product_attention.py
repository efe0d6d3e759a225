"""`te.DotProductAttention`: `octavo.DotProductAttention` with Transformer Engine's signature.

Source: transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py of Transformer Engine 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from octavo.compat.planned import refuse
from octavo.compat.transformer_engine.pytorch.construction import refuse_planned, refuse_ranks
from octavo.compat.transformer_engine.pytorch.inference_params import InferenceParams
from octavo.compat.transformer_engine.pytorch.scaling_views import unquantized_fp8_meta
from octavo.modules import AttentionCall
from octavo.modules import DotProductAttention as OctavoDotProductAttention
from octavo.modules.attention_cache import attended_from_cache
from octavo.recipes import Recipe
from octavo.runtime.autocast import current_frame

Mask = Tensor | tuple[Tensor, Tensor]


class DotProductAttention(OctavoDotProductAttention):
    """Attention without parameters, with TE's arguments.

    Args:
        num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format, attn_mask_type, window_size,
            softmax_scale: as of `octavo.DotProductAttention`.
        sequence_parallel, tp_size, tp_group: one rank.
        get_rng_state_tracker: of dropout in tensor parallelism: changes nothing with one rank.
        layer_number: kept as an attribute.
        attention_type: "self" or "cross": computed alike.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: more than one rank is not built.
        softmax_type: "vanilla".

    Raises:
        NotImplementedError: names the argument that is not built.
        ValueError: as of `octavo.DotProductAttention`.
    """

    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None, sequence_parallel: bool = False, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, tp_group: Any | None = None,
        layer_number: int | None = None, attention_type: str = "self", cp_group: Any | None = None,
        cp_global_ranks: list[int] | None = None, cp_stream: Any | None = None, cp_comm_type: str = "p2p",
        softmax_scale: float | None = None, softmax_type: str = "vanilla", return_max_logit: bool = False,
    ) -> None:  # fmt: skip
        refuse_ranks("DotProductAttention", tp_group, tp_size)
        refuse_context_parallel(cp_group)
        refuse_planned("DotProductAttention", return_max_logit=return_max_logit)
        refuse_softmax("DotProductAttention", softmax_type)
        super().__init__(
            num_attention_heads, kv_channels, num_gqa_groups, attention_dropout, qkv_format,
            mask_type_of(attn_mask_type), window_size, softmax_scale=softmax_scale,
        )  # fmt: skip
        self.sequence_parallel, self.tp_size = bool(sequence_parallel), 1
        self.layer_number, self.attention_type = layer_number, attention_type
        # Of the context that it last ran in.
        self._seen_recipe: Recipe | None = None

    @property
    def fp8_meta(self) -> dict[str, Any]:
        """In TE's layout, of three products; attention runs in high precision: zeros and ones."""
        return unquantized_fp8_meta(3, self._seen_recipe)

    def forward(
        self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, attention_mask: Mask | None = None,
        qkv_format: str | None = None, cu_seqlens_q: Tensor | None = None, cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None, cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None, max_seqlen_kv: int | None = None, attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None, checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias", core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, fast_zero_fill: bool = True,
        inference_params: InferenceParams | None = None, pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False, *, after_cache: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention, its heads side by side: [..., H D] of the format's leading dimensions.

        Args:
            query_layer, key_layer, value_layer, qkv_format, after_cache: as of `octavo.DotProductAttention`.
            attention_mask to alibi_slopes: see `octavo.AttentionCall`; the mask is looked at with padding types and
                "arbitrary" alone, as there.
            cu_seqlens_q_padded, cu_seqlens_kv_padded, pad_between_seqs, fp8_output: not built.
            fast_zero_fill: changes nothing.
            inference_params: keeps keys and values, and gives those of all tokens so far.
        """
        refuse_planned(
            "DotProductAttention",
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            pad_between_seqs=pad_between_seqs,
            fp8_output=fp8_output,
        )
        if not torch.compiler.is_compiling() and (frame := current_frame()) is not None and frame.enabled:
            self._seen_recipe = frame.recipe
        call = attention_call(
            mask_type_of(attn_mask_type) or self.rules.mask_type,
            attention_mask=attention_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            attn_mask_type=mask_type_of(attn_mask_type),
            window_size=window_size,
            checkpoint_core_attention=checkpoint_core_attention or None,
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        if inference_params is not None:
            return attended_from_cache(self, query_layer, key_layer, value_layer, inference_params.cache, call)
        return super().forward(
            query_layer, key_layer, value_layer, qkv_format=qkv_format, after_cache=after_cache, **call
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Its own FP8 state, and that of the ways to compute attention that TE holds as children.
        for key in [key for key in state_dict if key.startswith(prefix) and key.endswith("_extra_state")]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def attention_call(mask_type: str, **given: Any) -> AttentionCall:
    """What a call of attention says, without what is not said; the mask is left out where its type takes none."""
    said = {name: value for name, value in given.items() if value is not None}
    if "padding" not in mask_type and mask_type != "arbitrary":
        said.pop("attention_mask", None)
    if said.get("core_attention_bias_type") == "no_bias":
        del said["core_attention_bias_type"]
    return cast(AttentionCall, said)


def mask_type_of(mask_type: Any) -> Any:
    """A mask type under its newer name: older code says "padding,causal"."""
    if not isinstance(mask_type, str):
        return mask_type
    named = mask_type.replace(",", "_")
    return "padding_causal" if named == "causal_padding" else named


def refuse_context_parallel(cp_group: Any | None) -> None:
    """Raise NotImplementedError for attention over several ranks."""
    for group in cp_group if isinstance(cp_group, list) else [cp_group]:
        if group is not None and group.size() > 1:
            refuse(f"te.DotProductAttention with a context-parallel group of {group.size()} ranks (cp_group)")


def refuse_softmax(layer: str, softmax_type: str) -> None:
    """Raise NotImplementedError for a softmax with a sink."""
    if softmax_type != "vanilla":
        refuse(f"te.{layer}(softmax_type={softmax_type!r})")


__all__ = ["DotProductAttention"]
