"""`transformer_engine.pytorch`, usually imported as te.

    my_linear = te.Linear(768, 768, bias=True)
    with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
        out = my_linear(inp)
    out.mean().backward()

Names of TE that are not built yet raise NotImplementedError when they are used; other names do not exist.
"""

from __future__ import annotations

from typing import Any

from octavo.compat.planned import planned_class, planned_function
from octavo.compat.transformer_engine.pytorch import attention, fp8, optimizers, quantization
from octavo.compat.transformer_engine.pytorch.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
)
from octavo.compat.transformer_engine.pytorch.checkpoint import checkpoint
from octavo.compat.transformer_engine.pytorch.cross_entropy import parallel_cross_entropy
from octavo.compat.transformer_engine.pytorch.cuda_graphs import make_graphed_callables
from octavo.compat.transformer_engine.pytorch.fp8_padding import Fp8Padding, Fp8Unpadding
from octavo.compat.transformer_engine.pytorch.grouped_linear import GroupedLinear
from octavo.compat.transformer_engine.pytorch.layernorm_linear import LayerNormLinear
from octavo.compat.transformer_engine.pytorch.layernorm_mlp import LayerNormMLP
from octavo.compat.transformer_engine.pytorch.linear import Linear
from octavo.compat.transformer_engine.pytorch.norm import LayerNorm, RMSNorm
from octavo.compat.transformer_engine.pytorch.quantization import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from octavo.compat.transformer_engine.pytorch.transformer_layer import TransformerLayer

_PLANNED_CLASSES = (
    "CudaRNGStatesTracker",
    "Float8Tensor",
    "QuantizedTensor",
)
_PLANNED_FUNCTIONS = (
    "destroy_ub",
    "get_cpu_offload_context",
    "initialize_ub",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "onnx_export",
)


def __getattr__(name: str) -> Any:
    if name in _PLANNED_CLASSES:
        made: Any = planned_class(f"transformer_engine.pytorch.{name}")
    elif name in _PLANNED_FUNCTIONS:
        made = planned_function(f"transformer_engine.pytorch.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made  # one class for one name, so that isinstance agrees with itself
    return made


__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "attention",
    "autocast",
    "checkpoint",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "optimizers",
    "parallel_cross_entropy",
    "quantization",
    "quantized_model_init",
]
