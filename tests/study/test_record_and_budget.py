from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.study.atomic import replacing, write_json
from octavo.study.budget import TimeBudget, TrainingCost, fit, fit_training
from octavo.study.record import Record, read_rows


def test_rows_come_back_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    record.append([{"kind": "a", "x": float("nan"), "y": [1, float("inf")], "z": {"t": (1, 2)}}])
    record.append([{"kind": "phase", "name": "data"}])
    again = Record(tmp_path / "record.jsonl")
    assert again.rows == [
        {"kind": "a", "x": None, "y": [1, None], "z": {"t": [1, 2]}},
        {"kind": "phase", "name": "data"},
    ]
    assert again.finished("data")
    assert not again.finished("ptq")
    text = (tmp_path / "record.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_a_phase_that_fails_to_write_leaves_the_old_record(tmp_path: Path) -> None:
    record = Record(tmp_path / "record.jsonl")
    record.append([{"kind": "a"}])
    with pytest.raises(TypeError, match="cannot hold object"):
        record.append([{"kind": "b"}, {"kind": "c", "x": object()}])
    with pytest.raises(ValueError, match="a row without kind"):
        record.append([{"x": 1}])
    assert read_rows(tmp_path / "record.jsonl") == [{"kind": "a"}]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": ')
    with pytest.raises(ValueError, match=r"record\.jsonl, line 2 is no JSON"):
        Record(path)


def test_a_file_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    write_json(path, {"a": 1})

    def cut_short() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        cut_short()
    assert json.loads(path.read_text()) == {"a": 1}
    assert [item.name for item in tmp_path.iterdir()] == ["f.json"]


def test_the_time_left_is_shared_by_weight_and_what_is_unused_goes_on() -> None:
    now = [0.0]
    budget = TimeBudget(109.0, clock=lambda: now[0])  # the weights add up to 109
    assert budget.seconds_for("data") == pytest.approx(10)
    assert budget.seconds_for("baseline") == pytest.approx(109 * 40 / 99)
    now[0] = 50.0
    assert budget.seconds_for("ptq") == pytest.approx(59 * 25 / 59)
    now[0] = 200.0
    assert budget.seconds_for("finetune") == 0.0
    assert TimeBudget(None).seconds_for("ptq") is None


def test_what_does_not_fit_shrinks_and_says_so() -> None:
    assert fit(10, 1.0, None, phase="p", what="steps") == (10, [])
    assert fit(10, 1.0, 10.0, phase="p", what="steps") == (10, [])
    used, rows = fit(10, 1.0, 4.5, phase="p", what="steps")
    assert used == 4
    assert rows == [
        {
            "kind": "adjustment",
            "phase": "p",
            "what": "steps",
            "wanted": 10,
            "used": 4,
            "why": "1 s each, 4 s left for them by the time limit",
        }
    ]
    assert fit(10, 1.0, 0.0, phase="p", what="steps")[0] == 1


def test_training_gives_up_validations_before_steps() -> None:
    cost = TrainingCost(step_s=1.0, validation_s=5.0, closing_s=10.0)
    assert fit_training(20, 4, cost, None, "p") == ([20, 4], [])
    assert fit_training(20, 4, cost, 50.0, "p") == ([20, 4], [])
    (steps, validations), rows = fit_training(20, 4, cost, 40.0, "p")  # 30 s: 7.5 for validations, one; 25 steps fit
    assert (steps, validations) == (20, 1)
    assert [(row["what"], row["used"]) for row in rows] == [("validations", 1)]
    (steps, validations), rows = fit_training(20, 4, cost, 22.0, "p")
    assert (steps, validations) == (7, 1)
    assert [row["what"] for row in rows] == ["validations", "steps"]
    assert fit_training(20, 4, cost, 0.0, "p")[0] == [1, 1]
