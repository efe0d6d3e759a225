"""A bench for the terminal: its tables in the look of the study's, as rich renderables, and the targets as a list.

The targets' sentences are too long for columns: each is a line with its verdict and, below, what was measured; of those
that were not measured a line a section says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.report.bench_fitting import fitted
from octavo.report.bench_sections import bench_sections, emulated_words, time_words, verdict_words
from octavo.report.bench_targets import JUDGED, VERDICT_TONES, unmeasured
from octavo.report.extras import require
from octavo.report.record import Record, text
from octavo.report.terminal import _STYLE as STYLE

_FOR = "the terminal summary"
# Of one width, so that what follows begins in one column.
_MARKS = {"pass": "\u2713 pass", "miss": "\u2717 miss", "reported": "\u00b7 told"}


def bench_summary(rows: Iterable[Mapping[str, Any]], width: int | None = None) -> Any:
    """A rich renderable of every table, the targets last, where a terminal's reader looks first.

    Tables fit `width` letters by leaving columns out, and are as wide as their content for None.
    Raises ModuleNotFoundError that names the extra when rich is absent.
    """
    group = require("rich.console", _FOR).Group
    text_type = require("rich.text", _FOR).Text
    record = Record(rows)
    parts: list[Any] = []
    if words := emulated_words(record):
        parts.append(text_type(f"! {words}", style="yellow"))
    # Without the targets, which are a list below, and the machine's, which the page alone shows.
    for section in bench_sections(record)[1:-1]:
        for table in section.tables:
            parts.append(text_type(""))
            if table.rows:
                shown, said = fitted(table, width)
                parts += [shown, *(text_type(words, style="dim") for words in said)]
            else:
                parts.append(text_type(table.caption, style="bold"))
            parts += [text_type(note, style="dim") for note in table.notes]
    if not emulated_words(record) and record.all("target"):
        parts += [text_type(""), text_type("Targets", style="bold"), _judged(record), text_type("")]
        if lines := unmeasured(record):
            parts += [text_type("Not measured here (--json names each)", style="bold"), *map(text_type, lines)]
            parts.append(text_type(""))
    if words := time_words(record):
        parts.append(text_type(words, style="dim"))
    if not emulated_words(record):
        parts.append(text_type(verdict_words(record)))
    return group(*parts)


def _judged(record: Record) -> Any:
    """A target a row: its verdict and what was asked, and below what was measured."""
    text_type = require("rich.text", _FOR).Text
    grid = _grid(2)
    for row in record.all("target"):
        verdict = text(row, "verdict")
        if verdict in JUDGED:
            asked = f"{text(row, 'what')}: {text(row, 'target')}"
            found = "; ".join(part for part in (text(row, "measured"), text(row, "reason")) if part)
            style = STYLE.get(VERDICT_TONES.get(verdict, "muted"), "")
            about = text_type.assemble(asked, "\n", (found, "dim"))
            grid.add_row(text_type(_MARKS[verdict], style=style), about)
    return grid


def _grid(columns: int) -> Any:
    """A table without lines whose last column wraps."""
    grid = require("rich.table", _FOR).Table.grid(padding=(0, 1, 0, 1))
    for place in range(columns):
        grid.add_column(no_wrap=place < columns - 1)
    return grid
