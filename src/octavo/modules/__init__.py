"""Layers: parameters and state; what they compute stands in `octavo.functional`."""

from octavo.modules.layernorm_linear import LayerNormLinear
from octavo.modules.layernorm_mlp import LayerNormMLP
from octavo.modules.linear import OUT_DTYPES, CachedWeight, FP8LinearMixin, Linear
from octavo.modules.mlp_part import MLPPart
from octavo.modules.norm import LayerNorm, RMSNorm

__all__ = [
    "CachedWeight",
    "FP8LinearMixin",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MLPPart",
    "OUT_DTYPES",
    "RMSNorm",
]
