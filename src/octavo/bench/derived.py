"""Figures of a row that follow from other rows of its record: shares of ceilings, speed beside bf16, targets.

They are taken when a row is measured, and again when its record is complete or read, since a ceiling is a maximum: a
faster copy that comes later raises it. Only rows of one run are given here, so that no ratio spans two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from octavo.bench.roofline import Ceilings, ceilings_of, linear_bytes, linear_floor_s, linear_flops
from octavo.bench.serving_floors import floor_s
from octavo.conversion.gain import expected_gain

Row = dict[str, Any]
# How often a recipe reads its operands.
READS = {"delayed": 1, "current": 2, "rowwise": 2}


def restated(rows: Iterable[Row]) -> list[Row]:
    """The rows of one run, what follows from its ceilings computed anew from all of them.

    Rows without a ceiling to compare with stay as they are, and so do those that lack what it is compared with.
    """
    rows = list(rows)
    ceilings = ceilings_of(rows)
    times = {
        (tuple(row["shape"]), row["rival"], row.get("method")): float(row["ms"]) for row in rows if _is_linear(row)
    }
    served = {served_form(row): float(row["ms"]) for row in rows if _is_served(row) and row["rival"] == "bf16"}
    found = []
    for row in rows:
        if row["kind"] == "cast" and row.get("per_s") and ceilings.copy is not None:
            found.append(row | {"of_copy": row["per_s"] / ceilings.copy})
        elif _is_linear(row):
            found.append(row | linear_figures(row, ceilings, _beside(times, row)))
        elif _is_served(row):
            found.append(row | served_figures(row, ceilings, served.get(served_form(row))))
        else:
            found.append(row)
    return found


def _is_linear(row: Row) -> bool:
    """A Linear that was measured, and says of which shape it is and whose."""
    needed = ("shape", "rival", "library", "ms")
    return row["kind"] == "linear" and row.get("status") == "measured" and all(row.get(key) for key in needed)


def _is_served(row: Row) -> bool:
    """A figure of a served model that was measured."""
    return row["kind"] == "inference" and row.get("status") == "measured" and bool(row.get("ms"))


def served_form(row: Row) -> tuple[Any, ...]:
    """What figures of served models are compared within: a model, a phase and how it is run and timed."""
    return tuple(row.get(key) for key in ("model", "phase", "batch", "tokens", "graph", "method"))


def served_figures(row: Row, ceilings: Ceilings, reference: float | None) -> Row:
    """What follows for an `inference` row: its speed beside bf16, and its floor.

    Args:
        row: with ms, and what `octavo.bench.serving_floors` gave.
        ceilings: of its run.
        reference: ms of bf16 in the same form, or None.
    """
    figures: Row = {} if reference is None else {"speedup": reference / row["ms"]}
    if (floor := floor_s(row, ceilings)) is not None:
        figures["floor_ms"] = floor * 1e3
    return figures


def _beside(times: dict[tuple[tuple[int, ...], str, Any], float], row: Row) -> Callable[[str], float | None]:
    """ms of a rival at the row's shape, by the row's method, under its own name or that of its twin."""
    shape, method = tuple(row["shape"]), row.get("method")
    return lambda rival: times.get((shape, rival, method), times.get((shape, f"{rival}-kernels", method)))


def linear_figures(row: Row, ceilings: Ceilings, beside: Callable[[str], float | None]) -> Row:
    """What follows for a `linear` row.

    Args:
        row: with shape, rival, library, recipe and ms.
        ceilings: of its run.
        beside: ms of another rival of the same shape and method, or None.
    """
    name, library, recipe = str(row["rival"]), row["library"], row.get("recipe") or ""
    m, k, n = row["shape"]
    seconds = row["ms"] / 1e3
    figures: Row = {}
    # BF16 is measured twice: it is compared with at its best.
    references = [time for time in (beside("bf16"), beside("bf16-again")) if time is not None]
    if references:
        figures["speedup"] = min(references) / row["ms"]
    kind = _products_of(name, library, recipe)
    flops, moved = linear_flops(m, k, n), linear_bytes(m, k, n, operand_bytes=2 if kind == "bf16" else 1)
    figures |= {"flops": flops, "per_s": flops / seconds, "bytes": moved}
    if (peak := ceilings.of_products(kind)) is not None:
        figures["of_peak"] = flops / seconds / peak
    if ceilings.copy is not None:
        figures["of_copy"] = moved / seconds / ceilings.copy
    if library != "octavo":
        return figures
    card, gemms = ceilings.card(), beside("gemms")
    figures["model_speedup"] = None if card is None else expected_gain(k, n, m, card)
    if recipe in READS and gemms is not None and ceilings.copy is not None:
        floor = linear_floor_s(
            gemms / 1e3, (m, k, n), ceilings.copy, reads=READS[recipe], weight_cached="-cached" in name
        )
        figures["target_ms"] = floor * 1e3
    return figures


def _products_of(name: str, library: str, recipe: str) -> str:
    """Which ceiling a rival's products have."""
    if library == "torch" and not name.startswith("gemms"):
        return "bf16"
    scaling = name if library == "torch" else recipe
    if "rowwise" in scaling:
        return "row"
    return "block" if "block" in scaling else "tensor"
