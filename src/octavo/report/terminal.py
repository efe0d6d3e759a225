"""The report for the terminal: the answer in words, then the two tables that carry it, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.report.extras import require
from octavo.report.headline import BAD, GOOD, WITHOUT, emulation_banner, missing, sentences
from octavo.report.record import Record
from octavo.report.tables import Cell, Table, claims_table, finetune_table, ptq_table

_PTQ = [
    "Method",
    "Perplexity",
    "Change",
    "Weights Linear layers",
    "Decode tokens/s",
    "Execution",
]
_TUNED = [
    "Fine-tuned in",
    "Perplexity as served",
    "Gap to BF16 fine-tuned",
    "Recovered of that change",
    "Training steps/s",
    "Peak memory",
    "Execution",
]
_CLAIMS = ["Claim", "Claimed", "Measured here", "Verdict"]
_STYLE = {"good": "green", "bad": "red", "muted": "dim", "": ""}
_MARK = {GOOD: ("\u2713", "green"), BAD: ("\u2717", "red"), WITHOUT: ("\u00b7", "dim")}


def _cell(text_type: Any, cell: Cell) -> Any:
    return text_type(cell.text, style=_STYLE.get(cell.tone, ""))


def _table(table: Table, names: list[str]) -> Any:
    """``table`` with the columns of these names in their order, the rest being left to the page."""
    places = {column.name: index for index, column in enumerate(table.columns)}
    kept = [places[name] for name in names if name in places]
    rich_table = require("rich.table", "the terminal summary")
    rich_text = require("rich.text", "the terminal summary")
    box = require("rich.box", "the terminal summary").SIMPLE_HEAD
    title = rich_text.Text(table.caption, style="bold")
    shown = rich_table.Table(title=title, title_justify="left", box=box, padding=(0, 1, 0, 0))
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
    for table, names in (
        (ptq_table(record), _PTQ),
        (finetune_table(record), _TUNED),
        (claims_table(record), _CLAIMS),
    ):
        if table.rows:
            parts.append(text_type(""))
            parts.append(_table(table, names))
            parts += [text_type(note, style="dim") for note in table.notes[:2]]
    return group(*parts)
