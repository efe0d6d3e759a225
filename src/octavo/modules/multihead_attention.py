"""octavo.MultiheadAttention: projections around attention.

    n = norm(x)                                             with input_layernorm
    q, k, v = n wq^T + bq, n wk^T + bk, n wv^T + bv         one product; cross attention makes k, v of another input
    q, k = rotary and norm of their heads                   both optional
    y = attention(q, k, v) wo^T + bo

x, y [S, B, hidden], [B, S, hidden] or [T, hidden], by qkv_format. The projections run in FP8 inside `octavo.autocast`,
or with a recipe of the layer's own; attention in high precision, unless `fp8_attention` gives it FP8 operands.
Children and parameters have Transformer Engine's names: `layernorm_qkv` (or `qkv`; of cross attention
`layernorm_query` or `query_layer`, and `key_value`), `core_attention`, `proj`, `q_norm`, `k_norm`; and `query_weight`,
`key_weight`, `value_weight` in them, or one `weight` with fuse_qkv_params.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from octavo.modules.attention_cache import attended_from_cache, turned
from octavo.modules.dot_product_attention import (
    AttentionCall,
    DotProductAttention,
    check_call,
    check_groups,
    packing_of,
)
from octavo.modules.given_input import check_values
from octavo.modules.kv_cache import Cache
from octavo.modules.layernorm_linear import LayerNormLinear
from octavo.modules.linear import CachedWeight, Linear
from octavo.modules.norm import Normalization
from octavo.modules.options import names_its_options
from octavo.modules.query_key_norm import query_key_norm
from octavo.modules.split_linear import LayerNormSplitLinear, SplitLinear
from octavo.recipes import Recipe

RotaryAngles = Tensor | tuple[Tensor, Tensor]
AttentionType = Literal["self", "cross"]


class MultiheadAttention(nn.Module):
    """Self or cross attention with its projections.

    Args:
        hidden_size: features of the input and the output.
        num_attention_heads: heads of queries.
        kv_channels: features of a head; hidden_size / num_attention_heads if None.
        num_gqa_groups: heads of keys and values; as many as of queries if None.
        attention_type: "self" or "cross".
        input_layernorm: normalise the input first.
        return_layernorm_output: the forward gives (y, n).
        fuse_qkv_params: one weight for queries, keys and values, instead of one each.
        qkv_weight_interleaved: of a fused weight, rows go group by group: the queries of a group, its key, its value.
        bias: the projections have one.
        attention_dropout, attn_mask_type, window_size, qkv_format, softmax_scale, fp8_attention: as of
            `octavo.DotProductAttention`.
        normalization, eps, zero_centered_gamma: as of `octavo.LayerNormLinear`.
        qk_norm_type: None, "L2Normalization", "RMSNorm" or "LayerNorm", of each head of queries and keys.
        qk_norm_eps: its epsilon.
        qk_norm_before_rope: normalise before the heads are turned, not after.
        rotary_pos_interleaved: rotary pairs are neighbouring features.
        device, dtype: of the parameters, drawn as those of `nn.Linear`.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.
    """

    @names_its_options
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        num_gqa_groups: int | None = None,
        *,
        attention_type: AttentionType = "self",
        input_layernorm: bool = False,
        return_layernorm_output: bool = False,
        fuse_qkv_params: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        attention_dropout: float = 0.0,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        qkv_format: str = "sbhd",
        softmax_scale: float | None = None,
        fp8_attention: bool = False,
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        rotary_pos_interleaved: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        _check_type(attention_type, input_layernorm, return_layernorm_output)
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads
        self.kv_channels = _channels(hidden_size, num_attention_heads) if kv_channels is None else kv_channels
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_groups(num_attention_heads, self.num_gqa_groups)
        self.attention_type, self.input_layernorm = attention_type, input_layernorm
        self.return_layernorm_output, self.qkv_format = return_layernorm_output, qkv_format
        self.interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.qk_norm_before_rope, self.rotary_pos_interleaved = qk_norm_before_rope, rotary_pos_interleaved
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        norm: dict[str, Any] = {
            "normalization": normalization,
            "eps": eps,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        self._add_projections(norm if input_layernorm else None, fuse_qkv_params, bias, recipe, **place)
        self.q_norm = query_key_norm(qk_norm_type, self.kv_channels, qk_norm_eps, zero_centered_gamma, **place)
        self.k_norm = query_key_norm(qk_norm_type, self.kv_channels, qk_norm_eps, zero_centered_gamma, **place)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.kv_channels, self.num_gqa_groups, attention_dropout, qkv_format, attn_mask_type,
            window_size, softmax_scale=softmax_scale, fp8_attention=fp8_attention,
        )  # fmt: skip
        self.proj = Linear(num_attention_heads * self.kv_channels, hidden_size, bias, recipe=recipe, **place)

    def _add_projections(
        self, norm: dict[str, Any] | None, fused: bool, bias: bool, recipe: Recipe | None, **place: Any
    ) -> None:
        """What makes q, k and v."""
        num_q, num_kv = self.num_attention_heads * self.kv_channels, self.num_gqa_groups * self.kv_channels
        rows = {"query": num_q, "key": num_kv, "value": num_kv}
        more: dict[str, Any] = {"recipe": recipe, **place}
        if self.attention_type == "self":
            self._first = "qkv" if norm is None else "layernorm_qkv"
            self.add_module(self._first, _projection(self.hidden_size, rows, norm, fused, bias, more))
            return
        self._first = "query_layer" if norm is None else "layernorm_query"
        query = {"query": rows.pop("query")}
        self.add_module(self._first, _projection(self.hidden_size, query, norm, fused, bias, more))
        self.key_value = _projection(self.hidden_size, rows, None, fused, bias, more)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_output: Tensor | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        kv_cache: Cache | None = None,
        cached_weight: CachedWeight | None = None,
        **call: Unpack[AttentionCall],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y of the input's shape; with `return_layernorm_output` (y, n).

        Args:
            hidden_states: [S, B, hidden], [B, S, hidden] or [T, hidden], by qkv_format.
            encoder_output: of cross attention, what keys and values are made of.
            rotary_pos_emb: angles, of `octavo.RotaryPositionEmbedding`; a pair (of queries, of keys) where they differ.
            kv_cache: generation: keeps keys and values, and gives those of all tokens so far.
            cached_weight: as of `octavo.Linear`, for all weights.
            call: of attention, see `AttentionCall`.

        Raises:
            TypeError: an argument that attention does not have.
            ValueError: an input of another shape; what does not go with the layer, as of `octavo.DotProductAttention`.
        """
        check_call(call)
        if (encoder_output is not None) != (self.attention_type == "cross"):
            raise ValueError(
                f"attention_type is {self.attention_type!r} and encoder_output is"
                f" {'None' if encoder_output is None else 'given'}: it belongs to 'cross', and to it alone"
            )
        self._check_inputs(hidden_states, encoder_output)
        # 1. Heads.  [..., hidden] -> q [..., H, D], k, v [..., G, D]
        q, k, v, normed = self._heads(hidden_states, encoder_output, cached_weight)
        # 2. Positions and norms.
        if self.qk_norm_before_rope:
            q, k = self._normed_heads(q, k)
        if rotary_pos_emb is not None:
            q, k = self._turned_heads(q, k, rotary_pos_emb, kv_cache, call)
            if self.q_norm is None:
                v = _by_itself(v)
        if not self.qk_norm_before_rope:
            q, k = self._normed_heads(q, k)
        # 3. Attention.  -> [..., H D]
        if kv_cache is None or self.attention_type == "cross":
            context = self.core_attention(q, k, v, **call)
        else:
            context = attended_from_cache(self.core_attention, q, k, v, kv_cache, call)
        # 4. Back.  [..., H D] -> [..., hidden]
        y: Tensor = self.proj(context, **_micro_batch(cached_weight))
        return y if normed is None else (y, normed)

    def _check_inputs(self, hidden_states: Tensor, encoder_output: Tensor | None) -> None:
        layout, hidden = self.qkv_format, self.hidden_size
        shapes = {
            "sbhd": ("tokens", "batch", str(hidden)), "bshd": ("batch", "tokens", str(hidden)),
            "thd": ("tokens", str(hidden)),
        }  # fmt: skip
        for name, x in (("hidden_states", hidden_states), ("encoder_output", encoder_output)):
            if x is None:
                continue
            check_values(x, self, name, hidden)
            if x.dim() != len(shapes[layout]) or x.shape[-1] != hidden:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: the layer's format {layout!r} takes"
                    f" [{', '.join(shapes[layout])}]"
                )
        batch = 1 if layout == "sbhd" else 0
        if encoder_output is not None and layout != "thd" and encoder_output.shape[batch] != hidden_states.shape[batch]:
            raise ValueError(
                f"encoder_output has shape {tuple(encoder_output.shape)} and hidden_states"
                f" {tuple(hidden_states.shape)}: of format {layout!r}, both must be of one batch, dimension {batch}"
            )

    def _heads(
        self, x: Tensor, encoder_output: Tensor | None, cached_weight: CachedWeight | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        made = getattr(self, self._first)(x, **_micro_batch(cached_weight))
        projected, normed = made if self.return_layernorm_output else (made, None)
        if encoder_output is None:
            return *self._split(projected, self.num_attention_heads // self.num_gqa_groups), normed
        q = projected.unflatten(-1, (self.num_attention_heads, self.kv_channels))
        _, k, v = self._split(self.key_value(encoder_output, **_micro_batch(cached_weight)), 0)
        return q, k, v, normed

    def _split(self, projected: Tensor, queries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Heads of q, k and v, where each head of k has `queries` of q."""
        groups, channels = self.num_gqa_groups, self.kv_channels
        sizes = (queries, 1, 1)
        if self.interleaved:
            by_group = projected.unflatten(-1, (groups, queries + 2, channels))
            q, k, v = by_group.split(sizes, -2)
            if queries > 1:
                # The queries of a group lie apart from those of the next: they will be copied.
                k, v = _by_itself(k), _by_itself(v)
            # [..., G, H / G, D] -> [..., H, D]
            return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)
        heads = projected.unflatten(-1, (groups * (queries + 2), channels))
        q, k, v = heads.split([size * groups for size in sizes], -2)
        return q, k, v

    def _normed_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.q_norm is None else self.q_norm(q), k if self.k_norm is None else self.k_norm(k)

    def _turned_heads(
        self, q: Tensor, k: Tensor, angles: RotaryAngles, cache: Cache | None, call: AttentionCall
    ) -> tuple[Tensor, Tensor]:
        for_q, for_k = _angle_pair(angles)
        batch = q.shape[1 if self.qkv_format == "sbhd" else 0]
        starts = (0,) if cache is None else cache.lengths(self.core_attention, batch)
        cu_q = cu_kv = None
        if self.qkv_format == "thd":
            cu_q, cu_kv = packing_of(call, self.core_attention.rules, q.shape[0], k.shape[0])[:2]
        q = turned(q, for_q, self.qkv_format, starts, cu_q, self.rotary_pos_interleaved)
        k = turned(k, for_k, self.qkv_format, starts, cu_kv, self.rotary_pos_interleaved)
        return q, k


def _projection(
    num_in: int, rows: dict[str, int], norm: dict[str, Any] | None, fused: bool, bias: bool, more: dict[str, Any]
) -> nn.Module:
    """A linear layer for some operands of attention, with their norm or without."""
    if fused:
        num_out = sum(rows.values())
        if norm is None:
            return Linear(num_in, num_out, bias, **more)
        return LayerNormLinear(num_in, num_out, bias, **norm, **more)
    if norm is None:
        return SplitLinear(num_in, rows, bias, **more)
    return LayerNormSplitLinear(num_in, rows, bias, **norm, **more)


def _angle_pair(angles: Any) -> tuple[Tensor, Tensor]:
    """Angles of queries and of keys; TypeError for what is neither a tensor nor a pair of them."""
    if isinstance(angles, Tensor):
        return angles, angles
    pair = angles if isinstance(angles, (tuple, list)) else (angles,)
    if len(pair) == 2 and all(isinstance(one, Tensor) for one in pair):
        return pair[0], pair[1]
    found = ", ".join(type(one).__name__ for one in pair)
    module = next((one for one in pair if isinstance(one, nn.Module)), None)
    remedy = "make them with octavo.RotaryPositionEmbedding" if module is None else "call it: rope(S), S the places"
    raise TypeError(f"rotary_pos_emb is {found}: expected angles [S, 1, 1, R], or a pair of tensors of them; {remedy}")


def _by_itself(part: Tensor) -> Tensor:
    """A part of what a product made, so that attention need not keep all of that for the backward."""
    return part.contiguous() if part.requires_grad else part


def _micro_batch(cached_weight: CachedWeight | None) -> dict[str, CachedWeight]:
    """The argument of a projection; none for an `nn.Linear`, which `octavo.unconvert` makes of one."""
    return {} if cached_weight is None else {"cached_weight": cached_weight}


def _channels(hidden_size: int, num_heads: int) -> int:
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size} and num_attention_heads {num_heads}: the first must be a multiple of the"
            " second, or kv_channels be given"
        )
    return hidden_size // num_heads


def _check_type(attention_type: str, input_layernorm: bool, return_layernorm_output: bool) -> None:
    if attention_type not in ("self", "cross"):
        raise ValueError(f"attention_type is {attention_type!r}: expected 'self' or 'cross'")
    if return_layernorm_output and not input_layernorm:
        raise ValueError("return_layernorm_output=True needs input_layernorm=True: there is no such output otherwise")
