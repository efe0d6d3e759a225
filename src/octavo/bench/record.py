"""The record of a bench: JSON lines, one measurement a row, whole after every row, so that a stop loses nothing."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def clean(value: Any) -> Any:
    """The value as JSON knows it: non-finite floats become None, tuples lists; TypeError for what it cannot hold."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"a record cannot hold {type(value).__name__}: {value!r}")


class BenchRecord:
    """The rows in memory and in a file, which is replaced as a whole with each row."""

    def __init__(self, path: Path) -> None:
        """Begin an empty record at `path`; its folder is made."""
        self.path = path
        self.rows: list[Row] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def append(self, row: Row) -> None:
        """Add a row; the file has it when this returns."""
        if "kind" not in row:
            raise ValueError(f"a row without kind: {row}")
        self.rows.append(clean(row))
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)

    def replace(self, rows: list[Row]) -> None:
        """Other rows instead of all there are; the file has them with the next row that is added."""
        self.rows = [clean(row) for row in rows]

    def of_kind(self, kind: str) -> list[Row]:
        """All rows of one kind, in order."""
        return [row for row in self.rows if row["kind"] == kind]
