"""Which card the advice is for, and how far its figures can be trusted."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from octavo.bench.advice.error import AdviceError
from octavo.conversion.card import CARDS, GIB, Card
from octavo.conversion.gain import METHODS, Method
from octavo.recipes import OperandName


class ChosenCard(NamedTuple):
    """A card, and what the reader should know of the choice."""

    card: Card
    remark: str


def card_named(name: str, memory_gib: float | None = None) -> ChosenCard:
    """The card called `name`; "auto" takes this machine's, or an H200 in its place, and says so.

    Args:
        name: h200, h100 or auto, in any case.
        memory_gib: in place of the card's own.

    Raises:
        AdviceError: no model of such a card, or memory that is none.
    """
    if memory_gib is not None and not 0 < memory_gib < 1e6:
        raise AdviceError(f"--memory {memory_gib:g}: give the card's memory in GiB, such as 80")
    key = name.strip().lower()
    if key == "auto":
        chosen = _present()
    elif key in CARDS:
        chosen = ChosenCard(CARDS[key], CARDS[key].source)
    else:
        raise AdviceError(
            f"--device {name!r} is unknown: there is a model of {', '.join(CARDS)}; auto takes this machine's card."
            " FP8 is native from Ada and Hopper on; any other card emulates it, and only loses time"
        )
    if memory_gib is None:
        return chosen
    return ChosenCard(replace(chosen.card, memory_gib=memory_gib), chosen.remark)


def methods_named(names: str | None, saved_weight: str = "fp8") -> list[Method]:
    """The scalings of `a,b`; all of them for None.

    Args:
        names: by comma.
        saved_weight: as of a recipe: "high_precision" casts weights again in the backward.

    Raises:
        AdviceError: other names, or another `saved_weight`.
    """
    if saved_weight not in ("fp8", "high_precision"):
        raise AdviceError(f"--saved-weight {saved_weight!r} is unknown: there are fp8, high_precision")
    wanted = list(METHODS) if names is None else [one.strip().lower() for one in names.split(",") if one.strip()]
    for one in wanted:
        if one not in METHODS:
            raise AdviceError(f"--recipe names {one!r}, which is unknown: there are {', '.join(METHODS)}")
    if not wanted:
        raise AdviceError(f"--recipe {names!r} names none: there are {', '.join(METHODS)}")
    twice: tuple[OperandName, ...] = ("weight",) if saved_weight == "high_precision" else ()
    return [replace(METHODS[one], twice=twice) for one in dict.fromkeys(wanted)]


def _present() -> ChosenCard:
    h200 = CARDS["h200"]
    if not torch.cuda.is_available():
        return ChosenCard(h200, f"no GPU here: the advice is for an H200 ({h200.source})")
    name = torch.cuda.get_device_name()
    memory = round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)
    if torch.cuda.get_device_capability() < (8, 9):
        raise AdviceError(
            f"{name} has no FP8 units: FP8 is emulated there and only loses time; --device h200 asks of one"
        )
    for key, card in CARDS.items():
        if key in name.lower():
            return ChosenCard(replace(card, memory_gib=memory), card.source)
    remark = f"{name} is not known: rates are an H200's, a yardstick at most; `octavo bench --only linear` measures"
    return ChosenCard(replace(h200, name=f"{name} (as an H200)", memory_gib=memory), remark)
