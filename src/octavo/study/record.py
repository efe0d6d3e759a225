"""The record of a run: JSON lines, one object a row, each with its `kind`.

Rows of a phase are collected and appended together when the phase ends, so the file holds whole phases only and a
resumed run knows what is done from the `phase` rows. NaN and infinities become null: JSON has neither.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from octavo.study.atomic import replacing

Row = dict[str, Any]


def clean(value: Any) -> Any:
    """The value as JSON knows it: non-finite floats become None, tuples lists, everything else stays or raises."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"a record cannot hold {type(value).__name__}: {value!r}")


class Record:
    """The rows of a run in memory and in `record.jsonl`."""

    def __init__(self, path: Path) -> None:
        """Read the rows that are there; a file that does not exist is an empty record."""
        self.path = path
        self.rows: list[Row] = read_rows(path) if path.exists() else []

    def append(self, rows: list[Row]) -> None:
        """Add the rows of one phase; either all of them are in the file afterwards or none."""
        cleaned = [clean(row) for row in rows]
        for row in cleaned:
            if "kind" not in row:
                raise ValueError(f"a row without kind: {row}")
        self.rows.extend(cleaned)
        with replacing(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for row in self.rows:
                file.write(json.dumps(row, allow_nan=False) + "\n")

    def of_kind(self, kind: str) -> list[Row]:
        """All rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]

    def finished(self, phase: str) -> bool:
        """Whether the phase has ended."""
        return any(row["name"] == phase for row in self.of_kind("phase"))


def read_rows(path: Path) -> list[Row]:
    """Read a record. Raises ValueError naming the line that is no JSON object with a `kind`."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is no JSON ({error.msg}); the file was changed or cut") from error
        if not isinstance(row, dict) or "kind" not in row:
            raise ValueError(f"{path}, line {number} is no row of a record: it has no kind")
        rows.append(row)
    return rows
