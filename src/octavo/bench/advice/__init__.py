"""Advice before a run: whether FP8 gains for a Linear's shape or for a model, by the model of the card; see docs."""

from octavo.bench.advice.device import ChosenCard, card_named, methods_named
from octavo.bench.advice.error import AdviceError
from octavo.bench.advice.model import ModelAdvice, Question, model_advice
from octavo.bench.advice.shape import MethodAdvice, ShapeAdvice, shape_advice

__all__ = [
    "AdviceError",
    "ChosenCard",
    "MethodAdvice",
    "ModelAdvice",
    "Question",
    "ShapeAdvice",
    "card_named",
    "methods_named",
    "model_advice",
    "shape_advice",
]
