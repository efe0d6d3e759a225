"""The report for the terminal: the answer in words, then the two tables that carry it, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.report.extras import require
from octavo.report.headline import BAD, GOOD, WITHOUT, emulation_banner, missing, sentences
from octavo.report.record import Record
from octavo.report.tables import Cell, Table, claims_table, finetune_table, ptq_table

_STYLE = {"good": "green", "bad": "red", "muted": "dim", "": ""}
_MARK = {GOOD: ("\u2713", "green"), BAD: ("\u2717", "red"), WITHOUT: ("\u00b7", "dim")}


def _cell(text_type: Any, cell: Cell) -> Any:
    return text_type(cell.text, style=_STYLE.get(cell.tone, ""))


def _table(table: Table, kept: list[int]) -> Any:
    """``table`` with the columns ``kept``, the rest being left to the page."""
    rich_table = require("rich.table", "the terminal summary")
    rich_text = require("rich.text", "the terminal summary")
    shown = rich_table.Table(title=rich_text.Text(table.caption, style="bold"), title_justify="left")
    for index in kept:
        column = table.columns[index]
        heading = f"{column.title}\n{column.unit}" if column.unit else column.title
        shown.add_column(rich_text.Text(heading), justify="right" if column.numeric else "left")
    for row in table.rows:
        shown.add_row(*(_cell(rich_text.Text, row[index]) for index in kept))
    return shown


def summary(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A rich renderable: ``rich.print(summary(rows))``.

    Holds the answer in words, what is missing, the table without training, the table of fine-tuning and the claims.
    Raises ModuleNotFoundError that names the extra when rich is absent.
    """
    group = require("rich.console", "the terminal summary").Group
    text_type = require("rich.text", "the terminal summary").Text
    record = Record(rows)
    parts: list[Any] = []
    for sentence in sentences(record):
        mark, style = _MARK.get(sentence.tone, ("\u2022", ""))
        parts.append(text_type.assemble((f"{mark} ", style), sentence.text))
    if banner := emulation_banner(record):
        parts.append(text_type(f"! {banner}", style="yellow"))
    if lacking := missing(record):
        parts.append(text_type(f"Not in this record: {'; '.join(lacking)}.", style="dim"))
    for table, kept in (
        (ptq_table(record), [0, 1, 2, 3, 4, 7, 8, 9]),
        (finetune_table(record), [0, 2, 3, 5, 8, 9, 10]),
        (claims_table(record), [0, 1, 3]),
    ):
        if table.rows:
            parts.append(text_type(""))
            parts.append(_table(table, kept))
            parts += [text_type(note, style="dim") for note in table.notes[:2]]
    return group(*parts)
