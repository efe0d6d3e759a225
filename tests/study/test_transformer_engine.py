"""Transformer Engine itself is not here: a stand-in with its names shows that what is asked of it is right."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from octavo.study.evaluation import Evaluator
from octavo.study.generation import GenerationPlan
from octavo.study.model import ModelShape, build_model
from octavo.study.transformer_engine import transformer_engine_reason, transformer_engine_row

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=1, width=16, heads=2, context=8, vocab_size=20)


def stand_in(monkeypatch: pytest.MonkeyPatch, forward_fails: bool) -> list[Any]:
    entered: list[Any] = []

    class Linear(nn.Linear):
        def __init__(self, n: int, m: int, bias: bool, params_dtype: torch.dtype) -> None:
            super().__init__(n, m, bias, dtype=params_dtype)

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            if forward_fails:
                raise RuntimeError("no kernel image")
            return super().forward(input)

    def autocast(enabled: bool, recipe: object) -> AbstractContextManager[None]:
        entered.append(recipe)
        return nullcontext()

    names: dict[str, dict[str, Any]] = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {"Linear": Linear, "autocast": autocast},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"Float8CurrentScaling": lambda: "current"},
    }
    for name, members in names.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return entered


def row() -> dict[str, Any]:
    model = build_model(SHAPE, 0).bfloat16().eval()
    stream = torch.randint(20, (65,)).int()
    evaluate = Evaluator(stream=stream, context=8, batch_size=4, device=CPU)
    plan = GenerationPlan(prompts=torch.randint(20, (2, 4)), new_tokens=2, repeats=1)
    expected = evaluate(model)
    return transformer_engine_row(model, evaluate, plan, seed=3) | {"expected": expected.perplexity}


def test_the_swapped_model_has_the_same_weights_and_runs_in_the_engines_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered = stand_in(monkeypatch, forward_fails=False)
    result = row()
    assert result["perplexity"] == result["expected"]  # the stand-in computes in 16 bits
    assert result["decode_tokens_per_s"] > 0
    assert set(entered) == {"current"}


def test_a_failure_of_the_engine_is_recorded_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, forward_fails=True)
    result = row()
    assert result["perplexity"] is None
    assert result["note"] == "failed: RuntimeError: no kernel image"


def test_without_a_gpu_or_the_library_the_reason_is_given() -> None:
    assert transformer_engine_reason(CPU) == "Transformer Engine runs on GPUs only"
