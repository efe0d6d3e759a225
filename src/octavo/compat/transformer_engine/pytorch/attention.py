"""`transformer_engine.pytorch.attention`: attention's layers, rotary embeddings, the cache of generation."""

from __future__ import annotations

from octavo.compat.transformer_engine.pytorch.dot_product_attention import DotProductAttention
from octavo.compat.transformer_engine.pytorch.inference_params import InferenceParams
from octavo.compat.transformer_engine.pytorch.multihead_attention import MultiheadAttention
from octavo.compat.transformer_engine.pytorch.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]
