"""How fast a served model answers: time to the first token, prefill and decoding with a cache, as medians.

Decoding is greedy. A GPU is waited for at the ends of a measurement only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from octavo.study.evaluation import Context


@dataclass(frozen=True)
class GenerationSpeed:
    """Seconds to the first token for one prompt, and tokens a second over a batch of prompts."""

    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Prompts int64 [batch, prompt], how many tokens to decode after them, and how often to repeat."""

    prompts: torch.Tensor
    new_tokens: int
    repeats: int


@torch.no_grad()
def measure_generation(model: nn.Module, plan: GenerationPlan, context: Context = nullcontext) -> GenerationSpeed:
    """Time `model` (with `new_cache(batch)` and `forward(tokens, cache)`) in eval mode; one warm-up, then medians."""
    model.eval()
    batch, prompt = plan.prompts.shape
    first, prefill, decode = [], [], []
    with context():
        for repeat in range(plan.repeats + 1):
            alone = _seconds(plan.prompts.device, lambda: _prefill(model, plan.prompts[:1]))
            start = time.perf_counter()
            token, cache = _prefill(model, plan.prompts)
            _wait(plan.prompts.device)
            middle = time.perf_counter()
            _decode(model, token, cache, plan.new_tokens)
            _wait(plan.prompts.device)
            end = time.perf_counter()
            if repeat:  # the first round warms up
                first.append(alone)
                prefill.append(middle - start)
                decode.append(end - middle)
    return GenerationSpeed(
        statistics.median(first),
        batch * prompt / statistics.median(prefill),
        batch * plan.new_tokens / statistics.median(decode),
    )


@torch.no_grad()
def generate(model: nn.Module, prompts: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy continuation [batch, new_tokens] of prompts [batch, prompt]."""
    token, cache = _prefill(model, prompts)
    return torch.cat([token, _decode(model, token, cache, new_tokens - 1)], dim=1)


def _prefill(model: nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, object]:
    cache = model.new_cache(prompts.shape[0])  # type: ignore[operator]
    logits = model(prompts, cache)
    return logits[:, -1].argmax(-1, keepdim=True), cache


def _decode(model: nn.Module, token: torch.Tensor, cache: object, new_tokens: int) -> torch.Tensor:
    tokens = [token[:, :0]]
    for _ in range(new_tokens):
        token = model(token, cache)[:, -1].argmax(-1, keepdim=True)
        tokens.append(token)
    return torch.cat(tokens, dim=1)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(device: torch.device, action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    _wait(device)
    return time.perf_counter() - start
