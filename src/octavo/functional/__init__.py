"""Forward and backward of each layer as functions of plain tensors."""

from octavo.functional.activation import activate
from octavo.functional.bias_dropout_add import bias_dropout_add
from octavo.functional.linear import linear, quantize_weight
from octavo.functional.norm import normalise
from octavo.functional.norm_linear import NormLinear, norm_linear
from octavo.functional.norm_mlp import NormMLP, Parameters, norm_mlp
from octavo.functional.permutation import permute_tokens, unpermute_tokens
from octavo.functional.rotary import apply_rotary
from octavo.functional.routing import Routing, route

__all__ = [
    "NormLinear",
    "NormMLP",
    "Parameters",
    "Routing",
    "activate",
    "apply_rotary",
    "bias_dropout_add",
    "linear",
    "norm_linear",
    "norm_mlp",
    "normalise",
    "permute_tokens",
    "quantize_weight",
    "route",
    "unpermute_tokens",
]
