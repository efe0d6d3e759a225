"""Records that exist: read, put together, and judged anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.bench.derived import restated
from octavo.bench.record import Row
from octavo.bench.settings import RECORD
from octavo.bench.targets import target_rows
from octavo.report.record import read_jsonl


def with_targets(rows: Sequence[Row]) -> list[Row]:
    """The rows and their targets, judged by today's rules."""
    measured = [row for row in rows if row["kind"] != "target"]
    return [*measured, *target_rows(measured)]


def joined_records(paths: Sequence[Path]) -> list[Row]:
    """The rows of records of one device, sections of different runs put together.

    A section comes from one record as a whole, so that no ratio spans two runs: from the last one that has it. Steps
    and served models are a section for each model, and so is each kind of ceiling. What follows from ceilings, shares
    and targets, is computed anew from those of the row's own record.

    Args:
        paths: of the files, or of the folders that they are in.

    Raises:
        ValueError: a file holds no run of a bench, or the records are of different devices.
    """
    records = [_read(path) for path in paths]
    devices = sorted({str(_run(rows).get("device_name")) for rows in records})
    if len(devices) > 1:
        raise ValueError(f"the records are of different devices, which are not compared: {', '.join(devices)}")
    chosen: dict[tuple[str, str], int] = {}
    for place, rows in enumerate(records):
        for row in rows:
            if _is_figure(row):
                chosen[_part(row)] = place
    joined = [_run(records[-1]) | {"runs": [_run(rows) for rows in records]}]
    for place, rows in enumerate(records):
        joined += [row for row in rows if _is_figure(row) and chosen[_part(row)] == place]
        joined += [row for row in rows if row["kind"] == "section"]
    return joined


def _read(path: Path) -> list[Row]:
    path = path / RECORD if path.is_dir() else path
    rows = [dict(row) for row in read_jsonl(path)[0] if isinstance(row.get("kind"), str)]
    if not any(row["kind"] == "run" for row in rows):
        raise ValueError(
            f"{path} holds no run of octavo bench: give the {RECORD} that it wrote into the folder of --out"
        )
    return restated(rows)


def _run(rows: list[Row]) -> Row:
    return next((row for row in rows if row["kind"] == "run"), {"kind": "run"})


def _is_figure(row: Row) -> bool:
    return row["kind"] not in ("run", "section", "target")


def _part(row: Row) -> tuple[str, str]:
    parted_by = {"step": "model", "inference": "model", "ceiling": "name"}.get(row["kind"])
    return row["kind"], str(row.get(parted_by)) if parted_by else ""
