"""`transformer_engine.pytorch.attention`: none of it is built yet."""

from __future__ import annotations

from octavo.compat.planned import planned_class, planned_function

_WHERE = "transformer_engine.pytorch.attention"

DotProductAttention = planned_class(f"{_WHERE}.DotProductAttention")
InferenceParams = planned_class(f"{_WHERE}.InferenceParams")
MultiheadAttention = planned_class(f"{_WHERE}.MultiheadAttention")
RotaryPositionEmbedding = planned_class(f"{_WHERE}.RotaryPositionEmbedding")
apply_rotary_pos_emb = planned_function(f"{_WHERE}.apply_rotary_pos_emb")

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "MultiheadAttention",
    "RotaryPositionEmbedding",
    "apply_rotary_pos_emb",
]
