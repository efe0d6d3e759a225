"""Advice for one Linear: whether FP8 gains for its shape, by how much, and from which size on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.advice.device import ChosenCard
from octavo.bench.advice.error import AdviceError
from octavo.conversion.gain import Method, bf16_seconds, fp8_seconds, smallest_square, smallest_tokens

# Host time of an eager nn.Linear's forward and backward beside the H200 that was measured (its host is slow), and how
# many times that the bench allows an FP8 one.
HOST_LINEAR_S = 191e-6
HOST_FACTOR = 3
# Below it a gain is no reason to change anything: two runs of one program differ by as much.
WORTH_IT = 1.05


@dataclass(frozen=True)
class MethodAdvice:
    """One scaling.

    Attributes:
        recipe: its name.
        fp8_us: GPU time of forward and backward.
        gain: BF16's time over it.
        smallest_tokens: from which on the layer gains, K and N as they are; None: never.
        smallest_square: from which M = K = N on a Linear gains; None: never.
    """

    recipe: str
    fp8_us: float
    gain: float
    smallest_tokens: int | None
    smallest_square: int | None


@dataclass(frozen=True)
class ShapeAdvice:
    """A Linear of M tokens, K inputs and N outputs, on a card; times in microseconds."""

    tokens: int
    in_features: int
    out_features: int
    bias: bool
    card: str
    card_source: str
    bf16_us: float
    methods: tuple[MethodAdvice, ...]
    sentences: tuple[str, ...]

    @property
    def best(self) -> MethodAdvice:
        """The fastest scaling."""
        return max(self.methods, key=lambda method: method.gain)


def shape_advice(
    shape: tuple[int, int, int], chosen: ChosenCard, methods: Sequence[Method], *, bias: bool = True
) -> ShapeAdvice:
    """Advice for a Linear of M, K, N.

    Raises:
        AdviceError: an extent below 1.
    """
    for option, extent in zip(("--tokens", "--in", "--out"), shape, strict=True):
        if extent < 1:
            raise AdviceError(f"{option} {extent}: a size is 1 or more")
    m, k, n = shape
    card = chosen.card
    bf16 = bf16_seconds(m, k, n, card, bias=bias)
    rows = []
    for method in methods:
        seconds = fp8_seconds(method, m, k, n, card, bias=bias)
        fewest, square = smallest_tokens(k, n, card, method, bias=bias), smallest_square(card, method, bias=bias)
        rows.append(MethodAdvice(method.name, seconds * 1e6, bf16 / seconds, fewest, square))
    found = ShapeAdvice(m, k, n, bias, card.name, chosen.remark, bf16 * 1e6, tuple(rows), ())
    return ShapeAdvice(**(vars(found) | {"sentences": (*_sentences(found), *cast_again(methods))}))


def cast_again(methods: Sequence[Method]) -> list[str]:
    """What to know of the figures if weights are cast twice."""
    if not any("weight" in method.twice for method in methods):
        return []
    return [
        "With saved_weight='high_precision': no codes of weights are kept, and the second cast of each weight is in the"
        " times."
    ]


def _sentences(found: ShapeAdvice) -> list[str]:
    best = found.best
    said = [_verdict(found, best)]
    losing = [method.recipe for method in found.methods if method.gain <= 1 < best.gain]
    if losing:
        said.append(f"Not with every recipe: {', '.join(losing)} would be slower than BF16.")
    if best.gain <= 1:
        said.append(_how_to_gain(found, best))
    odd = [name for name, extent in (("in", found.in_features), ("out", found.out_features)) if extent % 16]
    if odd:
        said.append(
            f"--{' and --'.join(odd)} no multiple of 16: every call pads, which is not in these figures, and convert's"
            " default filter leaves such a layer in BF16."
        )
    if found.bf16_us * 1e-6 < HOST_LINEAR_S:
        said.append(
            f"In eager mode the host decides: BF16 keeps the GPU busy for {found.bf16_us:.0f} us, and launching an"
            f" nn.Linear's forward and backward took {HOST_LINEAR_S * 1e6:.0f} us of the host beside the H200 that was"
            f" measured, and an FP8 one may take {HOST_FACTOR}x that. The gain shows under CUDA graphs"
            " (octavo.make_graphed_callables, or torch.compile with mode='reduce-overhead')."
        )
    return said


def _verdict(found: ShapeAdvice, best: MethodAdvice) -> str:
    what = f"{best.gain:.2f}x BF16's speed with {best.recipe} scaling, {best.fp8_us:.0f} us against {found.bf16_us:.0f}"
    if best.gain <= 1:
        return f"FP8 does not gain: at best {what}."
    if best.gain < WORTH_IT:
        return f"FP8 hardly gains: {what}; the model is no more exact than that."
    return f"FP8 gains: {what}."


def _how_to_gain(found: ShapeAdvice, best: MethodAdvice) -> str:
    if best.smallest_tokens is not None:
        return f"With K and N as they are it gains from {best.smallest_tokens} tokens on ({best.recipe})."
    return (
        "No number of tokens makes it gain: K and N are so small that casting takes longer than the products save."
        f" Square Linears gain from {best.smallest_square} on ({best.recipe})."
    )
