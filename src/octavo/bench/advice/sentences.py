"""What follows from the figures of a model, in plain sentences: what to use, what to leave, and when not to use FP8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.bench.advice.layers import Layer, seconds
from octavo.bench.advice.memory import Memory
from octavo.bench.advice.shape import HOST_FACTOR, HOST_LINEAR_S, WORTH_IT, cast_again
from octavo.bench.advice.source import Described
from octavo.conversion.card import GIB, Card
from octavo.conversion.gain import Method, smallest_tokens

# A share of time or of parameters from which on the reader should know of it.
LARGE_SHARE = 0.3


def sentences_about(
    described: Described,
    precision: str,
    layers: Sequence[Layer],
    methods: Sequence[Method],
    card: Card,
    memory: Sequence[Memory],
) -> Iterator[str]:
    """Sentences about a model.

    Args:
        described: the model.
        precision: of its training.
        layers: its Linears.
        methods: the scalings.
        card: the card.
        memory: in BF16, then by scaling.
    """
    if not any(layer.tokens for layer in layers):
        yield "Do not use FP8 here: no Linear of this model ran, and FP8 converts nothing else."
        return
    best = min(methods, key=lambda method: seconds(layers, method.name))
    high, low = seconds(layers), seconds(layers, best.name)
    yield _verdict(best, high, low)
    yield from _too_small(layers, best, methods, card)
    yield from _host(layers, best, high, low)
    yield from _head(described, layers, best)
    yield from _parameters(described, layers, best)
    yield from _odd(layers)
    yield from _memory(memory, best, card)
    yield from cast_again(methods)
    if described.remark:
        yield described.remark
    if precision == "bf16":
        yield (
            "bf16 parameters have no float32 masters: an update smaller than 1/256 of a weight is lost, with FP8 as"
            " without. --precision autocast counts float32 ones."
        )


def _verdict(best: Method, high: float, low: float) -> str:
    times = f"{figure(high * 1e3)} ms of GPU time a step in BF16, {figure(low * 1e3)} with {best.name} scaling"
    if high / low < WORTH_IT:
        return f"Do not use FP8 here for speed: the Linears take {times}, {high / low:.2f}x."
    return f"FP8 gains: the Linears take {times}, {high / low:.2f}x. (The rest of a step stays as it is.)"


def _too_small(layers: Sequence[Layer], best: Method, methods: Sequence[Method], card: Card) -> Iterator[str]:
    """Layers that gain with more tokens, and those that never do."""
    grown = {
        (layer.in_features, layer.out_features): smallest_tokens(
            layer.in_features,
            layer.out_features,
            card,
            best,
            bias=layer.bias,
            float32_weight=layer.float32_weight,
        )
        for layer in layers
        if not layer.reason and best.name in layer.slow and not _is_odd(layer)
    }
    later = [f"{k} x {n} from {least} tokens on" for (k, n), least in grown.items() if least is not None]
    if later:
        yield (
            f"With so few tokens these Linears stay in BF16, and gain with more: {', '.join(later)}. convert's default"
            " filter judges by many tokens and would take them: exclude them, or use larger batches."
        )
    never = [f"{k} x {n}" for (k, n), least in grown.items() if least is None]
    if never:
        yield f"Too narrow ever to gain, since casts take longer than the products save: {', '.join(never)}."
    others = [one.name for one in methods if seconds(layers, one.name) > seconds(layers, best.name) * WORTH_IT]
    if others:
        yield f"Slower than {best.name} by more than {WORTH_IT - 1:.0%}: {', '.join(others)}."


def _host(layers: Sequence[Layer], best: Method, high: float, low: float) -> Iterator[str]:
    """Whether launching takes longer than computing."""
    calls = sum(len(layer.tokens) for layer in layers)
    fp8_calls = sum(len(layer.tokens) for layer in layers if layer.converts(best.name))
    plain = calls * HOST_LINEAR_S
    ours = plain + fp8_calls * (HOST_FACTOR - 1) * HOST_LINEAR_S
    cure = (
        "compile with mode='reduce-overhead', use octavo.make_graphed_callables, or larger batches."
        f" ({HOST_LINEAR_S * 1e6:.0f} us for an nn.Linear, as beside the H200 that was measured, and up to"
        f" {HOST_FACTOR}x that for an FP8 one; another host may be faster.)"
    )
    if plain > high:
        yield (
            f"Do not expect a gain in eager mode: the host takes about {figure(plain * 1e3)} ms to launch what keeps"
            f" the GPU busy for {figure(high * 1e3)}. So {cure}"
        )
    elif ours > low:
        yield (
            f"In eager mode FP8 may be bound by the host: up to {figure(ours * 1e3)} ms of launching for"
            f" {figure(low * 1e3)} ms of GPU time. So {cure}"
        )


def _head(described: Described, layers: Sequence[Layer], best: Method) -> Iterator[str]:
    """The output layer: how much it takes, and what is left without it."""
    head = [layer for layer in layers if layer.weight == described.head and layer.tokens]
    if not head:
        return
    [layer] = head[:1]
    share = layer.bf16_s / seconds(layers)
    if layer.converts(best.name):
        without = seconds(layers) / (seconds(layers, best.name) + layer.bf16_s - layer.fp8_s[best.name])
        yield (
            f"The head, {layer.name}, is {share:.0%} of the Linears' time, and its error goes straight into the"
            f" outputs: with exclude=[{layer.name!r}] the gain is {without:.2f}x."
        )
    elif share > LARGE_SHARE:
        yield f"The head, {layer.name}, takes {share:.0%} of the Linears' time and stays in BF16: that bounds the gain."


def _parameters(described: Described, layers: Sequence[Layer], best: Method) -> Iterator[str]:
    """Parameters that FP8 does not touch."""
    sizes = {id(parameter): parameter.numel() for parameter in described.model.parameters()}
    total = sum(sizes.values())
    looked_up = sum(sizes[one] for one in described.embeddings if one in sizes)
    if looked_up > LARGE_SHARE * total:
        yield f"Embeddings are {looked_up / total:.0%} of the parameters: FP8 neither speeds them up nor shrinks them."
    linear = {layer.weight for layer in layers} | described.embeddings
    other = sum(size for one, size in sizes.items() if one not in linear)
    if other > LARGE_SHARE * total:
        yield (
            f"{other / total:.0%} of the parameters belong to neither Linears nor embeddings (stacked experts,"
            " convolutions): convert leaves them, and these figures do not count their products."
        )


def _odd(layers: Sequence[Layer]) -> Iterator[str]:
    odd = [layer for layer in layers if not layer.reason and _is_odd(layer)]
    if odd:
        names = ", ".join(layer.name for layer in odd[:3]) + (" and others" if len(odd) > 3 else "")
        yield f"No multiple of 16 features, so each call would pad; they stay in BF16: {names}."


def _memory(memory: Sequence[Memory], best: Method, card: Card) -> Iterator[str]:
    """What the recommended scaling saves, and what fits, in figures of the table of memory."""
    plain = memory[0]
    [own] = [one for one in memory[1:] if one.recipe == best.name]
    room = card.memory_gib or 0.0
    fp8, bf16 = (f"{one.total / GIB:.2f} GiB" for one in (own, plain))
    if (own.total, own.kept) == (plain.total, plain.kept):
        yield f"Nothing is converted, so memory stays what it is: a step needs about {bf16}."
    elif own.total < plain.total:
        others = [one for one in memory[1:] if one.total < own.total]
        least = min(others, key=lambda one: one.total, default=own)
        beside = f"; least with {least.recipe}, {least.total / GIB:.2f}" if least is not own else ""
        yield f"Memory: with {own.recipe} scaling a step needs about {fp8} instead of {bf16}{beside}."
    else:
        yield (
            f"FP8 saves no memory here: with {own.recipe} scaling a step needs about {fp8}, {bf16} in BF16, since codes"
            " of the weights come beside the weights."
        )
    batches = (
        f"the largest batch is about {plain.largest_batch(room)} in BF16 and {own.largest_batch(room)} with"
        f" {own.recipe} scaling"
    )
    if not own.largest_batch(room):
        fixed = (own.total - own.grows) / GIB
        yield (
            f"Not even one sample fits into {room:.4g} GiB ({figure(fixed)} GiB do not depend on the batch): shard"
            " the model over several cards, or use fewer tokens."
        )
    elif not plain.fits(room) and own.fits(room):
        yield f"In {room:.4g} GiB this batch fits in FP8 only; {batches}."
    elif not own.fits(room):
        yield f"This batch does not fit into {room:.4g} GiB; {batches}."
    else:
        yield f"It fits into {room:.4g} GiB; {batches}."


def _is_odd(layer: Layer) -> bool:
    return bool(layer.in_features % 16 or layer.out_features % 16)


def figure(value: float) -> str:
    """Three digits that count, and no exponent."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if value >= 1e-4 else "0"
