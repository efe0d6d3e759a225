"""Other libraries' FP8, where they can be imported: Transformer Engine and torchao.

Whatever they raise at import is the reason why they are not measured.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from octavo.modules import TransformerLayer

TE_RECIPES = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
TORCHAO_RECIPES = ("tensorwise", "rowwise")
Context = Callable[[], AbstractContextManager[object]]


NAMES = {"te": "Transformer Engine", "torchao": "torchao"}


def peer_reason(library: str, device: torch.device) -> str | None:
    """Why "te" or "torchao" is not measured here; None if it is."""
    if device.type != "cuda":
        return f"{NAMES[library]} is measured on GPUs only"
    return _import_reason(library)


_MODULES = {"te": "transformer_engine.pytorch", "torchao": "torchao.float8"}


@functools.cache
def _import_reason(library: str) -> str | None:
    module = _MODULES[library]
    try:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"{NAMES[library]} is not installed"
        importlib.import_module(module)
    except Exception as error:  # a broken build raises many kinds of errors
        return f"{NAMES[library]} does not import ({type(error).__name__}: {error})"[:300]
    return None


def te_recipe(name: str) -> Any:
    """Transformer Engine's recipe of TE_RECIPES, with its defaults."""
    return getattr(importlib.import_module("transformer_engine.common.recipe"), TE_RECIPES[name])()


def te_context(recipe: Any) -> Context:
    """The context in which Transformer Engine's layers run in FP8."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    if hasattr(engine, "autocast"):  # since 2.10; the older name warns from then on
        return lambda: engine.autocast(enabled=True, recipe=recipe)
    return lambda: engine.fp8_autocast(enabled=True, fp8_recipe=recipe)


def te_linear(linear: nn.Linear) -> nn.Module:
    """Transformer Engine's layer with the weights of a Linear."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    layer: Any = engine.Linear(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        params_dtype=linear.weight.dtype,
        device=linear.weight.device,
    )
    with torch.no_grad():
        layer.weight.copy_(linear.weight)
        if linear.bias is not None:
            layer.bias.copy_(linear.bias)
    module: nn.Module = layer
    return module


def te_transformer_layer(
    hidden: int,
    ffn: int,
    heads: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    mask_type: str = "causal",
    qkv_format: str = "sbhd",
) -> nn.Module:
    """Transformer Engine's TransformerLayer without dropout, which it would have by default."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    module: nn.Module = engine.TransformerLayer(
        hidden,
        ffn,
        heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        self_attn_mask_type=mask_type,
        attn_input_format=qkv_format,
        params_dtype=dtype,
        device=device,
    )
    return module


def te_graphed(layer: nn.Module, sample: torch.Tensor, recipe: Any) -> Callable[..., Any]:
    """The layer's forward and backward as CUDA graphs by Transformer Engine; without FP8 for recipe None."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    known = inspect.signature(engine.make_graphed_callables).parameters
    options: dict[str, Any] = {}
    if recipe is not None:  # renamed as the context was
        options = {"enabled": True, "recipe": recipe} if "recipe" in known else {}
        options = options or {"fp8_enabled": True, "fp8_recipe": recipe}
    kind: Any = type(layer)
    called = kind.__call__
    try:
        graphed: Callable[..., Any] = engine.make_graphed_callables(layer, (sample,), **options)
    except Exception:
        # It would leave its layers as if a capture went on, those too that are not graphed.
        kind.__call__ = called
        importlib.import_module("transformer_engine.pytorch.graph").set_capture_end()
        raise
    return graphed


def swap_layers_for_te(model: nn.Module) -> int:
    """Put Transformer Engine's TransformerLayers in the place of Octavo's, newly drawn -> how many."""
    taken = [(name, module) for name, module in model.named_modules() if isinstance(module, TransformerLayer)]
    for name, module in taken:
        owner, _, own = name.rpartition(".")
        attention, weight = module.self_attention, module.layernorm_mlp.fc1_weight
        layer = te_transformer_layer(
            module.hidden_size,
            module.layernorm_mlp.ffn_hidden_size,
            attention.num_attention_heads,
            device=weight.device,
            dtype=weight.dtype,
            mask_type=attention.core_attention.rules.mask_type,
            qkv_format=module.attn_input_format,
        )
        setattr(model.get_submodule(owner), own, layer)
    return len(taken)


def is_taken(name: str, module: nn.Module) -> bool:
    """Whether a rival's conversion takes a layer of a model: Linears in multiples of 16, but for the model's head."""
    if not isinstance(module, nn.Linear) or name.rpartition(".")[2] in ("head", "lm_head"):
        return False
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


def swap_for_te(model: nn.Module) -> int:
    """Put Transformer Engine's Linears into a model -> how many."""
    taken = [(name, module) for name, module in model.named_modules() if is_taken(name, module)]
    for name, module in taken:
        assert isinstance(module, nn.Linear)
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, te_linear(module))
    return len(taken)


def convert_for_torchao(model: nn.Module, recipe: str) -> int:
    """Convert a model's Linears, in place, by torchao's recipe of that name -> how many."""
    torchao: Any = importlib.import_module("torchao.float8")
    names = {name for name, module in model.named_modules() if is_taken(name, module)}
    torchao.convert_to_float8_training(
        model,
        config=torchao.Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: name in names,
    )
    return len(names)


def serve_with_torchao(model: nn.Module, recipe: str) -> int:
    """Give a model's Linears torchao's FP8 weights and dynamic FP8 activations, in place -> how many.

    Args:
        model: to serve.
        recipe: "tensorwise" or "rowwise", what an activation and a weight have one scale for.
    """
    torchao: Any = importlib.import_module("torchao.quantization")
    names = {name for name, module in model.named_modules() if is_taken(name, module)}
    granularity = {"tensorwise": torchao.PerTensor, "rowwise": torchao.PerRow}[recipe]
    config = torchao.Float8DynamicActivationFloat8WeightConfig(granularity=granularity())
    torchao.quantize_(model, config, filter_fn=lambda module, name: name in names)
    return len(names)


def serve_with_te(model: nn.Module, recipe: str) -> tuple[int, Context]:
    """Put Transformer Engine's Linears with FP8 weights into a model -> how many, and the context to run it in."""
    engine: Any = importlib.import_module("transformer_engine.pytorch")
    made = te_recipe(recipe)
    # Renamed as the context was.
    initialised = getattr(engine, "quantized_model_init", None) or engine.fp8_model_init
    with initialised(enabled=True, recipe=made):
        layers = swap_for_te(model)
    return layers, te_context(made)
