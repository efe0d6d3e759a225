"""Serving: calibrated scales and frozen FP8 weights."""

from octavo.inference.calibrate import calibrate
from octavo.inference.freeze import freeze
from octavo.inference.freeze_report import FreezeReport, LeftLayer
from octavo.inference.frozen_grouped_linear import FrozenGroupedLinear
from octavo.inference.frozen_layer import FrozenLayer
from octavo.inference.frozen_layernorm_linear import FrozenLayerNormLinear
from octavo.inference.frozen_layernorm_mlp import FrozenLayerNormMLP
from octavo.inference.frozen_linear import FrozenLinear
from octavo.inference.scheme import SCHEMES, Scheme

__all__ = [
    "SCHEMES",
    "FreezeReport",
    "FrozenGroupedLinear",
    "FrozenLayer",
    "FrozenLayerNormLinear",
    "FrozenLayerNormMLP",
    "FrozenLinear",
    "LeftLayer",
    "Scheme",
    "calibrate",
    "freeze",
]
