"""The targets of a bench as a table of those that were judged, and a line a section of those that were not."""

from __future__ import annotations

import re

from octavo.report.record import Record, Row, text
from octavo.report.tables import Cell, Column, Table
from octavo.report.wording import ABSENT

VERDICT_TONES = {"pass": "good", "miss": "bad"}
JUDGED = ("pass", "miss", "reported")
_NOT_ASKED = re.compile(r"^.* (was not asked for in this run)$")
_ELSEWHERE = "other"


def targets_table(record: Record) -> Table:
    """Every target that was measured, with its verdict; below, a line a section of the others."""
    rows = []
    for row in record.all("target"):
        verdict = text(row, "verdict")
        if verdict in JUDGED:
            cells = [Cell(text(row, key) or ABSENT) for key in ("what", "target", "measured")]
            tone = VERDICT_TONES.get(verdict, "muted")
            rows.append([*cells, Cell(verdict, tone), Cell(text(row, "reason") or ABSENT, "muted")])
    columns = [Column(title, numeric=False) for title in ("What", "Target", "Measured", "Verdict", "Why, how")]
    return Table("Targets", columns, rows, [f"Not measured: {line}" for line in unmeasured(record)])


def unmeasured(record: Record) -> list[str]:
    """A line a section: how many of its targets were not measured, and why, each reason with its number."""
    sections: dict[str, list[Row]] = {}
    for row in record.all("target"):
        if text(row, "verdict") not in JUDGED:
            sections.setdefault(text(row, "section") or _ELSEWHERE, []).append(row)
    return [f"{name}, {len(rows)}: {_reasons(rows)}" for name, rows in sections.items()]


def _reasons(rows: list[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        reason = _NOT_ASKED.sub(r"\1", text(row, "reason")).removeprefix("was ") or "no reason is given"
        counts[reason] = counts.get(reason, 0) + 1
    if len(counts) == 1:
        return next(iter(counts))
    return "; ".join(f"{reason} ({count})" for reason, count in counts.items())
