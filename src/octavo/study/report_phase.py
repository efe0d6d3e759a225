"""Phase `report`: claims and format tables, then report.html and summary.json from the whole record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo import report
from octavo.study.atomic import write_json
from octavo.study.claims import claim_rows
from octavo.study.format_rows import cast_rows, format_rows
from octavo.study.record import Row, clean
from octavo.study.run import Run

REPORT, SUMMARY = "report.html", "summary.json"


def closing_rows(run: Run) -> list[Row]:
    """The rows that follow from the others: claims, formats, cast examples."""
    run.progress.phase("report", 1, "pages")
    return [*claim_rows(run.record.rows), *format_rows(), *cast_rows()]


def write_report(rows: Sequence[Row], folder: Path) -> None:
    """Write report.html and summary.json into `folder`."""
    report.build(list(rows), folder / REPORT)
    write_json(folder / SUMMARY, clean(summarise(rows, folder)))


def summarise(rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """The figures that a program wants, without curves: what `--json` prints."""

    def of_kind(kind: str) -> list[Row]:
        return [{key: value for key, value in row.items() if key != "kind"} for row in rows if row["kind"] == kind]

    def first(kind: str) -> Row | None:
        found = of_kind(kind)
        return found[0] if found else None

    return {
        "out": str(folder),
        "report": str(folder / REPORT),
        "record": str(folder / "record.jsonl"),
        "run": first("run"),
        "data": first("data"),
        "model": first("model"),
        "ptq": of_kind("ptq"),
        "finetune": of_kind("finetune"),
        "claims": of_kind("claim"),
        "adjustments": of_kind("adjustment"),
        "phases": of_kind("phase"),
    }
