"""Which layers of a model are converted, and the reason why each other one is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

from torch import nn

from octavo.conversion.card import H200, Card
from octavo.conversion.converted import is_conv1d
from octavo.conversion.ends import NO_ENDS, Ends, checked_ends, end_reasons
from octavo.conversion.gain import METHODS, Method, expected_gain, method_of
from octavo.kernels.scaled_mm import device_reasons
from octavo.modules import OUT_DTYPES, FP8LinearMixin
from octavo.modules.split_linear import WeightInParts
from octavo.recipes import Recipe

LayerFilter = Literal["all"] | Callable[[nn.Module, str], bool] | None


class Candidate(NamedTuple):
    """A layer that holds a matrix: [out, in], or as Conv1D has it, [in, out]."""

    name: str
    module: nn.Module
    in_features: int
    out_features: int
    reasons: list[str]


class Selection(NamedTuple):
    """Patterns and filter of one conversion, and how many blocks stay as they are at each end."""

    include: list[str]
    exclude: list[str]
    filter: LayerFilter
    ends: Ends = NO_ENDS


def checked_selection(
    include: str | Iterable[str] | None,
    exclude: str | Iterable[str] | None,
    filter: LayerFilter,
    ends: int | Ends = NO_ENDS,
) -> Selection:
    """The user's patterns as lists; ValueError for what is no regular expression, no filter or no count."""
    if not (filter is None or filter == "all" or callable(filter)):
        raise ValueError(f"filter is {filter!r}: expected None, 'all', or a function of (module, name)")
    return Selection(_patterns(include, "include"), _patterns(exclude, "exclude"), filter, checked_ends(ends))


def candidates(model: nn.Module, selection: Selection, recipe: Recipe | None = None) -> list[Candidate]:
    """All linear layers of a model, each with the reasons that speak against it; a shared layer once.

    Parts of Octavo's larger layers are among them: `mlp.fc1` of a LayerNormMLP, `moe.expert0` of a GroupedLinear.

    Args:
        model: the model.
        selection: patterns and filter.
        recipe: whose casts the default filter weighs, of each layer its own; None weighs those of delayed scaling.
    """
    never_called = {
        id(module.out_proj): name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)
    }
    found = []
    for name, module in linear_layers(model):
        out_features, in_features = _extents(module)
        found.append(Candidate(name, module, in_features, out_features, _structure_reasons(module, never_called)))
    free = [layer.name for layer in found if not layer.reasons]
    at_ends = end_reasons(model, [(layer.name, layer.module) for layer in found], free, selection.ends)
    for name, module, in_features, out_features, reasons in found:
        if not reasons:
            reasons += _choice_reasons(name, module, selection) or at_ends.get(name, [])
        if not reasons and selection.filter is None:
            own = None if recipe is None else recipe.for_layer(name)
            if recipe is None or own is not None:  # a layer that its override keeps out has that reason
                reasons += _speed_reasons(module, in_features, out_features, own)
    return found


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All layers of a model that hold a matrix, with their qualified names; a shared layer once."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, FP8LinearMixin)) or is_conv1d(module):
            yield name, module


def unmatched_patterns(found: list[Candidate], selection: Selection, recipe: Recipe | None = None) -> list[str]:
    """Patterns that match no linear layer at all, of the selection and of the recipe's overrides."""
    names = [layer.name for layer in found]
    return _unmatched([*selection.include, *selection.exclude], names) + unmatched_overrides(names, recipe)


def unmatched_overrides(names: list[str], recipe: Recipe | None) -> list[str]:
    """Patterns of a recipe's overrides that match none of the names."""
    return [] if recipe is None else _unmatched([pattern for pattern, _ in recipe.overrides], names)


def _unmatched(patterns: list[str], names: list[str]) -> list[str]:
    return [pattern for pattern in patterns if not any(re.search(pattern, name) for name in names)]


def _extents(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a layer; a lazy one's inputs are 0 until it has run."""
    if isinstance(module, WeightInParts):
        return module.out_features, module.in_features
    weight: Any = module.weight
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return int(module.out_features), int(module.in_features)  # type: ignore[arg-type]
    first, second = weight.shape
    return (second, first) if is_conv1d(module) else (first, second)


def _structure_reasons(module: nn.Module, never_called: dict[int, str]) -> list[str]:
    """Why a layer cannot be converted."""
    if isinstance(module, FP8LinearMixin):
        return []
    if id(module) in never_called:
        return ["nn.MultiheadAttention reads its weight and never calls it"]
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return [f"{type(module).__name__} has a forward of its own"]
    if "forward" in module.__dict__:
        return ["its forward was replaced on the instance"]
    if "parametrizations" in module._modules:
        return ["its weight is parametrized: it is computed, not stored"]
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        return ["its weight has no shape yet: run one forward first"]
    if module.weight.dtype not in OUT_DTYPES:
        return [f"its weight is {module.weight.dtype}: an FP8 layer takes float32, bfloat16 or float16"]
    return []


def _choice_reasons(name: str, module: nn.Module, selection: Selection) -> list[str]:
    """Why a layer was not wanted."""
    if selection.include and not any(re.search(pattern, name) for pattern in selection.include):
        return ["no include pattern matches"]
    for pattern in selection.exclude:
        if re.search(pattern, name):
            return [f"excluded by {pattern!r}"]
    if callable(selection.filter) and not selection.filter(module, name):
        return ["the filter said no"]
    return []


def speed_reasons(
    in_features: int,
    out_features: int,
    tokens: float | None = None,
    card: Card = H200,
    method: Method = METHODS["delayed"],
    *,
    bias: bool = False,
    float32_weight: bool = False,
) -> list[str]:
    """Why FP8 would slow a Linear down by the model of the card; arguments as of `expected_gain`."""
    for name, extent in (("in_features", in_features), ("out_features", out_features)):
        if extent % 16:
            return [f"{name} = {extent} is no multiple of 16: each call would pad"]
    gain = expected_gain(in_features, out_features, tokens, card, method, bias=bias, float32_weight=float32_weight)
    if gain <= 1:
        return [f"FP8 would slow it down: expected {gain:.2f}x of bf16's speed (filter='all' overrides)"]
    return []


def is_weighed(module: nn.Module) -> bool:
    """True if the default filter weighs speed where the layer's weight lies: FP8 is not emulated there."""
    return not device_reasons(module.weight.device)  # type: ignore[arg-type]


def _speed_reasons(module: nn.Module, in_features: int, out_features: int, recipe: Recipe | None) -> list[str]:
    """Why FP8 would slow a layer down here. Where FP8 is emulated it is no matter of speed, and none applies."""
    if not is_weighed(module):
        return []
    method = METHODS["delayed"] if recipe is None else method_of(recipe)
    return [] if method is None else speed_reasons(in_features, out_features, method=method)


# What is one pattern, and not several. (Bytes would be taken for numbers; they are refused by name.)
_PATTERN = (str, bytes, re.Pattern)


def _patterns(patterns: str | Iterable[str] | None, name: str) -> list[str]:
    given = [] if patterns is None else [patterns] if isinstance(patterns, _PATTERN) else list(patterns)
    for pattern in given:
        try:
            # Names are str, which a pattern of bytes cannot be looked for in.
            re.compile(pattern).search("")
        except (re.error, TypeError) as error:
            raise ValueError(f"{name} pattern {pattern!r} is no regular expression: {error}") from None
    return given
