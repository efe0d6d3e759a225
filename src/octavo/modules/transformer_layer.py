"""octavo.TransformerLayer: attention and MLP with what goes around them.

    h = x + drop(attention(norm(x)))                           encoder; a decoder goes on with
    h = h + drop(attention of norm(h) to the encoder's output)
    y = h + drop(mlp(norm(h)))

drop is dropout and then drop path; x, h, y [S, B, hidden], [B, S, hidden] or [T, hidden]. Options, as of Transformer
Engine:

    parallel_attention_mlp                      y = x + drop(attention(norm(x)) + mlp(norm'(x)))
    apply_residual_connection_post_layernorm    what is added to is norm(x), not x
    output_layernorm                            attention takes x itself, and the result is normalised: y = norm(...)

Post-norm as in BERT, y = norm(h + mlp(h)), h = norm(x + attention(x)), is the last two together.

Children have Transformer Engine's names: `self_attention`, `inter_attention` of a decoder, `layernorm_mlp`, and
`layernorm` with output_layernorm. Biases of the projections are added in their products, so that drop and addition are
one expression, see `octavo.functional.bias_dropout_add`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from octavo.functional.attention_mask import check_mask_type
from octavo.functional.bias_dropout_add import bias_dropout_add, drop_path, drop_path_of_packed
from octavo.modules.dot_product_attention import AttentionCall, check_call, check_format, check_probability
from octavo.modules.given_input import check_values
from octavo.modules.kv_cache import Cache
from octavo.modules.layernorm_mlp import LayerNormMLP, SavedInput
from octavo.modules.linear import CachedWeight
from octavo.modules.multihead_attention import MultiheadAttention, RotaryAngles
from octavo.modules.norm import LayerNorm, Normalization, RMSNorm
from octavo.recipes import Recipe

LayerType = Literal["encoder", "decoder"]

_OF_ATTENTION = (
    "kv_channels",
    "fuse_qkv_params",
    "qkv_weight_interleaved",
    "attention_dropout",
    "softmax_scale",
    "fp8_attention",
    "qk_norm_type",
    "qk_norm_eps",
    "qk_norm_before_rope",
    "rotary_pos_interleaved",
)
# What the layer says to its attention itself, and how it is told.
_INSTEAD = {
    "qkv_format": "attn_input_format",
    "attn_mask_type": "self_attn_mask_type, and enc_dec_attn_mask_type of a decoder",
    "attention_type": "layer_type='decoder', which adds attention to the encoder's output",
    "input_layernorm": "output_layernorm, which takes the norm of the input away",
    "return_layernorm_output": "apply_residual_connection_post_layernorm",
}


class TransformerLayer(nn.Module):
    """One layer of a transformer.

    Args:
        hidden_size, ffn_hidden_size, num_attention_heads: extents.
        num_gqa_groups, kv_channels, fuse_qkv_params, qkv_weight_interleaved, attention_dropout, softmax_scale,
            fp8_attention, qk_norm_type, qk_norm_eps, qk_norm_before_rope, rotary_pos_interleaved: as of
            `octavo.MultiheadAttention`.
        layer_type: "encoder", or "decoder" with attention to the encoder's output.
        self_attn_mask_type, window_size: of self attention.
        enc_dec_attn_mask_type: of a decoder's attention to the encoder's output.
        hidden_dropout: probability of dropout before each residual addition.
        drop_path_rate: probability that a sample goes past a half of the layer.
        parallel_attention_mlp, apply_residual_connection_post_layernorm, output_layernorm: where norms and additions
            stand, see above.
        attn_input_format: "sbhd", "bshd" or "thd".
        bias: projections have one.
        activation, saved_activation_input, checkpoint_mlp, smooth_swiglu: as activation, saved_activation_input,
            checkpoint and smooth_swiglu of `octavo.LayerNormMLP`.
        normalization, eps, zero_centered_gamma: as of `octavo.LayerNormLinear`.
        device, dtype: of the parameters, drawn as those of `nn.Linear`.
        recipe: FP8 with this recipe also outside of `octavo.autocast`.

    Raises:
        TypeError: an option that the layer does not have, or has under another name.
        ValueError: options that contradict one another.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        *,
        layer_type: LayerType = "encoder",
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        hidden_dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        parallel_attention_mlp: bool = False,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        attn_input_format: str = "sbhd",
        bias: bool = True,
        activation: str = "gelu",
        saved_activation_input: SavedInput = "high_precision",
        checkpoint_mlp: bool = False,
        smooth_swiglu: bool = False,
        normalization: Normalization = "LayerNorm",
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: Recipe | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_probability("hidden_dropout", hidden_dropout)
        check_probability("drop_path_rate", drop_path_rate)
        from_norm = apply_residual_connection_post_layernorm
        _check_attention(attention, attn_input_format, self_attn_mask_type, enc_dec_attn_mask_type)
        _check_options(layer_type, parallel_attention_mlp, from_norm)
        self.hidden_size, self.layer_type, self.attn_input_format = hidden_size, layer_type, attn_input_format
        self.hidden_dropout, self.drop_path_rate = hidden_dropout, drop_path_rate
        self.parallel_attention_mlp = parallel_attention_mlp
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        norm: dict[str, Any] = {"normalization": normalization, "eps": eps, "zero_centered_gamma": zero_centered_gamma}
        shared: dict[str, Any] = {"bias": bias, "recipe": recipe, **norm, **place}
        of_attention = {**attention, **shared, "qkv_format": attn_input_format}
        heads = (hidden_size, num_attention_heads, of_attention.pop("kv_channels", None), num_gqa_groups)
        self.self_attention = MultiheadAttention(
            *heads, attn_mask_type=self_attn_mask_type, window_size=window_size, input_layernorm=not output_layernorm,
            return_layernorm_output=from_norm and not output_layernorm, **of_attention,
        )  # fmt: skip
        self.inter_attention: MultiheadAttention | None = None
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                *heads, attention_type="cross", attn_mask_type=enc_dec_attn_mask_type, input_layernorm=True,
                return_layernorm_output=from_norm, **of_attention,
            )  # fmt: skip
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, activation=activation, return_layernorm_output=from_norm,
            saved_activation_input=saved_activation_input, checkpoint=checkpoint_mlp, smooth_swiglu=smooth_swiglu,
            **shared,
        )  # fmt: skip
        self.layernorm = _norm(hidden_size, norm, place) if output_layernorm else None

    def forward(
        self,
        hidden_states: Tensor,
        *,
        encoder_output: Tensor | None = None,
        enc_dec_call: AttentionCall | None = None,
        rotary_pos_emb: RotaryAngles | None = None,
        kv_cache: Cache | None = None,
        cached_weight: CachedWeight | None = None,
        **call: Unpack[AttentionCall],
    ) -> Tensor:
        """y of the input's shape.

        Args:
            hidden_states: [S, B, hidden], [B, S, hidden] or [T, hidden], by attn_input_format.
            encoder_output: what a decoder attends to besides.
            enc_dec_call: masks and the rest of that attention, see `AttentionCall`.
            rotary_pos_emb: angles for self attention.
            kv_cache: of generation.
            cached_weight: as of `octavo.Linear`, for all weights.
            call: of self attention, see `AttentionCall`.

        Raises:
            TypeError: an argument that attention does not have.
            ValueError: encoder_output without a decoder, or the other way round; as of `octavo.MultiheadAttention`.
        """
        check_call(call, "attention of a TransformerLayer")
        # A plain {}: Dynamo makes no TypedDict.
        of_encoder: AttentionCall = enc_dec_call or {}
        check_call(of_encoder, "enc_dec_call")
        if (encoder_output is not None) != (self.layer_type == "decoder"):
            raise ValueError(
                f"layer_type is {self.layer_type!r} and encoder_output is"
                f" {'None' if encoder_output is None else 'given'}: it belongs to a decoder, and to it alone"
            )
        check_values(hidden_states, self, "hidden_states", self.hidden_size)
        cu_seqlens = call.get("cu_seqlens_q")
        # 1. Self attention.
        made = self.self_attention(
            hidden_states, rotary_pos_emb=rotary_pos_emb, kv_cache=kv_cache, cached_weight=cached_weight, **call
        )
        if self.parallel_attention_mlp:
            made = made + self.layernorm_mlp(hidden_states, cached_weight=cached_weight)
            return self._ended(self._added(made, hidden_states, cu_seqlens))
        h = self._added(made, hidden_states, cu_seqlens)
        # 2. Attention to the encoder's output.
        if self.inter_attention is not None:
            made = self.inter_attention(h, encoder_output=encoder_output, cached_weight=cached_weight, **of_encoder)
            h = self._added(made, h, cu_seqlens)
        # 3. The MLP.
        made = self.layernorm_mlp(h, cached_weight=cached_weight)
        return self._ended(self._added(made, h, cu_seqlens))

    def _added(self, made: Any, before: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """residual + drop(what a part made), the residual being its input, or its norm where that is handed out."""
        x, residual = made if isinstance(made, tuple) else (made, before)
        keep = None
        if self.drop_path_rate > 0 and self.training:
            if self.attn_input_format == "thd":
                assert cu_seqlens is not None, "attention has asked for it"
                keep = drop_path_of_packed(x, self.drop_path_rate, cu_seqlens)
            else:
                keep = drop_path(x, self.drop_path_rate, 1 if self.attn_input_format == "sbhd" else 0)
        return bias_dropout_add(x, None, residual, self.hidden_dropout, self.training, keep)

    def _ended(self, y: Tensor) -> Tensor:
        normed: Tensor = y if self.layernorm is None else self.layernorm(y)
        return normed

    def extra_repr(self) -> str:
        """Options that are on."""
        shown = [self.layer_type, self.attn_input_format]
        for name in ("hidden_dropout", "drop_path_rate", "parallel_attention_mlp"):
            if getattr(self, name):
                shown.append(f"{name}={getattr(self, name)}")
        return ", ".join(shown)


def _norm(hidden_size: int, norm: dict[str, Any], place: dict[str, Any]) -> nn.Module:
    kind = RMSNorm if norm["normalization"] == "RMSNorm" else LayerNorm
    return kind(hidden_size, norm["eps"], zero_centered_gamma=norm["zero_centered_gamma"], **place)


def _check_attention(given: dict[str, Any], layout: str, mask_type: str, enc_dec_mask_type: str) -> None:
    """Refuse options of attention by the names that this layer has for them."""
    check_format(layout, "attn_input_format")
    check_mask_type(mask_type, "self_attn_mask_type")
    check_mask_type(enc_dec_mask_type, "enc_dec_attn_mask_type")
    for name, value in given.items():
        if name in _INSTEAD:
            raise TypeError(f"a TransformerLayer has no option {name} (given: {value!r}): use {_INSTEAD[name]}")
        if name not in _OF_ATTENTION:
            raise TypeError(
                f"a TransformerLayer has no option {name} (given: {value!r}): beside those in its signature it takes"
                f" {', '.join(_OF_ATTENTION)}"
            )


def _check_options(layer_type: str, parallel: bool, from_norm: bool) -> None:
    if layer_type not in ("encoder", "decoder"):
        raise ValueError(f"layer_type is {layer_type!r}: expected 'encoder' or 'decoder'")
    if parallel and layer_type == "decoder":
        raise ValueError("parallel_attention_mlp=True goes with 'encoder': a decoder has a part between the two")
    if parallel and from_norm:
        raise ValueError(
            "parallel_attention_mlp=True and apply_residual_connection_post_layernorm=True: two norms stand side by"
            " side, and neither is the residual; choose one of the two options"
        )
