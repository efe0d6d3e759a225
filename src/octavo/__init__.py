"""Octavo: FP8 training and inference of transformers in PyTorch."""

from octavo import compat, distributed, inference, inspection, optim, recipes
from octavo.conversion import ConversionReport, convert, set_recipe, state_dict, unconvert
from octavo.formats import E4M3, E5M2, E8M0, Format, cast, finfo
from octavo.functional import cross_entropy, linear_cross_entropy, permute_tokens, unpermute_tokens
from octavo.inference import calibrate, freeze
from octavo.inspection import PrecisionGuard, choose_precision
from octavo.kernels.emulation import emulation
from octavo.kernels.support import Support, is_supported
from octavo.modules import (
    DotProductAttention,
    GroupedLinear,
    KVCache,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    LMHead,
    MultiheadAttention,
    Padding,
    PagedKVCache,
    RMSNorm,
    RotaryPositionEmbedding,
    TopKRouter,
    TransformerLayer,
    Unpadding,
)
from octavo.optim import predict_weight_scales
from octavo.recipes import HYBRID
from octavo.runtime import (
    autocast,
    cached_weights,
    checkpoint,
    count_gemms,
    make_graphed_callables,
    quantized_init,
    update_scales,
)
from octavo.tensor import QuantizedTensor, cast_to_representable, quantize, scaled_mm
from octavo.version import __version__

__all__ = [
    "E4M3",
    "E5M2",
    "E8M0",
    "HYBRID",
    "ConversionReport",
    "DotProductAttention",
    "Format",
    "GroupedLinear",
    "KVCache",
    "LMHead",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "Padding",
    "PagedKVCache",
    "PrecisionGuard",
    "QuantizedTensor",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "Support",
    "TopKRouter",
    "TransformerLayer",
    "Unpadding",
    "__version__",
    "autocast",
    "cached_weights",
    "calibrate",
    "cast",
    "cast_to_representable",
    "checkpoint",
    "choose_precision",
    "compat",
    "convert",
    "count_gemms",
    "cross_entropy",
    "distributed",
    "emulation",
    "finfo",
    "freeze",
    "inference",
    "inspection",
    "is_supported",
    "linear_cross_entropy",
    "make_graphed_callables",
    "optim",
    "permute_tokens",
    "predict_weight_scales",
    "quantize",
    "quantized_init",
    "recipes",
    "scaled_mm",
    "set_recipe",
    "state_dict",
    "unconvert",
    "unpermute_tokens",
    "update_scales",
]
