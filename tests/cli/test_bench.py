from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from octavo.cli.bench import said_of
from tests.bench import rows as made

run = CliRunner()


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    return ["bench", "--device", "cpu", "--out", str(tmp_path / "run")]


def test_a_run_prints_tables_and_leaves_a_page_and_a_record(base: list[str], tmp_path: Path) -> None:
    result = run.invoke(app, [*base, "--only", "linear"])
    assert result.exit_code == 0, result.output
    assert "has no FP8 units" in result.stdout
    assert "Octavo delayed" in result.stdout
    assert f"record: {tmp_path / 'run' / 'record.jsonl'}" in result.stdout
    assert "<h1>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    line = next(line for line in result.stderr.splitlines() if "linear 256 x 128 x 256 octavo-delayed: " in line)
    assert "x bf16" not in line
    assert "target" not in line
    assert "octavo bench: linear done in " in result.stderr


def test_json_is_the_rows_and_nothing_else(base: list[str]) -> None:
    result = run.invoke(app, [*base, "--only", "host", "--json", "--commit", "abc", "--seed", "3"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert (rows[0]["kind"], rows[0]["git_commit"], rows[0]["seed"]) == ("run", "abc", 3)
    assert {row["kind"] for row in rows} == {"run", "host", "section", "target"}


def test_without_plotly_the_record_is_kept_and_the_page_is_left_out_with_a_message(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(*args: object) -> None:
        raise ModuleNotFoundError("the bench's page needs plotly, which is not installed", name="plotly")

    monkeypatch.setattr("octavo.cli.bench.build_bench", absent)
    result = run.invoke(app, [*base, "--only", "host"])
    assert result.exit_code == 0, result.output
    record = tmp_path / "run" / "record.jsonl"
    line = f"octavo bench: no page: needs plotly, pip install octavo[study]; then octavo bench --from {record}\n"
    assert line in result.stderr
    assert "page:" not in result.stdout
    assert (tmp_path / "run" / "record.jsonl").exists()


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_record_of_another_machine_becomes_tables_and_a_page(tmp_path: Path) -> None:
    record = write(tmp_path / "record.jsonl", made.whole())
    result = run.invoke(app, ["bench", "--from", record, "--out", str(tmp_path / "page")])
    assert result.exit_code == 0, result.output
    assert "Targets: " in result.stdout
    assert (tmp_path / "page" / "report.html").exists()
    assert not (tmp_path / "page" / "record.jsonl").exists()


def test_verdicts_that_a_record_holds_are_judged_anew(tmp_path: Path) -> None:
    what = "ViT-Huge step, batch 32, peak memory"
    stale = {"kind": "target", "what": what, "target": "≤ 0.80x BF16 compiled", "verdict": "miss", "measured": "9.9"}
    record = write(tmp_path / "record.jsonl", [*made.whole(), stale])
    result = run.invoke(app, ["bench", "--from", record, "--out", str(tmp_path / "page"), "--json"])
    judged = [row for row in json.loads(result.stdout) if row.get("what") == what]
    assert [(row["verdict"], row["measured"]) for row in judged] == [("pass", "0.750 (15.00 of 20.00 GiB)")]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--only", "kernels"], "--only names 'kernels', which is unknown"),
        (["--models", "bert"], "--models names 'bert', which is unknown"),
        (["--variants", "fp8"], "--variants names 'fp8', which is unknown"),
        (["--time-limit", "soon"], "'soon' is no duration"),
        (["--device", "tpu"], "device 'tpu' is unknown"),
        (["--from", "nowhere.jsonl"], "--device chooses what is measured, and --from measures nothing"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_reason(base: list[str], extra: list[str], message: str) -> None:
    result = run.invoke(app, [*base, *extra])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_record_that_exists_is_not_replaced(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    record = Path(write(tmp_path / "run" / "record.jsonl", made.whole()))
    before = record.read_bytes()
    result = run.invoke(app, base)
    assert result.exit_code == 2
    assert "record.jsonl exists and would be replaced" in result.stderr
    assert record.read_bytes() == before


@pytest.mark.parametrize(
    "extra",
    [["--only", "steps"], ["--models", "vit"], ["--variants", "bf16"], ["--quick"], ["--time-limit", "8m"],
     ["--seed", "0"], ["--memory-limit", "20"], ["--commit", "abc"]],
)  # fmt: skip
def test_from_refuses_what_it_would_not_heed(extra: list[str], tmp_path: Path) -> None:
    record = write(tmp_path / "record.jsonl", made.whole())
    result = run.invoke(app, ["bench", "--from", record, "--out", str(tmp_path / "page"), *extra])
    assert result.exit_code == 2
    assert f"{extra[0]} chooses what is measured, and --from measures nothing: leave one out" in result.stderr
    assert not (tmp_path / "page").exists()


def test_from_names_the_record_that_is_not_there_and_the_remedy() -> None:
    result = run.invoke(app, ["bench", "--from", "nope.jsonl"])
    assert result.exit_code == 2
    assert "--from nope.jsonl: no such record; give the record.jsonl that octavo bench wrote, or its" in result.stderr


@pytest.mark.parametrize("held", ["record.jsonl", "report.html"])
def test_from_replaces_nothing_of_another_run(held: str, tmp_path: Path) -> None:
    given, folder = write(tmp_path / "given.jsonl", made.whole()), tmp_path / "other"
    folder.mkdir()
    (folder / held).write_text("kept")
    result = run.invoke(app, ["bench", "--from", given, "--out", str(folder)])
    assert result.exit_code == 2
    assert f"{held} exists and is of another run: move it, or choose another --out" in result.stderr
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [(held, "kept")]


def test_a_run_s_own_folder_gets_its_page_again(tmp_path: Path) -> None:
    write(tmp_path / "record.jsonl", made.whole())
    (tmp_path / "report.html").write_text("old")
    assert run.invoke(app, ["bench", "--from", str(tmp_path), "--out", str(tmp_path)]).exit_code == 0
    assert "<h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_from_takes_a_folder_and_refuses_what_holds_no_bench(tmp_path: Path) -> None:
    write(tmp_path / "record.jsonl", made.whole())
    page = ["--out", str(tmp_path / "pages")]
    assert run.invoke(app, ["bench", "--from", str(tmp_path), *page]).exit_code == 0
    result = run.invoke(app, ["bench", "--from", write(tmp_path / "other.jsonl", [{"a": 1}])])
    assert result.exit_code == 2
    assert "other.jsonl holds no run of octavo bench" in result.stderr


def test_an_interruption_is_130_and_says_where_the_record_is(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.bench.run_bench", interrupted)
    result = run.invoke(app, base)
    assert result.exit_code == 130
    assert str(tmp_path / "run" / "record.jsonl") in result.stderr


def test_a_section_that_failed_is_exit_code_1(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failed = made.section("host") | {"status": "failed", "reason": "out of memory"}
    monkeypatch.setattr("octavo.cli.bench.run_bench", lambda *args, **kwargs: [made.run(), failed])
    Path(base[-1]).mkdir()
    assert run.invoke(app, base).exit_code == 1


def test_help_shows_an_example_and_the_exit_codes() -> None:
    text = " ".join(run.invoke(app, ["bench", "--help"]).stdout.split())
    assert "octavo bench --time-limit 8m" in text
    assert "130 interrupted" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (made.linear("bf16", 8.0), "linear 8192 x 768 x 3072 bf16: 8 ms, 1x bf16"),
        (made.linear("te-block", None), "linear 8192 x 768 x 3072 te-block failed: RuntimeError: no kernel image"),
        (made.step("bf16", 104.0), "step vit bf16: 104 ms, 20 GiB"),
        (made.host("bf16", 190.0, 1.0), "host 256 x 1024 x 1024 bf16 forward+backward: 190 us, 1x bf16"),
        (made.cast("delayed", 0.9), "cast 16384 x 8192 delayed: 0.1 ms, 90 % of a copy of this"),
        (made.whole()[1], "ceiling 1073741824 copy: 4 TB/s"),
        (made.section("casts"), "casts done in 12.5 s"),
        (made.run(), ""),
    ],
)
def test_a_line_for_every_row_that_is_measured(row: dict[str, Any], said: str) -> None:
    assert said_of(row) == said


def test_a_pipe_gets_every_column_and_name_whole(tmp_path: Path) -> None:
    record = write(tmp_path / "record.jsonl", made.whole())
    command = ["bench", "--from", record, "--out"]
    whole = run.invoke(app, [*command, str(tmp_path / "a")], env={"COLUMNS": ""}).stdout
    name, spread = "Octavo delayed, compiled, step captured", "60.0 – 60.0"
    assert any(name in line and spread in line for line in whole.splitlines())
    narrow = run.invoke(app, [*command, str(tmp_path / "b")], env={"COLUMNS": "80"}).stdout
    assert "60.0 – 60.0" not in narrow
    assert "for want of width" in narrow
    assert "…" not in whole + narrow
