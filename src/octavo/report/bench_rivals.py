"""How rivals of a bench are named and coloured, and who is the best peer of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.report.methods import method
from octavo.report.record import Row, number, text
from octavo.report.wording import enumeration

PEERS = ("te", "torchao")
_LIBRARIES = {"torch": "", "octavo": "Octavo", "te": "TE", "torchao": "torchao"}
_PLAIN = {
    "gemms": "three FP8 products alone",
    "gemms-rowwise": "three row-wise products alone",
    "copy": "copy",
    "copy again": "copy, again",
}
_RECIPES = {
    "rowwise": "row-wise",
    "tensorwise": "tensor-wise",
    "tensor_static": "tensor, static",
    "tensor_dynamic": "tensor, dynamic",
}
_MODES = {
    "again": "again",
    "composed": "of torch's parts",
    "cached": "weight cached",
    "converted": "converted, not frozen",
    "context": "in autocast",
    "head": "its head too",
    "lean": "inputs made again",
    "linears": "linear layers alone",
    "compiled": "compiled",
    "reduced": "compiled to reduce overhead",
    "whole": "compiled as a whole",
    "graphed": "graphed",
    "captured": "step captured",
    "kernels": "by its kernels",
}
_COMPILED = ("compiled", "reduced", "whole")
_MODELS = {
    "vit": "ViT-Huge",
    "llama": "Llama-3-8B's widths, 8 layers",
    "gpt2": "GPT-2 small",
    "vit-layers": "ViT-Huge of TransformerLayers",
}


@dataclass(frozen=True)
class Look:
    """A rival's name for people, and its colour."""

    label: str
    color: str


def look(key: str) -> Look:
    """The look of a rival's key, such as "octavo-delayed-compiled", "bf16" or "te-block"."""
    if key in _PLAIN:
        return Look(_PLAIN[key], "@yellow" if key.startswith("gemms") else "@ink")
    first, *rest = key.split("-")
    modes = [_MODES[part] for part in rest if part in _MODES]
    recipe = " ".join(_RECIPES.get(part, part) for part in rest if part not in _MODES)
    if first in ("bf16", "fp16"):
        name, color = first.upper(), "@ink"
    elif first in _LIBRARIES:
        name = f"{_LIBRARIES[first]} {recipe}".strip()
        color = {"te": "@grey", "torchao": "@orange"}.get(first) or method(recipe.replace("row-wise", "rowwise")).color
    else:
        name, color = key, "@grey"
    return Look(", ".join([name, *modes]), color)


def measured(rows: Iterable[Row], key: str) -> list[Row]:
    """The rows that have a figure under `key`."""
    return [row for row in rows if number(row, key) is not None]


def best_peer(rows: Iterable[Row], key: str, least: bool = True) -> Row | None:
    """Among rows of one comparison, that of the peer with the smallest (or largest) figure; None without one."""
    peers = [row for row in measured(rows, key) if text(row, "library") in PEERS]
    chosen = min if least else max
    return chosen(peers, key=lambda row: number(row, key) or 0.0) if peers else None


def shape_name(row: Row) -> str:
    """The shape of a row, as in "8192 × 1280 × 5120"; empty without one."""
    shape = row.get("shape")
    return " × ".join(str(extent) for extent in shape) if isinstance(shape, list) else ""


def grouped(rows: Iterable[Row], *, by: str = "") -> dict[str, list[Row]]:
    """Rows by their shape, or by the text of a field, in the order of the record."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(text(row, by) if by else shape_name(row), []).append(row)
    return groups


def said_beside(rows: Iterable[Row], key: str) -> list[str]:
    """What the rows that were measured say beside their figures under `key`, each rival with its name."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if text(row, "status") != "failed" and text(row, key):
            found.setdefault(text(row, key), []).append(look(text(row, "rival")).label)
    return [f"{enumeration(list(dict.fromkeys(labels)))}: {said}" for said, labels in found.items()]


def compiled_before(rows: Iterable[Row], row: Row) -> str | None:
    """Why the warm-up of a compiled step does not tell what compiling costs; None where it does, or nothing compiles.

    What one variant has compiled the compiler finds again: on its disk, whatever the next one is launched by. Of a step
    that is recorded as CUDA graphs the compiler works before its first steps.
    """
    modes = [part for part in text(row, "rival").split("-") if part in _COMPILED]
    if not modes:
        return None
    if text(row, "graph"):
        return "it was compiled before its first steps, while its graphs were recorded"
    for other in rows:
        if other is row:
            return None
        same = text(other, "model") == text(row, "model") and _blocks(other) == _blocks(row)
        if (
            same
            and text(other, "status") == "measured"
            and any(f"-{mode}" in text(other, "rival") for mode in _COMPILED)
        ):
            return f"{text(other, 'rival')} had compiled the same blocks before"
    return None


def _blocks(row: Row) -> list[str]:
    """A rival without how it is compiled and launched: what its blocks are."""
    return [part for part in text(row, "rival").split("-") if part not in (*_COMPILED, "graphed", "captured")]


def model_name(key: str) -> str:
    """A model's name for people."""
    return _MODELS.get(key, key)
