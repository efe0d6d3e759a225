"""`high_precision_ends`: the first and last blocks of a model, which lose most in FP8, stay in high precision.

A stack is an `nn.ModuleList`, or the entries of an `nn.Sequential` that are of its most frequent class, of which two or
more hold linear layers. Its entries are the blocks. Where an entry has linear layers in lists of its own and no others,
as a stage of Swin or ConvNeXt, the entries are stages, and the blocks of all of them are counted in one. The experts
within a block are no blocks. Several stacks side by side, an encoder and a decoder, have ends each. A block that stands
in several places counts in each, and stays in high precision if one of them is at an end; a layer that several blocks
share likewise. Layers for serving count as what they were before (`CountedLayer`).

A model without a stack has no blocks to count, nor has one whose blocks are all the same one: there it is the linear
layers that could be converted, each once, in the order of their definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from octavo.conversion.joined_mlp import JoinedMLP

Ends = tuple[int, int]
NO_ENDS: Ends = (0, 0)
_LAYERS = "linear layers"


class CountedLayer:
    """A form of linear layers that cannot be converted, and counts as the layers that it was made of.

    Attributes:
        counted_class: what it was.
    """

    counted_class: type[nn.Module] = nn.Linear

    def counted_parts(self) -> tuple[str, ...]:
        """What the names of those layers add to its own."""
        return ("",)


class _Stack(NamedTuple):
    """What is counted: of each block, or layer, in their order, the names of its layers; and what they are called."""

    blocks: tuple[tuple[str, ...], ...]
    unit: str


def checked_ends(ends: Any) -> Ends:
    """`high_precision_ends` as (first, last); ValueError for what is no count."""
    pair = (ends, ends) if type(ends) is int else tuple(ends) if isinstance(ends, (tuple, list)) else ()
    if len(pair) != 2 or any(type(count) is not int or count < 0 for count in pair):
        raise ValueError(
            f"high_precision_ends is {ends!r}: expected how many blocks stay in high precision at each end, an integer"
            " of 0 or more, or (first, last)"
        )
    return pair


def end_reasons(
    model: nn.Module, layers: Iterable[tuple[str, nn.Module]], free: Iterable[str], ends: Ends
) -> dict[str, list[str]]:
    """Of the layers at the ends of a model, by name, why they stay in high precision.

    Args:
        model: the model.
        layers: its linear layers with their names, each once.
        free: names of those that could be converted.
        ends: (first, last).

    Raises:
        ValueError: nothing is left between the ends.
    """
    could = set(free)
    if ends == NO_ENDS or not could:
        return {}
    reasons: dict[str, list[str]] = {}
    held = _Layers(model, layers)
    # A list that two modules share is one stack.
    stacks = list(dict.fromkeys(_stacks(model, held)))
    stacks = stacks or [_Stack(tuple((name,) for name in held.within(model) if name in could | held.others), _LAYERS)]
    for stack in stacks:
        for name, positions in _positions(stack).items():
            reason = _reason(stack, positions, ends)
            if reason:
                reasons.setdefault(name, [reason])
    counted = {name for stack in stacks for block in stack.blocks for name in block}
    if counted <= reasons.keys():
        what = " and ".join(f"the {len(stack.blocks)} {stack.unit}" for stack in stacks)
        shared = any(len(places) > 1 for stack in stacks for places in _positions(stack).values())
        note = " (one that stands in several places counts in each)" if shared else ""
        raise ValueError(
            f"high_precision_ends is {ends}: that is all of {what}{note}, and nothing would be left for FP8. Leave one"
            " or more between the ends, or the whole model as it is"
        )
    return reasons


def _positions(stack: _Stack) -> dict[str, list[int]]:
    """Where each layer stands, by its name."""
    found: dict[str, list[int]] = {}
    for position, block in enumerate(stack.blocks):
        for name in block:
            found.setdefault(name, []).append(position)
    return found


def _reason(stack: _Stack, positions: list[int], ends: Ends) -> str:
    """Why a layer that stands at some positions of a stack stays in high precision; empty if none is at an end."""
    number = len(stack.blocks)
    at_ends = [position for position in positions if position < ends[0] or position >= number - ends[1]]
    if not at_ends:
        return ""
    what = "layer" if stack.unit is _LAYERS else "block"
    also = " and ".join(str(position + 1) for position in positions if position != at_ends[0])
    return (
        f"high_precision_ends={ends}: {what} {at_ends[0] + 1} of the {number} {stack.unit.removeprefix('blocks ')}"
        f"{f', shared with {what} {also}' if also else ''}"
    )


class _Layers:
    """The linear layers of a model, by the modules that hold them, wherever those stand.

    Args:
        model: the model.
        layers: with their names, each once; those that a `CountedLayer` was made of come beside them.

    Attributes:
        others: names of these.
    """

    def __init__(self, model: nn.Module, layers: Iterable[tuple[str, nn.Module]]) -> None:
        self._names = {id(layer): (name,) for name, layer in layers}
        self._modules: dict[int, str] = {}
        self.others: set[str] = set()
        for name, module in model.named_modules():
            self._modules[id(module)] = name
            if isinstance(module, CountedLayer):
                self._names[id(module)] = tuple(name + part for part in module.counted_parts())
                self.others.update(self._names[id(module)])

    def name(self, module: nn.Module) -> str:
        """Of a module of the model; where it stands in several places, the first."""
        return self._modules[id(module)]

    def within(self, module: nn.Module) -> tuple[str, ...]:
        """Names of the layers that a module is or holds."""
        return tuple(name for one in module.modules() for name in self._names.get(id(one), ()))

    def are_held(self, module: nn.Module) -> bool:
        """True if a module holds one, not counting what it is itself."""
        return any(name != self.name(module) for name in self.within(module))


def _stacks(module: nn.Module, layers: _Layers, least: int = 2) -> Iterator[_Stack]:
    """The outermost stacks of a module, of `least` different blocks or more."""
    entries = _entries(module, layers)
    if len({id(entry) for entry in entries}) < least:
        for child in module.children():
            yield from _stacks(child, layers, least)
        return
    where = layers.name(module) or "the model"
    own = [layers.within(entry) for entry in entries]
    inner = [list(_stacks(entry, layers, 1)) for entry in entries]
    if any(stacks and not _outside(names, stacks) for names, stacks in zip(own, inner, strict=True)):
        # Stages: what they hold beside their blocks belongs to no block.
        groups = [stacks or [_Stack((names,), "")] for names, stacks in zip(own, inner, strict=True)]
        blocks = tuple(block for group in groups for stack in group for block in stack.blocks)
        yield _Stack(blocks, f"blocks in the stages of {where}")
        return
    yield _Stack(tuple(own), f"blocks of {where}")


def _entries(module: nn.Module, layers: _Layers) -> list[nn.Module]:
    """The entries of a list that may be blocks: those that hold linear layers and are none themselves."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    # `named_children` would give an entry that stands in several places once.
    children: list[nn.Module | None] = list(module._modules.values())
    held = [child for child in children if child is not None and layers.are_held(child)]
    if isinstance(module, nn.Sequential) and held:
        [(kind, _)] = Counter(_class_before(child) for child in held).most_common(1)
        held = [child for child in held if _class_before(child) is kind]
    return held


def _class_before(module: nn.Module) -> type[nn.Module]:
    """The class of a module before it was fused, or made a layer for serving."""
    if isinstance(module, CountedLayer):
        return module.counted_class
    return module.fused_from if isinstance(module, JoinedMLP) else type(module)


def _outside(names: tuple[str, ...], stacks: list[_Stack]) -> set[str]:
    """The layers of a block that lie in none of its own stacks."""
    return set(names) - {name for stack in stacks for block in stack.blocks for name in block}
