"""Forward and backward of each layer as functions of plain tensors."""

from octavo.functional.activation import activate
from octavo.functional.bias_dropout_add import bias_dropout_add
from octavo.functional.cross_entropy import cross_entropy
from octavo.functional.linear import linear, quantize_weight
from octavo.functional.linear_cross_entropy import linear_cross_entropy
from octavo.functional.norm import normalise
from octavo.functional.norm_linear import NormLinear, norm_linear
from octavo.functional.norm_mlp import NormMLP, Parameters, norm_mlp
from octavo.functional.permutation import permute_tokens, unpermute_tokens
from octavo.functional.rotary import apply_rotary
from octavo.functional.routing import Routing, route
from octavo.functional.smoothing import Smoothing, smooth_linear, smoothing_of

__all__ = [
    "NormLinear",
    "NormMLP",
    "Parameters",
    "Routing",
    "Smoothing",
    "activate",
    "apply_rotary",
    "bias_dropout_add",
    "cross_entropy",
    "linear",
    "linear_cross_entropy",
    "norm_linear",
    "norm_mlp",
    "normalise",
    "permute_tokens",
    "quantize_weight",
    "route",
    "smooth_linear",
    "smoothing_of",
    "unpermute_tokens",
]
