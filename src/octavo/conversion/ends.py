"""`high_precision_ends`: the first and last blocks of a model, which lose most in FP8, stay in high precision.

A stack is an `nn.ModuleList`, or the entries of an `nn.Sequential` that are of its most frequent class, of which two or
more hold linear layers. Its entries are the blocks. Where an entry has linear layers in lists of its own and no others,
as a stage of Swin or ConvNeXt, the entries are stages, and the blocks of all of them are counted in one. The experts
within a block are no blocks. Several stacks side by side, an encoder and a decoder, have ends each.

A model without a stack has no blocks to count: there it is the linear layers that could be converted, in the order of
their definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

Ends = tuple[int, int]
NO_ENDS: Ends = (0, 0)
_LAYERS = "linear layers"


class _Stack(NamedTuple):
    """What is counted: names of blocks, or of layers, in their order; and what they are called."""

    blocks: tuple[str, ...]
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


def end_reasons(model: nn.Module, names: list[str], free: list[str], ends: Ends) -> dict[str, list[str]]:
    """Of the layers at the ends of a model, by name, why they stay in high precision.

    Args:
        model: the model.
        names: of its linear layers, in their order.
        free: of those that could be converted.
        ends: (first, last).

    Raises:
        ValueError: nothing is left between the ends.
    """
    if ends == NO_ENDS or not free:
        return {}
    reasons: dict[str, list[str]] = {}
    left = False
    stacks = list(_stacks(model, names)) or [_Stack(tuple(free), _LAYERS)]
    for stack in stacks:
        number = len(stack.blocks)
        left = left or sum(ends) < number
        what = "layer" if stack.unit is _LAYERS else "block"
        for position, block in enumerate(stack.blocks):
            if position < ends[0] or position >= number - ends[1]:
                of = stack.unit.removeprefix("blocks ")
                reason = f"high_precision_ends={ends}: {what} {position + 1} of the {number} {of}"
                reasons |= {name: [reason] for name in names if _is_within(name, block)}
    if not left:
        counted = " and ".join(f"the {len(stack.blocks)} {stack.unit}" for stack in stacks)
        raise ValueError(
            f"high_precision_ends is {ends}: that is all of {counted}, and nothing would be left for FP8. Leave one or"
            " more between the ends, or the whole model as it is"
        )
    return reasons


def _stacks(module: nn.Module, names: list[str], prefix: str = "", least: int = 2) -> Iterator[_Stack]:
    """The outermost stacks, of `least` blocks or more, of a module which lies at `prefix` in the model."""
    entries = _entries(module, prefix, names)
    if len(entries) < least:
        for name, child in module.named_children():
            if any(_is_within(one, prefix + name) for one in names):
                yield from _stacks(child, names, f"{prefix}{name}.", least)
        return
    where = prefix.removesuffix(".") or "the model"
    inner = [list(_stacks(entry, names, f"{name}.", 1)) for name, entry in entries.items()]
    own = [_outside(name, stacks, names) for (name, _), stacks in zip(entries.items(), inner, strict=True)]
    if any(stacks and not layers for stacks, layers in zip(inner, own, strict=True)):
        # Stages: what they hold beside their blocks belongs to no block.
        blocks = (
            stack.blocks if stacks else (name,)
            for (name, _), stacks in zip(entries.items(), inner, strict=True)
            for stack in stacks or [_Stack((name,), "")]
        )
        yield _Stack(tuple(block for group in blocks for block in group), f"blocks in the stages of {where}")
        return
    yield _Stack(tuple(entries), f"blocks of {where}")


def _entries(module: nn.Module, prefix: str, names: list[str]) -> dict[str, nn.Module]:
    """The entries of a list that may be blocks, by name: those that hold linear layers and are none themselves."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return {}
    held = {
        prefix + name: child
        for name, child in module.named_children()
        if any(one.startswith(f"{prefix}{name}.") for one in names)
    }
    if isinstance(module, nn.Sequential) and held:
        [(kind, _)] = Counter(type(child) for child in held.values()).most_common(1)
        held = {name: child for name, child in held.items() if type(child) is kind}
    return held


def _outside(block: str, stacks: list[_Stack], names: list[str]) -> list[str]:
    """The layers of a block that lie in none of its own stacks."""
    inner = [one for stack in stacks for one in stack.blocks]
    return [name for name in names if _is_within(name, block) and not any(_is_within(name, one) for one in inner)]


def _is_within(name: str, block: str) -> bool:
    return name == block or name.startswith(f"{block}.")
