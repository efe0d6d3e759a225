"""octavo.DotProductAttention: softmax(scale q k^T + bias) v, of every layout and mask that Transformer Engine names.

    q [S, B, H, D], k, v [S, B, G, D] -> o [S, B, H D]          "sbhd"
    q [B, S, H, D], k, v [B, S, G, D] -> o [B, S, H D]          "bshd"
    q [T, H, D],    k, v [T, G, D]    -> o [T, H D]             "thd": sequences of any lengths, one after the other

Query head h reads head h // (H / G) of k and v. In bf16, fp16 or fp32 by torch's scaled_dot_product_attention; FP8 is
an option: both products on FP8 units where the kernel can do it, operands that are cast and decoded again elsewhere.
The layer has no parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from octavo.functional.attention import Attention, Extras
from octavo.functional.attention_lengths import (
    check_bool,
    check_broadcasts,
    check_packed,
    valid_by_mask,
    valid_by_sums,
)
from octavo.functional.attention_mask import MaskRules, Valid, alibi_slopes, mask_rules
from octavo.functional.attention_operands import as_fp8_operand
from octavo.functional.attention_packed import Packing, packed_attention, padded_attention, unpadded_attention
from octavo.functional.attention_way import attention_way
from octavo.functional.fp8_attention import fp8_attention, fp8_layer_reasons, fp8_reasons, fp8_way
from octavo.runtime import checkpoint

QKV_FORMATS = ("sbhd", "bshd", "thd")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class AttentionCall(TypedDict, total=False):
    """What a call of attention may say, under Transformer Engine's names; all of it optional.

    Attributes:
        attention_mask: bool, True is left out. With a padding type [B, 1, 1, S] (or [B, S]), a pair of them where
            queries and keys differ; tokens come before padding; B may be 1. With "arbitrary" it broadcasts to
            [B, H, Sq, Skv].
        attn_mask_type: instead of the layer's.
        window_size: instead of the layer's.
        core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
        core_attention_bias: broadcasts to [B, H, Sq, Skv]; added before or after scaling.
        alibi_slopes: [H] or [B, H] float32, instead of ALiBi's own.
        cu_seqlens_q, cu_seqlens_kv: [B + 1] int32: of "thd" where each sequence begins, and where the last one ends; of
            other formats with a padding type, sums of the lengths.
        max_seqlen_q, max_seqlen_kv: longest sequences of "thd", if known.
        checkpoint_core_attention: compute attention again in the backward instead of keeping what it made.
    """

    attention_mask: Tensor | tuple[Tensor, Tensor] | None
    attn_mask_type: str | None
    window_size: tuple[int, int] | None
    core_attention_bias_type: str
    core_attention_bias: Tensor | None
    alibi_slopes: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_kv: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    checkpoint_core_attention: bool


class DotProductAttention(nn.Module):
    """Attention without parameters.

    Args:
        num_attention_heads: H.
        kv_channels: features of a head; a pair where those of keys and values differ.
        num_gqa_groups: G, heads of keys and values; H of them if None, 1 is multi-query attention.
        attention_dropout: probability of dropping an attention probability in training.
        qkv_format: "sbhd", "bshd" or "thd".
        attn_mask_type: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: (left, right), how many keys a query sees to either side of its own; -1: all.
        softmax_scale: of the products; 1 / sqrt(features of a key) if None.
        fp8_attention: queries, keys, values and probabilities in E4M3, both products on FP8 units, where a call allows
            it (heads of 64 or 128 features, bf16 or fp16, no mask or a causal one); elsewhere queries, keys and values
            are cast to E4M3 and decoded again (emulated: no faster). `way` says which, and why.

    Raises:
        ValueError: heads that do not group, an unknown format or mask type, a window that contradicts the type.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        softmax_scale: float | None = None,
        fp8_attention: bool = False,
    ) -> None:
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        check_groups(num_attention_heads, groups)
        check_format(qkv_format)
        check_probability("attention_dropout", attention_dropout)
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.key_channels, self.value_channels = (
            (kv_channels, kv_channels) if isinstance(kv_channels, int) else kv_channels
        )
        self.attention_dropout, self.qkv_format = attention_dropout, qkv_format
        self.window_size, self.rules = window_size, mask_rules(attn_mask_type, window_size)
        self.softmax_scale = self.key_channels**-0.5 if softmax_scale is None else softmax_scale
        self.fp8_attention = fp8_attention

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        *,
        qkv_format: str | None = None,
        after_cache: bool = False,
        **call: Unpack[AttentionCall],
    ) -> Tensor:
        """Attention, its heads side by side: [..., H Dv] of the format's leading dimensions.

        Args:
            query_layer: [..., H, D].
            key_layer, value_layer: [..., G, D], [..., G, Dv].
            qkv_format: instead of the layer's.
            after_cache: the queries are the last tokens of what the keys hold: causal aligns at the bottom right.
            call: masks, biases and the rest, see `AttentionCall`.

        Raises:
            TypeError: an argument that attention does not have; lengths or a mask that are no tensors.
            ValueError: shapes that do not fit the layer or one another; a mask, bias or lengths that the types do not
                go with, or of another batch.
        """
        check_call(call)
        layout = self.qkv_format if qkv_format is None else qkv_format
        self._check_operands(layout, query_layer, key_layer, value_layer)
        setup = self._setup(call, after_cache)
        slopes = self._slopes(call, query_layer.device)
        if layout == "thd":
            packing = packing_of(call, setup.rules, query_layer.shape[0], key_layer.shape[0])
            return self._run(
                lambda q, k, v: packed_attention(q, k, v, setup, packing, slopes),
                (query_layer, key_layer, value_layer),
                call,
            ).flatten(-2)
        q, k, v = (_heads_first(x, layout) for x in (query_layer, key_layer, value_layer))
        valid = _valid(call, setup.rules, q, k)
        extras = self._extras(call, setup, slopes, q, k)
        if self.fp8_attention and valid is None and not self._fp8_reasons((q, k, v), setup, extras, after_cache):
            out = self._run(lambda q, k, v: fp8_attention(q, k, v, setup), (q, k, v), call, casts=False)
        elif valid is None:
            out = self._run(lambda q, k, v: unpadded_attention(q, k, v, setup, extras), (q, k, v), call)
        else:
            out = self._run(lambda q, k, v: padded_attention(q, k, v, setup, valid, extras), (q, k, v), call)
        # [B, H, S, Dv] -> [S, B, H, Dv] or [B, S, H, Dv]
        return (out.permute(2, 0, 1, 3) if layout == "sbhd" else out.transpose(1, 2)).flatten(-2)

    def way(self, query_layer: Tensor, key_layer: Tensor, value_layer: Tensor, **call: Unpack[AttentionCall]) -> str:
        """How such a call is computed, and why so: for whoever wonders about its speed."""
        check_call(call)
        self._check_operands(self.qkv_format, query_layer, key_layer, value_layer)
        setup, slopes = self._setup(call, False), self._slopes(call, query_layer.device)
        operands = (query_layer, key_layer, value_layer)
        if self.qkv_format == "thd":
            packing = packing_of(call, setup.rules, query_layer.shape[0], key_layer.shape[0])
            said, reasons = attention_way(*operands, setup, Extras(slopes=slopes), packing), ["qkv_format='thd'"]
        else:
            q, k, v = (_heads_first(x, self.qkv_format) for x in operands)
            extras = self._extras(call, setup, slopes, q, k)
            valid = _valid(call, setup.rules, q, k)
            same = valid is None or valid.queries is valid.keys
            said = attention_way(q, k, v, setup, extras, same_lengths=same)
            reasons = self._fp8_reasons((q, k, v), setup, extras)
        if not self.fp8_attention:
            return said
        return f"{said}, FP8 operands emulated ({'; '.join(reasons)})" if reasons else fp8_way(query_layer)

    def _fp8_reasons(
        self, operands: tuple[Tensor, Tensor, Tensor], setup: Attention, extras: Extras, after_cache: bool = False
    ) -> list[str]:
        """Why products are not on FP8 units; a cache would be cast as a whole at every step."""
        return ["keys from a cache"] if after_cache else fp8_reasons(*operands, setup, extras)

    def _run(
        self,
        attend: Callable[..., Tensor],
        operands: tuple[Tensor, Tensor, Tensor],
        call: AttentionCall,
        casts: bool = True,
    ) -> Tensor:
        """`casts`: FP8 is what becomes of the operands; else `attend` sees to it."""

        def attend_to_codes(*operands: Tensor) -> Tensor:
            return attend(*(as_fp8_operand(x) for x in operands)) if casts and self.fp8_attention else attend(*operands)

        if call.get("checkpoint_core_attention"):
            out: Tensor = checkpoint(attend_to_codes, *operands)
            return out
        return attend_to_codes(*operands)

    def _setup(self, call: AttentionCall, after_cache: bool) -> Attention:
        mask_type, window = call.get("attn_mask_type"), call.get("window_size")
        rules = self.rules
        if mask_type is not None or window is not None:
            rules = mask_rules(mask_type or rules.mask_type, self.window_size if window is None else window)
        dropout = self.attention_dropout if self.training else 0.0
        return Attention(rules.after_cache() if after_cache else rules, self.softmax_scale, dropout)

    def _slopes(self, call: AttentionCall, device: torch.device) -> Tensor | None:
        kind, slopes = call.get("core_attention_bias_type", "no_bias"), call.get("alibi_slopes")
        if kind not in BIAS_TYPES:
            raise ValueError(f"core_attention_bias_type is {kind!r}: expected one of {', '.join(BIAS_TYPES)}")
        if kind != "alibi":
            if slopes is not None:
                raise ValueError("alibi_slopes are given: core_attention_bias_type must be 'alibi' then")
            return None
        if slopes is None:
            return alibi_slopes(self.num_attention_heads, device)
        if slopes.shape[-1] != self.num_attention_heads:
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}: expected [{self.num_attention_heads}], one for each"
                f" head, or [batch, {self.num_attention_heads}]"
            )
        return slopes

    def _extras(self, call: AttentionCall, setup: Attention, slopes: Tensor | None, q: Tensor, k: Tensor) -> Extras:
        """What is added to the scores or forbidden, of q and k [B, H, S, D]."""
        extras = Extras(_arbitrary(call, setup.rules), self._bias(call, setup), slopes)
        scores = (*q.shape[:3], k.shape[2])
        for name, x in (("attention_mask", extras.mask), ("core_attention_bias", extras.bias)):
            if x is not None:
                check_broadcasts(name, x, scores)
        if slopes is not None and slopes.dim() > 1 and slopes.shape[0] not in (1, scores[0]):
            raise ValueError(
                f"alibi_slopes has shape {tuple(slopes.shape)}: expected [{scores[1]}], or [{scores[0]}, {scores[1]}]"
                " of the batch"
            )
        return extras

    def _bias(self, call: AttentionCall, setup: Attention) -> Tensor | None:
        kind, bias = call.get("core_attention_bias_type", "no_bias"), call.get("core_attention_bias")
        wanted = kind in ("pre_scale_bias", "post_scale_bias")
        if wanted != (bias is not None):
            raise ValueError(
                f"core_attention_bias_type is {kind!r} and core_attention_bias is"
                f" {'None' if bias is None else 'a tensor'}: a bias goes with 'pre_scale_bias' or 'post_scale_bias'"
            )
        return bias * setup.scale if bias is not None and kind == "pre_scale_bias" else bias

    def _check_operands(self, layout: str, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_format(layout)
        dims = 3 if layout == "thd" else 4
        expected = (
            ("query_layer", q, self.num_attention_heads, self.key_channels),
            ("key_layer", k, self.num_gqa_groups, self.key_channels),
            ("value_layer", v, self.num_gqa_groups, self.value_channels),
        )
        for name, x, heads, features in expected:
            if x.dim() != dims or x.shape[-2:] != (heads, features):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: qkv_format={layout!r} has {dims} dimensions, the last two"
                    f" {heads} heads of {features} features"
                )
        if k.shape[:-2] != v.shape[:-2]:
            raise ValueError(
                f"key_layer has shape {tuple(k.shape)} and value_layer {tuple(v.shape)}: each key has a value; all but"
                " the last dimension must agree"
            )
        batch = 1 if layout == "sbhd" else 0
        if layout != "thd" and q.shape[batch] != k.shape[batch]:
            raise ValueError(
                f"query_layer has shape {tuple(q.shape)} and key_layer {tuple(k.shape)}: qkv_format={layout!r} has the"
                f" batch in dimension {batch}, and queries and keys must be of one batch"
            )

    def extra_repr(self) -> str:
        """Heads and options."""
        shown = f"heads={self.num_attention_heads}, kv_heads={self.num_gqa_groups}, channels={self.key_channels}"
        shown += f", {self.qkv_format}, {self.rules.mask_type}"
        shown += "" if self.window_size is None else f", window_size={self.window_size}"
        if not self.fp8_attention:
            return shown
        emulated = fp8_layer_reasons(self.key_channels, self.value_channels, self.rules)
        return shown + (", FP8 operands (emulated)" if emulated or self.qkv_format == "thd" else ", FP8 products")


