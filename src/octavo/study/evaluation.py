"""Perplexity and next-token accuracy: every method over the same windows, each target counted once."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from octavo.study.tokens import evaluation_windows

Context = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Evaluation:
    """Mean negative log likelihood in nats a token, and the share of targets that had the largest logit."""

    loss: float
    accuracy: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """What is evaluated, in fixed windows: a stream, its context length, and how many of its tokens."""

    stream: torch.Tensor
    context: int
    batch_size: int
    device: torch.device
    max_tokens: int | None = None

    def __call__(self, model: nn.Module, context: Context = nullcontext) -> Evaluation:
        """Evaluate under no_grad in eval mode, with `context` (autocast, say) around each forward pass.

        Sums are kept in float64 on the device; the host waits once, at the end.
        """
        was_training = model.training
        model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        count = 0
        with torch.no_grad():
            for inputs, targets in evaluation_windows(self.stream, self.context, self.batch_size, self.max_tokens):
                targets = targets.to(self.device).reshape(-1)
                with context():
                    logits = model(inputs.to(self.device))
                rows = logits.reshape(-1, logits.shape[-1]).float()
                loss += F.cross_entropy(rows, targets, reduction="sum").double()
                correct += (rows.argmax(-1) == targets).sum()
                count += targets.numel()
        model.train(was_training)
        return Evaluation(loss.item() / count, correct.item() / count, count)
