from __future__ import annotations

import math

import torch
from torch import nn

from octavo.study.evaluation import Evaluation, Evaluator


class Knows(nn.Module):
    """Gives the next token of a counting stream the logit `confidence`, the others 0."""

    def __init__(self, vocabulary: int, confidence: float) -> None:
        super().__init__()
        self.vocabulary, self.confidence = vocabulary, confidence

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hot = nn.functional.one_hot((tokens + 1) % self.vocabulary, self.vocabulary)
        return hot.float() * self.confidence


def evaluator(tokens: int = 101) -> Evaluator:
    stream = (torch.arange(tokens) % 10).int()
    return Evaluator(stream=stream, context=10, batch_size=3, device=torch.device("cpu"))


def test_a_model_that_knows_nothing_has_the_perplexity_of_the_vocabulary() -> None:
    result = evaluator()(Knows(10, 0.0))
    assert math.isclose(result.perplexity, 10, rel_tol=1e-6)
    assert result.tokens == 100


def test_loss_and_accuracy_are_the_exact_ones() -> None:
    result = evaluator()(Knows(10, 2.0))
    assert math.isclose(result.loss, math.log(math.exp(2) + 9) - 2, rel_tol=1e-6)
    assert result.accuracy == 1.0


def test_a_loss_beyond_exp_gives_infinity_not_an_error() -> None:
    assert Evaluation(1e6, 0.0, 1).perplexity == math.inf


def test_evaluation_leaves_the_training_flag() -> None:
    model = Knows(10, 1.0).train()
    evaluator()(model)
    assert model.training
