"""Advice for a model: which layers gain, what a step keeps in memory, what fits the card, and when not to use FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.bench.advice.device import ChosenCard
from octavo.bench.advice.error import AdviceError
from octavo.bench.advice.layers import Layer, LayerGroup, grouped, layers_of, seconds
from octavo.bench.advice.memory import STATES, Memory, Optimizer, memory_of
from octavo.bench.advice.sentences import sentences_about
from octavo.bench.advice.source import Described, describe, quiet
from octavo.bench.advice.tracing import SCALES, Kept, Precision, kept_by
from octavo.conversion.gain import Method

PRECISIONS: tuple[Precision, ...] = ("autocast", "bf16")


@dataclass(frozen=True)
class Question:
    """What is asked of a model.

    Attributes:
        source: a folder, a config.json or a name of timm's.
        batch: samples of a step.
        sequence: tokens of a sample; None for the context, up to 2048.
        precision: "autocast" (float32 parameters) or "bf16" (bf16 parameters).
        optimizer: adamw or sgd.
        exclude: patterns as of `convert`.
    """

    source: str
    batch: int = 8
    sequence: int | None = None
    precision: Precision = "autocast"
    optimizer: Optimizer = "adamw"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise AdviceError for what is no answerable question."""
        for option, value in (("--batch", self.batch), ("--sequence", self.sequence)):
            if value is not None and value < 1:
                raise AdviceError(f"{option} {value}: a size is 1 or more")
        if self.precision not in PRECISIONS:
            raise AdviceError(f"--precision {self.precision!r} is unknown: there are {', '.join(PRECISIONS)}")
        if self.optimizer not in STATES:
            raise AdviceError(f"--optimizer {self.optimizer!r} is unknown: there are {', '.join(STATES)}")


@dataclass(frozen=True)
class ModelAdvice:
    """The answer.

    Attributes:
        model, parameters: what was built.
        batch, sequence: of a step; sequence is None for images.
        precision, optimizer: of the training.
        card, card_source, memory_gib: what it is for.
        layers: Linears, alike ones together.
        bf16_ms: GPU time of a step's Linears in BF16.
        fp8_ms: the same by scaling, with the layers that gain converted.
        memory: in BF16 first, then by scaling.
        largest_batch: that fits the card, by "bf16" and scaling.
        sentences: what follows from it.
    """

    model: str
    parameters: int
    batch: int
    sequence: int | None
    precision: str
    optimizer: str
    card: str
    card_source: str
    memory_gib: float
    layers: tuple[LayerGroup, ...]
    bf16_ms: float
    fp8_ms: Mapping[str, float]
    memory: tuple[Memory, ...]
    largest_batch: Mapping[str, int]
    sentences: tuple[str, ...]


def model_advice(question: Question, chosen: ChosenCard, methods: Sequence[Method]) -> ModelAdvice:
    """Answer a question about a model; nothing is downloaded, and no memory for weights is used.

    Raises:
        AdviceError: the model cannot be built or run on the meta device, a pattern is none, or the card's memory is
            unknown.
    """
    memory_gib = chosen.card.memory_gib
    if memory_gib is None:
        raise AdviceError(f"the memory of {chosen.card.name} is unknown: give --memory in GiB")
    with quiet():
        return _answer(question, chosen, methods, memory_gib)


def _answer(question: Question, chosen: ChosenCard, methods: Sequence[Method], memory_gib: float) -> ModelAdvice:
    described = describe(question.source, question.sequence)
    model = described.model
    if question.precision == "bf16":
        model.to(torch.bfloat16)

    def kept(fp8: Mapping[int, object]) -> Kept:
        return _kept(described, question, fp8)

    plain = kept({})
    try:
        layers, unmatched = layers_of(
            model, plain.tokens, methods, chosen.card, question.exclude, question.precision == "autocast"
        )
    except ValueError as error:
        raise AdviceError(f"--exclude: {error}") from error
    if unmatched:
        raise AdviceError(f"--exclude {unmatched[0]!r} matches no linear layer of {described.name}")
    memory = [memory_of(model, "bf16", plain, question.batch, question.precision, question.optimizer)]
    memory += [_memory(described, question, method, layers, kept) for method in methods]
    found = {one.recipe: one.largest_batch(memory_gib) for one in memory}
    return ModelAdvice(
        described.name,
        sum(parameter.numel() for parameter in model.parameters()),
        question.batch,
        described.sequence,
        question.precision,
        question.optimizer,
        chosen.card.name,
        chosen.remark,
        memory_gib,
        tuple(grouped(layers, methods)),
        seconds(layers) * 1e3,
        {method.name: seconds(layers, method.name) * 1e3 for method in methods},
        tuple(memory),
        found,
        tuple(sentences_about(described, question.precision, layers, methods, chosen.card, memory)),
    )


def _memory(
    described: Described,
    question: Question,
    method: Method,
    layers: Sequence[Layer],
    kept: Callable[[Mapping[int, object]], Kept],
) -> Memory:
    converted = {layer.weight: SCALES[method.name] for layer in layers if layer.converts(method.name)}
    count = sum(layer.converts(method.name) for layer in layers)
    found = kept(converted)
    if "weight" in method.twice:
        found.bytes["weight codes"] = 0
    return memory_of(described.model, method.name, found, question.batch, question.precision, question.optimizer, count)


def _kept(described: Described, question: Question, fp8: Mapping[int, object]) -> Kept:
    try:
        return kept_by(described.model, lambda: described.forward(question.batch), question.precision, fp8)  # type: ignore[arg-type]
    except Exception as error:  # whatever a forward of somebody else's does that shapes alone do not allow
        first = f"{type(error).__name__}: {error}".strip().splitlines()
        raise AdviceError(
            f"--model {described.name}: its forward does not run on shapes alone ({first[0][:200]}); ask layer by layer"
            " with --tokens, --in and --out"
        ) from error
