from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.deadline import Deadline
from octavo.bench.record import BenchRecord


def test_the_file_is_whole_after_every_row_and_holds_no_nan(tmp_path: Path) -> None:
    record = BenchRecord(tmp_path / "new" / "record.jsonl")
    record.append({"kind": "a", "value": float("nan"), "shape": (1, 2)})
    first = record.path.read_text()
    record.append({"kind": "b", "value": 1.5})
    lines = record.path.read_text().splitlines()
    assert json.loads(first) == {"kind": "a", "value": None, "shape": [1, 2]}
    assert [json.loads(line)["kind"] for line in lines] == ["a", "b"]
    assert [file.name for file in record.path.parent.iterdir()] == ["record.jsonl"]


def test_a_write_that_fails_leaves_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = BenchRecord(tmp_path / "record.jsonl")
    record.append({"kind": "a"})

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        record.append({"kind": "b"})
    assert [file.name for file in tmp_path.iterdir()] == ["record.jsonl"]
    assert json.loads(record.path.read_text()) == {"kind": "a"}


def test_a_row_without_kind_or_with_what_json_lacks_is_refused(tmp_path: Path) -> None:
    record = BenchRecord(tmp_path / "record.jsonl")
    with pytest.raises(ValueError, match="a row without kind"):
        record.append({"value": 1})
    with pytest.raises(TypeError, match="cannot hold object"):
        record.append({"kind": "a", "value": object()})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_section_gets_its_share_and_leaves_the_rest_to_the_later_ones() -> None:
    clock = Clock()
    deadline = Deadline(60.0, clock)
    deadline.begin(1.0, [2.0])
    assert deadline.left() == pytest.approx(20.0)
    assert deadline.allows(19.0)
    assert not deadline.allows(21.0)
    clock.now += 5.0  # a third of the time was allowed, a twelfth was used
    deadline.end()
    deadline.begin(2.0, [])
    assert deadline.left() == pytest.approx(55.0)
    deadline.begin(1.0, [1.0])  # parts of a part
    assert deadline.left() == pytest.approx(27.5)
    deadline.end()
    clock.now += 60.0
    assert not deadline.allows()
    assert deadline.elapsed == pytest.approx(65.0)


def test_without_a_limit_everything_is_allowed() -> None:
    deadline = Deadline(None)
    deadline.begin(1.0, [1.0])
    assert deadline.left() is None
    assert deadline.allows(1e9)
    deadline.end()
