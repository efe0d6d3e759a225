"""The rows of a study, sorted by kind, read with care.

A record may be partial (a study that was interrupted), so every accessor has an answer for what is not there:
``None`` for a number, ``""`` for a text, an empty list for a kind. Nothing here raises on a missing field.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class Record:
    """Rows by kind. ``skipped`` counts what is no row: not a mapping, or without a ``kind``."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._by_kind: dict[str, list[Row]] = {}
        self.skipped = 0
        for row in rows:
            if isinstance(row, Mapping) and isinstance(row.get("kind"), str):
                self._by_kind.setdefault(row["kind"], []).append(row)
            else:
                self.skipped += 1

    def all(self, kind: str) -> list[Row]:
        """Every row of ``kind``, in the order of the record."""
        return self._by_kind.get(kind, [])

    def last(self, kind: str) -> Row:
        """The newest row of ``kind``, or an empty mapping."""
        rows = self.all(kind)
        return rows[-1] if rows else {}

    def methods(self, kind: str) -> list[str]:
        """The methods that rows of ``kind`` name, each once, in the order of the record."""
        return list(dict.fromkeys(name for row in self.all(kind) if (name := text(row, "method"))))


def number(row: Row, key: str) -> float | None:
    """``row[key]`` as a finite float; None when it is absent, null, not a number, inf or NaN."""
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def text(row: Row, key: str) -> str:
    """``row[key]`` as text; empty when absent or null."""
    value = row.get(key)
    return "" if value is None else str(value)


def read_jsonl(path: Path) -> tuple[list[Row], int]:
    """The rows of a JSONL file, and how many lines were no JSON object (an interrupted write leaves half a line).

    Raises FileNotFoundError when there is no such file, ValueError when it holds no row at all.
    """
    rows: list[Row] = []
    broken = 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            broken += 1
    if not rows:
        raise ValueError(f"{path} holds no row; give the record.jsonl that octavo wrote into the folder of --out")
    return rows, broken
