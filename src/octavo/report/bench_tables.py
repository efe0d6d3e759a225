"""The tables of a bench: ceilings, casts, Linears, host time, steps. Page and terminal show the same."""

from __future__ import annotations

from octavo.report.bench_rivals import best_peer, compiled_before, grouped, look, measured, said_beside, shape_name
from octavo.report.record import Record, Row, number, text
from octavo.report.tables import Cell, Column, Table
from octavo.report.wording import (
    ABSENT,
    SPACE,
    decimals,
    enumeration,
    optional,
    percent,
    rate,
    ratio,
    significant,
    size,
)

_CEILINGS = {
    "copy": "copy, read and written",
    "bf16": "products in BF16",
    "fp8_tensor": "FP8 products, one scale a tensor",
    "fp8_row": "FP8 products, one scale a row",
    "fp8_block": "FP8 products, blocks of 1×128 and 128×128",
}
_OTHER_METHOD = "\u2020"


def ceilings_table(record: Record) -> Table:
    """The device's rates."""
    rows = []
    for row in record.all("ceiling"):
        name = Cell(_CEILINGS.get(text(row, "name"), text(row, "name")))
        shape = shape_name(row) if text(row, "name") != "copy" else _size(row)
        value = number(row, "per_s")
        shown = ABSENT if value is None else f"{significant(value / 1e12)}{SPACE}T{text(row, 'unit')}"
        rows.append([name, Cell(shape), Cell(shown), Cell(_spread(row, "ms")), _note(row)])
    columns = [Column("What", numeric=False), Column("Shape M × K × N"), Column("Rate"), *_TIMES, _NOTE]
    notes = ["The fastest is the ceiling; of copying, a copy beside a cast may be faster still."] if rows else []
    return _with_notes(Table("Ceilings of the device", columns, rows, notes))


def _size(row: Row) -> str:
    """What a copy read, in bytes."""
    shape = row.get("shape")
    return size(shape[0]) if isinstance(shape, list) and shape and isinstance(shape[0], int) else ABSENT


_TIMES = [Column("p10 – p90", "ms")]
_NOTE = Column("Note", numeric=False)


def casts_table(record: Record) -> Table:
    """Casts against copying."""
    rows = []
    for shape, group in grouped(record.all("cast")).items():
        for row in group:
            own = look(text(row, "name")) if text(row, "name").startswith("copy") else None
            rows.append(
                [
                    Cell(shape),
                    Cell(own.label if own else text(row, "name").replace("rowwise", "row-wise")),
                    Cell(_figure(row, "ms")),
                    Cell(_spread(row, "ms")),
                    Cell(optional(number(row, "per_s"), lambda value: significant(value / 1e12))),
                    Cell(_share(row, "of_copy")),
                    Cell(_share(row, "of_same_copy")),
                    _note(row),
                ]
            )
    columns = [
        Column("Shape"),
        Column("Cast", numeric=False),
        Column("Time", "ms"),
        *_TIMES,
        Column("Rate", "TB/s"),
        Column("Of copy"),
        Column("Of a copy of this"),
        _NOTE,
    ]
    note = (
        "Bytes: 4 an element (2 read, 1 + 1 written), 6 where an amax is measured first. Both layouts, with amax."
        " Of copy: of the ceiling, the fastest copy of the run. Of a copy of this: of the same matrix."
    )
    return _with_notes(Table("Casts", columns, rows, [note] if rows else []))


def linear_table(record: Record, shape: str) -> Table:
    """One Linear of one shape, forward and backward."""
    group = grouped(record.all("linear")).get(shape, [])
    reference = next((row for row in measured(group, "ms") if text(row, "rival") == "bf16"), None)
    peer = best_peer(group, "ms")
    rows = []
    for row in group:
        own, method = look(text(row, "rival")), text(row, "method")
        other = reference is not None and method != text(reference, "method") and bool(method)
        mark = f"{SPACE}{_OTHER_METHOD}" if other else ""
        target = number(row, "target_ms")
        value = number(row, "ms")
        reached = "" if target is None or value is None else "good" if value <= target else "bad"
        rows.append(
            [
                Cell(own.label, color=own.color),
                Cell(_figure(row, "ms") + (mark if value is not None else "")),
                Cell(_spread(row, "ms")),
                Cell(optional(number(row, "speedup"), ratio)),
                Cell(_against(row, peer, "ms")),
                Cell(optional(target, lambda ms: significant(ms)), reached),
                Cell(optional(number(row, "per_s"), lambda flops: decimals(flops / 1e12, 0))),
                Cell(_share(row, "of_peak")),
                _note(row),
            ]
        )
    columns = [
        Column("Linear", numeric=False),
        Column("Device time", "ms"),
        *_TIMES,
        Column("Speed", "BF16 = 1"),
        Column("Speed", "best peer = 1"),
        Column("Target", "ms"),
        Column("Rate", "TFLOP/s"),
        Column("Of ceiling"),
        _NOTE,
    ]
    notes = _noise(group, "bf16", "bf16-again", "The same twice")
    notes += ["BF16 = 1: the faster of both."] if notes else []
    notes += said_beside(group, "note")
    if any(_OTHER_METHOD in row[1].text for row in rows):
        notes.append(
            f"{_OTHER_METHOD} the sum of its kernels' times: it could not be captured. Gaps do not count there."
        )
    return _with_notes(Table(f"M × K × N = {shape}: forward and backward", columns, rows, notes))


