"""A row measured with Transformer Engine's own Linear, where that library can be imported; else the reason why not."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from octavo.study.evaluation import Evaluator
from octavo.study.generation import GenerationPlan, measure_generation
from octavo.study.record import Row
from octavo.study.serving import linear_layers, model_bytes, replace_module, weight_bytes

KEY = "te"


def transformer_engine_reason(device: torch.device) -> str | None:
    """Why no row of Transformer Engine can be measured here, or None if one can."""
    if device.type != "cuda":
        return "Transformer Engine runs on GPUs only"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken build raises many kinds of errors at import; none may end the study
        return f"Transformer Engine does not import ({type(error).__name__}: {error})"
    return None


class TransformerEngineModel:
    """A copy of a served model with Transformer Engine's layers, and the context in which they run in FP8."""

    def __init__(self, reference: nn.Module) -> None:
        """Copy `reference` and swap its linear layers."""
        self.engine: Any = importlib.import_module("transformer_engine.pytorch")
        self.recipe: Any = importlib.import_module("transformer_engine.common.recipe").Float8CurrentScaling()
        self.model = copy.deepcopy(reference)
        for name, linear in linear_layers(self.model).items():
            replace_module(self.model, name, self._layer(linear))
        self.model.eval()

    def _layer(self, linear: nn.Linear) -> nn.Module:
        layer: nn.Module = self.engine.Linear(
            linear.in_features, linear.out_features, bias=linear.bias is not None, params_dtype=linear.weight.dtype
        )
        with torch.no_grad():
            layer.weight.copy_(linear.weight)  # type: ignore[operator]
            if linear.bias is not None:
                layer.bias.copy_(linear.bias)  # type: ignore[operator]
        return layer

    def context(self) -> AbstractContextManager[object]:
        """FP8 with current scaling."""
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        if hasattr(self.engine, "autocast"):  # since 2.10; the older name warns from then on
            stack.enter_context(self.engine.autocast(enabled=True, recipe=self.recipe))
        else:
            stack.enter_context(self.engine.fp8_autocast(enabled=True, fp8_recipe=self.recipe))
        return stack


def transformer_engine_row(reference: nn.Module, evaluate: Evaluator, plan: GenerationPlan, seed: int) -> Row:
    """The `ptq` row of Transformer Engine; one whose layers failed has no figures and a note that says so."""
    row: Row = {
        "kind": "ptq",
        "method": KEY,
        "label": "FP8 by Transformer Engine",
        "weights": "E4M3, cast anew in each forward",
        "activations": "E4M3, one scale a tensor, as they come",
        "execution": "native",
        "seed": seed,
    }
    figures = ("perplexity", "accuracy", "loss", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s")
    row |= dict.fromkeys((*figures, "weight_bytes", "model_bytes", "load_s"))
    names = list(linear_layers(reference))
    try:
        served = TransformerEngineModel(reference)
        result = evaluate(served.model, served.context)
        speed = measure_generation(served.model, plan, served.context)
    except Exception as error:  # another library's failure is a finding to record, not the end of the study
        return row | {"note": f"failed: {type(error).__name__}: {str(error)[:200]}"}
    return row | {
        "perplexity": result.perplexity,
        "accuracy": result.accuracy,
        "loss": result.loss,
        "ttft_s": speed.ttft_s,
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "decode_tokens_per_s": speed.decode_tokens_per_s,
        "weight_bytes": weight_bytes(reference, names),
        "model_bytes": model_bytes(reference),
        "note": "weights stay in 16 bits and are cast in each forward; loading is that of the 16-bit file",
    }
