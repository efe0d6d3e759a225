"""Tables of a bench where FP8 is emulated: wall times alone, since no ratio, share or target says anything there."""

from __future__ import annotations

from octavo.report.tables import Column, Table

_TITLES = {"Target", "Of ceiling", "Of copy", "Of a copy of this", "Floor"}
_UNITS = {"BF16 = 1", "BF16 compiled = 1", "best peer = 1", "TB/s", "TFLOP/s"}
_NOTES = ("BF16 = 1", "Bytes: ", "Floor: ", "The same twice")


def as_emulated(table: Table) -> Table:
    """The table without what compares, and without the notes about it; device time is called the wall time it is."""
    kept = [
        place for place, column in enumerate(table.columns) if column.title not in _TITLES and column.unit not in _UNITS
    ]
    columns = [_walled(table.columns[place]) for place in kept]
    rows = [[row[place] for place in kept] for row in table.rows]
    notes = [note for note in table.notes if not note.startswith(_NOTES)]
    return Table(table.caption, columns, rows, notes)


def _walled(column: Column) -> Column:
    return Column("Wall time", column.unit, column.numeric) if column.title == "Device time" else column