def check_groups(num_heads: int, num_groups: int) -> None:
    """Raise ValueError unless every head of keys serves as many query heads."""
    if num_heads < 1 or num_groups < 1 or num_heads % num_groups:
        raise ValueError(
            f"num_attention_heads is {num_heads} and num_gqa_groups {num_groups}: the first must be a multiple of the"
            " second"
        )


def check_format(qkv_format: str, name: str = "qkv_format") -> None:
    """Raise ValueError unless it is known; `name` is what the layer calls it."""
    if qkv_format not in QKV_FORMATS:
        raise ValueError(f"{name} is {qkv_format!r}: expected one of {', '.join(QKV_FORMATS)}")


def check_probability(name: str, value: Any) -> None:
    """Raise ValueError unless it is a probability that leaves something."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{name} is {value!r}: it must be a probability, 0 or more and less than 1")


def _heads_first(x: Tensor, layout: str) -> Tensor:
    """-> [B, H, S, D]"""
    return x.permute(1, 2, 0, 3) if layout == "sbhd" else x.transpose(1, 2)


_OF_A_CALL = tuple(AttentionCall.__annotations__)


def check_call(call: AttentionCall, name: str = "attention") -> None:
    """Raise TypeError for an argument that attention does not have; `name` says whose."""
    unknown = [key for key in call if key not in _OF_A_CALL]
    if unknown:
        raise TypeError(f"{name} has no argument {', '.join(unknown)}: expected some of {', '.join(_OF_A_CALL)}")


def packing_of(call: AttentionCall, rules: MaskRules, num_queries: int, num_keys: int) -> Packing:
    """Where sequences of "thd" lie.

    Args:
        call: of attention.
        rules: of its mask.
        num_queries, num_keys: tokens of all sequences.

    Raises:
        TypeError: sums that are no tensors.
        ValueError: sums of no such sequences; a mask or bias, which belong to other formats.
    """
    cu_q, cu_kv = call.get("cu_seqlens_q"), call.get("cu_seqlens_kv")
    if cu_q is None:
        raise ValueError("qkv_format='thd' needs cu_seqlens_q, [batch + 1]: where each sequence begins, and the end")
    if rules.mask_type == "arbitrary" or call.get("attention_mask") is not None:
        raise ValueError(
            "qkv_format='thd' takes no attention_mask: cu_seqlens_q and cu_seqlens_kv say where sequences lie"
        )
    if call.get("core_attention_bias") is not None:
        raise ValueError("qkv_format='thd' takes no core_attention_bias: use 'alibi', or a padded format")
    max_q, max_kv = call.get("max_seqlen_q"), call.get("max_seqlen_kv")
    if cu_kv is None:
        check_packed(("cu_seqlens_q", "cu_seqlens_q (of keys too)"), (cu_q, cu_q), (num_queries, num_keys))
        return Packing(cu_q, cu_q, max_q, max_q if max_kv is None else max_kv)
    check_packed(("cu_seqlens_q", "cu_seqlens_kv"), (cu_q, cu_kv), (num_queries, num_keys))
    return Packing(cu_q, cu_kv, max_q, max_kv)


def _valid(call: AttentionCall, rules: MaskRules, q: Tensor, k: Tensor) -> Valid | None:
    """Which positions hold tokens, of q and k [B, H, S, D]."""
    if not rules.padded:
        return None
    mask, cu_q = call.get("attention_mask"), call.get("cu_seqlens_q")
    extents = q.shape[0], q.shape[-2], k.shape[-2]
    if mask is not None:
        return valid_by_mask(mask, *extents)
    if cu_q is not None:
        return valid_by_sums(cu_q, call.get("cu_seqlens_kv"), *extents)
    raise ValueError(
        f"attn_mask_type is {rules.mask_type!r}: attention_mask (True where there is padding) or cu_seqlens_q must"
        " say where the padding is"
    )


def _arbitrary(call: AttentionCall, rules: MaskRules) -> Tensor | None:
    mask = call.get("attention_mask")
    if rules.mask_type == "arbitrary":
        if not isinstance(mask, Tensor):
            raise ValueError("attn_mask_type is 'arbitrary': attention_mask must be a tensor, True where nobody looks")
        check_bool(mask)
        return mask
    if mask is not None and not rules.padded:
        raise ValueError(
            f"attention_mask is given with attn_mask_type={rules.mask_type!r}, which takes none: use 'padding',"
            " 'padding_causal' or 'arbitrary'"
        )
    return None