def host_table(record: Record) -> Table:
    """Host time of a small Linear."""
    groups = grouped(record.all("host"), by="pass")
    by_pass = {which: {text(row, "rival"): row for row in group} for which, group in groups.items()}
    rows = []
    for rival in dict.fromkeys(text(row, "rival") for row in record.all("host")):
        own = look(rival)
        cells = [Cell(own.label, color=own.color)]
        for which in ("forward", "forward+backward"):
            row = by_pass.get(which, {}).get(rival, {})
            cells += [Cell(_figure(row, "us")), Cell(optional(number(row, "ratio"), ratio))]
        cells.append(_note(by_pass.get("", {}).get(rival, {})))
        rows.append(cells)
    columns = [
        Column("Linear", numeric=False),
        Column("Forward", "µs"),
        Column("Forward", "BF16 = 1"),
        Column("Forward and backward", "µs"),
        Column("Forward and backward", "BF16 = 1"),
        _NOTE,
    ]
    shape = next((shape_name(row) for row in record.all("host")), "")
    return _with_notes(Table(f"Host time, M × K × N = {shape}", columns, rows))


def steps_table(record: Record, model: str, kind: str = "step") -> Table:
    """Whole training steps of one model."""
    group = grouped(record.all(kind), by="model").get(model, [])
    peer = best_peer(group, "ms")
    reference = {mode: _figure_of(group, key, "ms") for mode, key in (("eager", "bf16"), ("compiled", "bf16-compiled"))}
    rows = []
    for row in group:
        own = look(text(row, "rival"))
        value = number(row, "ms")
        compared = [
            Cell(ABSENT if value is None or other is None else ratio(other / value)) for other in reference.values()
        ]
        layers = number(row, "converted")
        warm = None if compiled_before(group, row) else number(row, "warm_s")
        rows.append(
            [
                Cell(own.label + (" (at the end)" if row.get("repeat") is True else ""), color=own.color),
                Cell(text(row, "batch") or ABSENT),
                Cell(_figure(row, "ms")),
                Cell(_spread(row, "ms")),
                *compared,
                Cell(_against(row, peer, "ms")),
                Cell(_rate(row)),
                Cell(optional(number(row, "peak_gib"), lambda gib: decimals(gib, 2))),
                Cell(optional(layers, lambda count: decimals(count, 0))),
                Cell(optional(warm, lambda seconds: decimals(seconds, 1))),
                _note(row),
            ]
        )
    columns = [
        Column("Step", numeric=False),
        Column("Batch"),
        Column("Time", "ms"),
        *_TIMES,
        Column("Speed", "BF16 = 1"),
        Column("Speed", "BF16 compiled = 1"),
        Column("Speed", "best peer = 1"),
        Column("Rate"),
        Column("Peak memory", "GiB"),
        Column("FP8 layers"),
        Column("Warm-up", "s"),
        _NOTE,
    ]
    notes = [
        f"{look(text(first, 'rival')).label}, measured again at the end: {_drift(first, last)}."
        for last in measured(group, "ms")
        if last.get("repeat") is True
        for first in measured(group, "ms")[:-1]
        if text(first, "rival") == text(last, "rival") and first is not last
    ]
    notes += said_beside(group, "note") + _warm_notes(group)
    return _with_notes(Table(model, columns, rows, notes))


def layers_table(record: Record, shape: str) -> Table:
    """One TransformerLayer of one shape, forward and backward: by itself, then graphed."""
    group = grouped(record.all("layer")).get(shape, [])
    rows = []
    for row in group:
        own, graph = look(text(row, "rival")), text(row, "graph")
        alike = [other for other in measured(group, "ms") if text(other, "graph") == graph]
        plain = [number(other, "ms") or 0.0 for other in alike if text(other, "library") == "torch"]
        value = number(row, "ms")
        rows.append(
            [
                Cell(own.label, color=own.color),
                Cell(_figure(row, "ms")),
                Cell(_spread(row, "ms")),
                Cell(ratio(min(plain) / value) if plain and value else ABSENT),
                Cell(_against(row, best_peer(alike, "ms"), "ms")),
                Cell(optional(number(row, "host_us"), lambda us: significant(us / 1e3))),
                Cell(optional(number(row, "peak_gib"), lambda gib: decimals(gib, 2))),
                Cell(_rate(row)),
                _note(row),
            ]
        )
    columns = [
        Column("Layer", numeric=False),
        Column("Wall time", "ms"),
        *_TIMES,
        Column("Speed", "BF16 = 1"),
        Column("Speed", "best peer = 1"),
        Column("Host time", "ms"),
        Column("Peak memory", "GiB"),
        Column("Rate"),
        _NOTE,
    ]
    note = "BF16 = 1: the faster of Octavo's layer without FP8 and one of torch's parts, launched in the same way."
    caption = f"Sequence × batch × hidden × ffn × heads = {shape}: forward and backward"
    return _with_notes(Table(caption, columns, rows, [note, *said_beside(group, "note")] if rows else []))


