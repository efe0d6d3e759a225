from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli import explain_missing
from octavo.cli.app import app
from octavo.cli.console import parse_duration
from octavo.study import PHASES, StudyInterrupted
from octavo.study.settings import PRESETS
from tests.study.conftest import MICRO, write_texts

run = CliRunner()


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setitem(PRESETS, "micro", MICRO)
    texts = write_texts(tmp_path / "texts")
    return ["study", "--preset", "micro", "--data", str(texts), "--out", str(tmp_path / "run")]


def test_json_is_the_summary_and_nothing_else(base: list[str], tmp_path: Path) -> None:
    result = run.invoke(app, [*base, "--methods", "rowwise", "--steps", "3", "--finetune-steps", "1", "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [row["method"] for row in summary["ptq"]] == ["bf16", "rowwise"]
    # No terminal, no bars: one plain line when a phase starts and one when it ends, with its seconds.
    lines = result.stderr.splitlines()
    assert lines[::2] == [f"octavo study: {name} started" for name in PHASES]
    for name, line in zip(PHASES, lines[1::2], strict=True):
        assert re.match(rf"octavo study: {name} done in \d+\.\d s", line)


def test_the_summary_for_people_names_the_files(base: list[str], tmp_path: Path) -> None:
    result = run.invoke(app, [*base, "--methods", "rowwise", "--steps", "2", "--finetune-steps", "1"])
    assert result.exit_code == 0, result.output
    assert f"report: {tmp_path / 'run' / 'report.html'}" in result.stdout
    assert "FP8 row-wise" in result.stdout


def test_a_dry_run_makes_nothing(base: list[str], tmp_path: Path) -> None:
    result = run.invoke(app, [*base, "--dry-run", "--json", "--time-limit", "8m"])
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert (plan["steps"], plan["finetune_steps"], plan["time_limit_s"]) == (6, 2, 480.0)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry", [["--dry-run"], []])
def test_a_folder_that_cannot_be_written_is_refused_by_a_dry_run_too(
    base: list[str], tmp_path: Path, dry: list[str]
) -> None:
    (tmp_path / "file").write_text("")
    result = run.invoke(app, [*base[:-1], str(tmp_path / "file" / "run"), *dry])
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr
    assert (tmp_path / "file").read_text() == ""


def test_after_a_refusal_the_corrected_command_works_in_the_same_folder(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "small.txt").write_text("too small\n")
    quick = ["--methods", "rowwise", "--steps", "1", "--finetune-steps", "1", "--json"]
    refused = run.invoke(app, [*base, *quick, "--data", str(tmp_path / "small.txt")])
    assert refused.exit_code == 1
    assert "too little to train on" in refused.stderr
    assert not (tmp_path / "run").exists()
    assert run.invoke(app, [*base, *quick]).exit_code == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--data", "no/where"], "no such file or folder"),
        (["--time-limit", "soon"], "'soon' is no duration"),
        (["--steps", "3", "--epochs", "2"], "exclude each other"),
        (["--methods", "fp7"], "'fp7' is unknown"),
        (["--device", "tpu"], "device 'tpu' is unknown; choose cpu, cuda, or cuda:N"),
        (["--resume"], "holds no run to resume"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_reason(base: list[str], extra: list[str], message: str) -> None:
    result = run.invoke(app, [*base, *extra])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_an_interruption_is_130_with_the_command_that_goes_on(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise StudyInterrupted

    monkeypatch.setattr("octavo.cli.study.run_study", interrupted)
    result = run.invoke(app, base)
    assert result.exit_code == 130
    assert f"octavo study --resume --out {tmp_path / 'run'}" in result.stderr


def test_resuming_with_other_settings_is_refused_and_with_the_same_goes_on(base: list[str]) -> None:
    quick = ["--methods", "rowwise", "--steps", "2", "--finetune-steps", "1"]
    assert run.invoke(app, [*base, *quick]).exit_code == 0
    refused = run.invoke(app, [*base, "--resume", "--seed", "3"])
    assert refused.exit_code == 2
    assert "seed was 0, now 3" in refused.stderr
    assert run.invoke(app, ["study", "--out", base[-1], "--resume", "--json"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("8m", 480), ("1h30m", 5400), ("1.5h", 5400), ("2min", 120)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "8x", "-"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)


def test_help_shows_an_example_and_the_exit_codes() -> None:
    text = run.invoke(app, ["study", "--help"]).stdout
    assert "octavo study --preset gpt2 --time-limit 8m" in text
    assert "130 interrupted" in " ".join(text.split())


def test_a_missing_library_names_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    explain_missing(ModuleNotFoundError("no", name="typer"))
    assert "pip install octavo[study]" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        explain_missing(ModuleNotFoundError("no", name="something.else"))


def test_the_module_runs_as_a_program_without_the_study_extra() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\nfrom octavo.cli import main\nsys.argv = ['octavo', 'doctor']\nmain()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert "needs typer" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_study_as_a_library_names_its_extra_too() -> None:
    code = "import sys; sys.modules['tokenizers'] = None\nimport octavo.study"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "octavo.study needs tokenizers, which is not installed: pip install octavo[study]" in result.stderr
