"""Forward and backward of each layer as functions of plain tensors."""

from octavo.functional.activation import activate
from octavo.functional.linear import linear, quantize_weight
from octavo.functional.norm import normalise
from octavo.functional.norm_linear import NormLinear, norm_linear
from octavo.functional.norm_mlp import NormMLP, Parameters, norm_mlp

__all__ = [
    "NormLinear",
    "NormMLP",
    "Parameters",
    "activate",
    "linear",
    "norm_linear",
    "norm_mlp",
    "normalise",
    "quantize_weight",
]
