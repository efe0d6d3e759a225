"""A bench for the terminal: its tables in the look of the study's, as rich renderables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.report.bench_sections import bench_sections, emulated_words, verdict_words
from octavo.report.extras import require
from octavo.report.record import Record
from octavo.report.terminal import _table as rich_table


def bench_summary(rows: Iterable[Mapping[str, Any]]) -> Any:
    """A rich renderable of every table, the targets last, where a terminal's reader looks first.

    Raises ModuleNotFoundError that names the extra when rich is absent.
    """
    group = require("rich.console", "the terminal summary").Group
    text_type = require("rich.text", "the terminal summary").Text
    record = Record(rows)
    parts: list[Any] = []
    if words := emulated_words(record):
        parts.append(text_type(f"! {words}", style="yellow"))
    first, *others = bench_sections(record)
    shown = others[:-1]  # without the machine's, which the page alone shows
    if not emulated_words(record):
        shown.append(first)
    for section in shown:
        for table in section.tables:
            parts.append(text_type(""))
            if table.rows:
                parts.append(rich_table(table, [column.name for column in table.columns]))
            else:
                parts.append(text_type(table.caption, style="bold"))
            parts += [text_type(note, style="dim") for note in table.notes]
    parts.append(text_type(verdict_words(record)))
    return group(*parts)