def batch_table(record: Record) -> Table:
    """The largest batch under a limit of memory."""
    rows = []
    for row in record.all("batch_limit"):
        own = look(text(row, "rival"))
        rows.append(
            [
                Cell(own.label, color=own.color),
                Cell(optional(number(row, "limit_gib"), significant)),
                Cell(text(row, "batch") or ABSENT),
                Cell(optional(number(row, "peak_gib"), lambda gib: decimals(gib, 2))),
                Cell(_figure(row, "ms")),
                Cell(_rate(row)),
                _note(row),
            ]
        )
    columns = [
        Column("Step", numeric=False),
        Column("Limit", "GiB"),
        Column("Largest batch"),
        Column("Peak memory", "GiB"),
        Column("Time", "ms"),
        Column("Rate"),
        _NOTE,
    ]
    return _with_notes(Table("Largest batch in that memory", columns, rows))


def _with_notes(table: Table) -> Table:
    """Rows that hold nothing but a note become notes below, those of one reason together; empty columns go."""
    rows = []
    lacking: dict[str, list[str]] = {}
    for row in table.rows:
        note = row[-1].text
        if note and all(cell.text in ("", ABSENT) for cell in row[2:-1]):
            names = [cell.text for cell in row[:2] if cell.text not in ("", ABSENT)]
            lacking.setdefault(note, []).append(" ".join(names))
        else:
            rows.append(row)
    notes = [f"{enumeration(list(dict.fromkeys(names)))}: {note}" for note, names in lacking.items()]
    return _without_empty(Table(table.caption, table.columns, rows, [*table.notes, *notes]))


def _without_empty(table: Table) -> Table:
    """The table without columns in which nothing stands."""
    kept = [
        place
        for place in range(len(table.columns))
        if place == 0 or any(row[place].text not in ("", ABSENT) for row in table.rows)
    ]
    rows = [[row[place] for place in kept] for row in table.rows]
    return Table(table.caption, [table.columns[place] for place in kept], rows, table.notes)


def _figure(row: Row, key: str) -> str:
    return optional(number(row, key), significant)


def _figure_of(group: list[Row], rival: str, key: str) -> float | None:
    return next((number(row, key) for row in measured(group, key) if text(row, "rival") == rival), None)


def _change(first: Row, second: Row) -> str:
    """By how much a second measurement of the same thing differs."""
    before, after = number(first, "ms"), number(second, "ms")
    return ABSENT if not before or after is None else percent(100 * (after / before - 1), 1)


def _drift(first: Row, second: Row) -> str:
    """The same in words: the device was faster or slower then."""
    before, after = number(first, "ms") or 0.0, number(second, "ms") or 0.0
    change = 100 * (after / before - 1) if before else 0.0
    return f"{percent(abs(change), 1, signed=False)} {'slower' if change >= 0 else 'faster'} (drift)"


def _warm_notes(group: list[Row]) -> list[str]:
    """Why some steps have no warm-up."""
    reasons: dict[str, list[str]] = {}
    for row in measured(group, "warm_s"):
        if reason := compiled_before(group, row):
            again = " at the end" if row.get("repeat") is True else ""
            reasons.setdefault(reason, []).append(f"{look(text(row, 'rival')).label}{again}")
    return [f"Warm-up {ABSENT} of {enumeration(names)}: {reason}." for reason, names in reasons.items()]


def _noise(group: list[Row], one: str, other: str, words: str) -> list[str]:
    """A note on how far two measurements of the same thing are apart."""
    found = {text(row, "rival"): row for row in measured(group, "ms")}
    if one not in found or other not in found:
        return []
    return [f"{words}: {look(one).label} differs by {_change(found[one], found[other])}, which is noise."]


def _spread(row: Row, unit: str) -> str:
    low, high = number(row, f"{unit}_p10"), number(row, f"{unit}_p90")
    return ABSENT if low is None or high is None else f"{significant(low)} – {significant(high)}"


def _rate(row: Row) -> str:
    """Samples or tokens a second."""
    value = number(row, "per_s")
    return ABSENT if value is None else f"{rate(value)}{SPACE}{text(row, 'unit')}"


def _share(row: Row, key: str) -> str:
    return optional(number(row, key), lambda share: percent(100 * share, 0, signed=False))


def _against(row: Row, peer: Row | None, key: str) -> str:
    """How fast a row is beside the best peer, or a dash; only figures of one method are compared."""
    value, best = number(row, key), None if peer is None else number(peer, key)
    if value is None or best is None or peer is None or text(row, "method") != text(peer, "method"):
        return ABSENT
    return ratio(best / value)


def _note(row: Row) -> Cell:
    """Why there is no figure."""
    status, reason = text(row, "status"), text(row, "reason")
    return Cell(f"{status}: {reason}" if reason else "", "bad" if status == "failed" else "muted")
