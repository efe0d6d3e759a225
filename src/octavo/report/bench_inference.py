"""The tables of served models: one a model and phase, in all of its forms."""

from __future__ import annotations

from octavo.report.bench_rivals import grouped, look, measured, model_name
from octavo.report.bench_tables import _figure as figure
from octavo.report.bench_tables import _noise as noise
from octavo.report.bench_tables import _note as note
from octavo.report.bench_tables import _rate as rate_words
from octavo.report.bench_tables import _spread as spread
from octavo.report.bench_tables import _with_notes as with_notes
from octavo.report.record import Record, Row, number, text
from octavo.report.tables import Cell, Column, Table
from octavo.report.wording import ABSENT, SPACE, decimals, optional, ratio, significant, size

_PHASES = {
    "prefill": "prefill",
    "decode": "decoding, a step",
    "first token": "time to the first token",
    "loading": "loading from a file to the device",
    "": "not measured",
}
_COLUMNS = [
    Column("Form"),
    Column("Served by", numeric=False),
    Column("Time", "ms"),
    Column("p10 – p90", "ms"),
    Column("Speed", "BF16 = 1"),
    Column("Rate"),
    Column("Floor", "ms"),
    Column("Model"),
    Column("Peak memory", "GiB"),
    Column("FP8 layers"),
    Column("Note", numeric=False),
]


def inference_tables(record: Record, small: str = "") -> list[Table]:
    """A table for each model and phase; `small` is added to the caption where models are in a small form."""
    tables = []
    for model, of_model in grouped(record.all("inference"), by="model").items():
        for phase, group in grouped(of_model, by="phase").items():
            tables.append(_table(f"{model_name(model)}{small}: {_PHASES.get(phase, phase)}", group))
    return tables


def _table(caption: str, group: list[Row]) -> Table:
    rows = [_cells(row) for row in group]
    notes = []
    for form, alike in _by_form(group).items():
        notes += noise(alike, "bf16", "bf16-again", f"The same twice, {form}")
    if any(number(row, "floor_ms") is not None for row in group):
        notes.append(
            "Floor: products, attention, casts and the head alone, or the bytes that a step reads, at this run's"
            " ceilings; norms, activations and launches come on top."
        )
    return with_notes(Table(caption, _COLUMNS, rows, notes))


def _by_form(group: list[Row]) -> dict[str, list[Row]]:
    forms: dict[str, list[Row]] = {}
    for row in measured(group, "ms"):
        forms.setdefault(_form(row).replace(SPACE, " "), []).append(row)
    return forms


def _form(row: Row) -> str:
    """How many sequences of how many tokens, and how it is launched."""
    batch, tokens = text(row, "batch"), text(row, "tokens")
    if text(row, "phase") == "loading":
        return "a file"
    if not text(row, "phase"):
        return ABSENT if text(row, "rival") else "the model"
    sized = f"{batch} after {tokens}" if text(row, "phase") == "decode" else f"{batch} × {tokens}"
    return f"{sized}, {'replayed' if text(row, 'graph') else 'eager'}"


def _cells(row: Row) -> list[Cell]:
    own = look(text(row, "rival")) if text(row, "rival") else None
    value, layers = number(row, "weight_bytes"), number(row, "converted")
    words = rate_words(row)
    if text(row, "unit") == "B/s":
        words = optional(number(row, "per_s"), lambda rate: f"{significant(rate / 1e9)}{SPACE}GB/s")
    return [
        Cell(_form(row)),
        Cell(own.label, color=own.color) if own else Cell(ABSENT),
        Cell(figure(row, "ms")),
        Cell(spread(row, "ms")),
        Cell(optional(number(row, "speedup"), ratio)),
        Cell(words),
        Cell(optional(number(row, "floor_ms"), significant)),
        Cell(optional(value, size)),
        Cell(optional(number(row, "peak_gib"), lambda gib: decimals(gib, 2))),
        Cell(optional(layers, lambda count: decimals(count, 0)) if layers else ABSENT),
        note(row),
    ]
