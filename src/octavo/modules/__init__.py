"""Layers: parameters and state; what they compute stands in `octavo.functional`."""

from octavo.modules.dot_product_attention import AttentionCall, DotProductAttention
from octavo.modules.fixed_product import FixedProduct, FixedWeights, LayerProduct
from octavo.modules.group_padding import Padding, Unpadding
from octavo.modules.grouped_linear import GroupedLinear
from octavo.modules.kv_cache import KVCache, PagedKVCache
from octavo.modules.layernorm_linear import LayerNormLinear
from octavo.modules.layernorm_mlp import LayerNormMLP
from octavo.modules.linear import OUT_DTYPES, CachedWeight, FP8LinearMixin, Linear
from octavo.modules.lm_head import LMHead
from octavo.modules.mlp_part import MLPPart
from octavo.modules.multihead_attention import MultiheadAttention
from octavo.modules.norm import LayerNorm, RMSNorm
from octavo.modules.rotary import RotaryPositionEmbedding
from octavo.modules.router import TopKRouter
from octavo.modules.transformer_layer import TransformerLayer

__all__ = [
    "AttentionCall",
    "CachedWeight",
    "DotProductAttention",
    "FP8LinearMixin",
    "FixedProduct",
    "FixedWeights",
    "GroupedLinear",
    "KVCache",
    "LMHead",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "LayerProduct",
    "Linear",
    "MLPPart",
    "MultiheadAttention",
    "OUT_DTYPES",
    "Padding",
    "PagedKVCache",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TopKRouter",
    "TransformerLayer",
    "Unpadding",
]
