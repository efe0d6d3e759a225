"""The Linears of a model, alike ones together: which of them gain, and by how much."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from octavo.conversion.card import Card
from octavo.conversion.gain import Method, bf16_seconds, fp8_seconds
from octavo.conversion.selection import candidates, checked_selection, speed_reasons, unmatched_patterns

_NUMBER = re.compile(r"\d+")
# Of a reason, the figure of one scaling, where the table has those of all.
_SLOW = re.compile(r": expected.*")


@dataclass(frozen=True)
class Layer:
    """One Linear.

    Attributes:
        name: qualified name.
        weight: id of its weight.
        in_features, out_features: K and N.
        tokens: of each of its calls in a step.
        bias, float32_weight: as the model of the card asks.
        reason: why it stays in BF16 whatever the speed; may be empty.
        bf16_s: seconds of a step.
        fp8_s: by scaling, were it converted.
        slow: by scaling, why it stays in BF16 for speed; absent where it does not.
    """

    name: str
    weight: int
    in_features: int
    out_features: int
    tokens: tuple[int, ...]
    bias: bool
    float32_weight: bool
    reason: str
    bf16_s: float
    fp8_s: Mapping[str, float]
    slow: Mapping[str, str]

    def converts(self, method: str) -> bool:
        """Whether it runs in FP8 with a scaling."""
        return not self.reason and method not in self.slow


@dataclass(frozen=True)
class LayerGroup:
    """Linears whose names differ in numbers alone, and that are alike otherwise.

    Attributes:
        name: with `*` for the numbers.
        count: how many.
        gains: expected speed over BF16 by scaling, whether it is converted with it or not.
        converted: by which scalings.
        reason: why it stays in BF16, where it does with all of them; may be empty.
    """

    name: str
    count: int
    in_features: int
    out_features: int
    tokens: int
    gains: Mapping[str, float]
    converted: tuple[str, ...]
    reason: str


def layers_of(
    model: nn.Module,
    tokens: Mapping[int, Sequence[int]],
    methods: Sequence[Method],
    card: Card,
    exclude: Iterable[str],
    float32_weight: bool,
) -> tuple[list[Layer], list[str]]:
    """All Linears of a model as `convert` finds them, judged at their numbers of tokens; and patterns without a match.

    Args:
        model: on the meta device.
        tokens: of each call, by id of the weight.
        methods: the scalings.
        card: the card.
        exclude: patterns as of `convert`.
        float32_weight: weights are float32, under autocast.
    """
    selection = checked_selection(None, list(exclude), None)
    found = candidates(model, selection)
    layers = []
    for one in found:
        module: Any = one.module
        calls = tuple(tokens.get(id(module.weight), ()))
        reason = one.reasons[0] if one.reasons else "" if calls else "it did not run in one forward"
        bias = module.bias is not None
        about = {"bias": bias, "float32_weight": float32_weight}
        k, n = one.in_features, one.out_features
        bf16 = sum(bf16_seconds(m, k, n, card, **about) for m in calls)
        slow, times = {}, {}
        for method in methods:
            reasons = speed_reasons(k, n, max(calls, default=1), card, method, **about)
            if reasons:
                slow[method.name] = reasons[0]
            times[method.name] = sum(fp8_seconds(method, m, k, n, card, **about) for m in calls)
        layers.append(Layer(one.name, id(module.weight), k, n, calls, bias, float32_weight, reason, bf16, times, slow))
    return layers, unmatched_patterns(found, selection)


def grouped(layers: Iterable[Layer], methods: Sequence[Method]) -> list[LayerGroup]:
    """Alike layers together, in the model's order."""
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        key = (_NUMBER.sub("*", layer.name), layer.in_features, layer.out_features, layer.tokens, layer.reason)
        groups.setdefault(key, []).append(layer)
    found = []
    for (name, k, n, calls, reason), members in groups.items():
        first = members[0]
        gains = {one.name: first.bf16_s / first.fp8_s[one.name] if calls else 0.0 for one in methods}
        converted = tuple(one.name for one in methods if first.converts(one.name))
        why = reason or ("" if converted else _SLOW.sub("", first.slow[methods[0].name]))
        found.append(LayerGroup(name or "(root)", len(members), k, n, max(calls, default=0), gains, converted, why))
    return found


def seconds(layers: Iterable[Layer], method: str | None = None) -> float:
    """Seconds of a step's Linears in BF16, or with a scaling where it gains."""
    return sum(layer.fp8_s[method] if method and layer.converts(method) else layer.bf16_s for layer in layers)
