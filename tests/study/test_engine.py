from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.study import (
    PHASES,
    DataError,
    PreflightError,
    Stop,
    StudyInterrupted,
    StudySettings,
    planned,
    preflight,
    run_study,
    stored_settings,
)
from octavo.study.settings import PRESETS
from tests.study.conftest import MICRO, write_texts

FP8 = {"tensor_static", "tensor_dynamic", "rowwise", "block128", "mxfp8"}
# What the report may rely on, by kind.
FIELDS = {
    "run": "octavo_version python torch triton device device_name cpu_count native_fp8 command date seed preset "
    "time_limit_s git_commit",
    "data": "name source documents bytes sha256 tokens vocab_size",
    "model": "preset parameters layers width heads context vocab_size",
    "train_step": "phase method seed step loss lr grad_norm tokens_per_s",
    "validation": "phase method seed step loss perplexity",
    "ptq": "method label weights activations perplexity accuracy loss weight_bytes model_bytes load_s ttft_s "
    "prefill_tokens_per_s decode_tokens_per_s execution seed note",
    "layer_error": "method layer weight_sqnr_db input_sqnr_db output_sqnr_db input_amax underflow saturation",
    "finetune": "method seed steps perplexity perplexity_bf16_serving loss accuracy steps_per_s peak_memory_bytes "
    "execution served_as",
    "scale_history": "method seed step layer operand amax scale",
    "claim": "claim source claimed measured held why",
    "format": "name bits max smallest_normal smallest_subnormal eps",
    "cast_example": "value fp32 bf16 e4m3 e5m2",
    "phase": "name seconds status note",
}
TIMES = {
    "tokens_per_s",
    "steps_per_s",
    "load_s",
    "ttft_s",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "seconds",
    "date",
    "source",
    "git_commit",
}


class StopAfter:
    def __init__(self, stop: Stop, advances: int) -> None:
        self.stop, self.left = stop, advances

    def started(self, name: str) -> None: ...

    def phase(self, name: str, total: int, unit: str) -> None: ...

    def advance(self, amount: int, text: str) -> None:
        self.left -= 1
        self.stop.requested = self.stop.requested or self.left == 0

    def finished(self, name: str, seconds: float) -> None: ...


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What does not depend on the clock, nor on where the text lies."""
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "micro", MICRO)
        settings = StudySettings(out=folder / "run", preset="micro", data=str(write_texts(folder / "texts")))
        return run_study(settings)


def test_a_whole_study_records_what_the_report_relies_on(uninterrupted: list[dict[str, Any]], folder: Path) -> None:
    rows = uninterrupted
    kinds = {row["kind"] for row in rows}
    assert kinds == set(FIELDS)
    for row in rows:
        assert set(FIELDS[row["kind"]].split()) <= set(row), row
    ptq = {row["method"]: row for row in rows if row["kind"] == "ptq"}
    assert set(ptq) == {"bf16", "int8", "int4"} | FP8
    assert all(ptq[key]["execution"] == "emulated" for key in FP8)
    # Linear weights: half of the 16-bit ones and some scales; four bits and an fp16 scale and offset in 128.
    linear = 2 * 12 * 32 * 32
    assert ptq["bf16"]["weight_bytes"] == 2 * linear
    assert linear < ptq["rowwise"]["weight_bytes"] < 1.2 * linear
    tuned = {row["method"]: row for row in rows if row["kind"] == "finetune"}
    assert set(tuned) == {"bf16", "delayed", "current", "rowwise"}
    # Three products of each of 8 layers, and none in 16 bits.
    assert {key: row["fp8_gemms_per_step"] for key, row in tuned.items()} == {
        "bf16": 0,
        "delayed": 24,
        "current": 24,
        "rowwise": 24,
    }
    watched = {(row["method"], row["operand"]) for row in rows if row["kind"] == "scale_history"}
    assert watched == {(m, o) for m in ("delayed", "current", "rowwise") for o in ("input", "weight", "grad_output")}
    assert [row["name"] for row in rows if row["kind"] == "phase"] == list(PHASES)
    assert (folder / "run" / "report.html").stat().st_size > 10_000
    assert json.loads((folder / "run" / "summary.json").read_text())["ptq"][0]["method"] == "bf16"


@pytest.mark.parametrize("advances", [2, 7, 12, 21])  # in each of the phases that stop
def test_stopped_anywhere_and_resumed_the_record_is_the_uninterrupted_one(
    micro_settings: StudySettings, uninterrupted: list[dict[str, Any]], advances: int
) -> None:
    stop = Stop()
    with pytest.raises(StudyInterrupted):
        run_study(micro_settings, progress=StopAfter(stop, advances), stop=stop)
    rows = run_study(micro_settings, resume=True)
    assert timeless(rows) == timeless(uninterrupted)


def test_the_same_seed_gives_the_same_figures_and_another_does_not(
    micro_settings: StudySettings, tmp_path: Path
) -> None:
    quick = dataclasses.replace(micro_settings, methods=("rowwise",), steps=3, finetune_steps=1)

    def losses(name: str, seed: int) -> list[float]:
        rows = run_study(dataclasses.replace(quick, out=tmp_path / name, seed=seed))
        return [row["loss"] for row in rows if row["kind"] == "train_step"]

    first = losses("a", 0)
    assert first == losses("b", 0)
    assert first != losses("c", 1)


def test_a_time_limit_shrinks_phases_and_each_says_so(
    micro_settings: StudySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PRESETS, "micro", dataclasses.replace(PRESETS["micro"], steps=100_000, finetune_steps=50_000))
    rows = run_study(dataclasses.replace(micro_settings, time_limit_s=5.0))
    adjusted = {(row["phase"], row["what"]): row for row in rows if row["kind"] == "adjustment"}
    for key, wanted in {("baseline", "steps"): 100_000, ("finetune", "steps"): 50_000}.items():
        assert adjusted[key]["wanted"] == wanted
        assert 1 <= adjusted[key]["used"] < wanted
        assert "time limit" in adjusted[key]["why"]
    status = {row["name"]: row["status"] for row in rows if row["kind"] == "phase"}
    assert status["baseline"] == status["finetune"] == "shrunk"
    steps = [row["step"] for row in rows if row["kind"] == "train_step" and row["phase"] == "baseline"]
    assert len(steps) == adjusted["baseline", "steps"]["used"]


def test_fp16_is_a_baseline_too(micro_settings: StudySettings) -> None:
    settings = dataclasses.replace(micro_settings, dtype="fp16", methods=("rowwise",), steps=3, finetune_steps=1)
    rows = run_study(settings)
    assert [row["method"] for row in rows if row["kind"] == "ptq"] == ["fp16", "rowwise"]
    assert {row["method"] for row in rows if row["kind"] == "finetune"} == {"fp16", "delayed", "current", "rowwise"}


class TestPreflight:
    def test_a_run_of_another_version(self, micro_settings: StudySettings) -> None:
        micro_settings.out.mkdir()
        (micro_settings.out / "settings.json").write_text('{"preset": "micro", "colour": "blue"}')
        with pytest.raises(ValueError, match=r"begun by another version of Octavo \(its settings differ in colour, "):
            run_study(micro_settings, resume=True)

    def test_a_folder_that_holds_a_run(self, micro_settings: StudySettings) -> None:
        micro_settings.out.mkdir()
        (micro_settings.out / "record.jsonl").write_text('{"kind": "run"}\n')
        with pytest.raises(PreflightError, match=r"already holds a run.*--resume"):
            run_study(micro_settings)

    def test_nothing_to_resume(self, micro_settings: StudySettings) -> None:
        with pytest.raises(PreflightError, match="holds no run to resume"):
            run_study(micro_settings, resume=True)

    def test_a_path_that_cannot_be_written(self, micro_settings: StudySettings, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(PreflightError, match="cannot be written"):
            preflight(dataclasses.replace(micro_settings, out=tmp_path / "file" / "run"), resume=False)

    def test_a_full_disk(self, micro_settings: StudySettings, monkeypatch: pytest.MonkeyPatch) -> None:
        full = shutil.disk_usage(".")._replace(free=1000)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
        with pytest.raises(PreflightError, match=r"has 0\.00 GB free; checkpoints of this study need about"):
            preflight(micro_settings, resume=False)

    def test_text_that_is_not_there(self, micro_settings: StudySettings) -> None:
        with pytest.raises(DataError, match="no such file or folder"):
            preflight(dataclasses.replace(micro_settings, data="nowhere"), resume=False)

    def test_a_gpu_that_is_not_there(
        self, micro_settings: StudySettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(PreflightError, match="torch finds no CUDA GPU"):
            run_study(dataclasses.replace(micro_settings, device="cuda", out=tmp_path / "new" / "run"))
        assert not (tmp_path / "new").exists()

    def test_a_gpu_beyond_the_last(self, micro_settings: StudySettings, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        with pytest.raises(PreflightError, match=r"'cuda:2' was asked for, but the last of 2 is cuda:1"):
            preflight(dataclasses.replace(micro_settings, device="cuda:2"), resume=False)

    def test_what_passes_makes_nothing(self, micro_settings: StudySettings) -> None:
        before = sorted(micro_settings.out.parent.iterdir())
        preflight(micro_settings, resume=False)
        assert sorted(micro_settings.out.parent.iterdir()) == before


def test_a_start_that_is_refused_leaves_no_folder_and_what_others_put_there(
    micro_settings: StudySettings, tmp_path: Path
) -> None:
    small = tmp_path / "small.txt"
    small.write_text("too small\n")
    refused = dataclasses.replace(micro_settings, data=str(small), out=tmp_path / "runs" / "first")
    with pytest.raises(DataError, match="too little to train on"):
        run_study(refused)
    assert not (tmp_path / "runs").exists()
    refused.out.mkdir(parents=True)
    (refused.out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="too little to train on"):
        run_study(refused)
    assert [path.name for path in refused.out.iterdir()] == ["notes.txt"]


def test_a_start_that_is_interrupted_can_be_resumed(micro_settings: StudySettings) -> None:
    stop = Stop()
    with pytest.raises(StudyInterrupted):
        run_study(micro_settings, progress=StopAfter(stop, 1), stop=stop)
    assert stored_settings(micro_settings.out, None, {}) == micro_settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "huge"}, "preset 'huge' is unknown; choose one of tiny, gpt2"),
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown; choose bf16 or fp16"),
        ({"device": "tpu"}, "device 'tpu' is unknown; choose cpu, cuda, or cuda:N"),
        ({"device": "cuda:"}, "device 'cuda:' is unknown; choose cpu, cuda, or cuda:N"),
        ({"device": "meta"}, "device 'meta' is unknown; choose cpu, cuda, or cuda:N"),
        ({"steps": 3, "epochs": 1.0}, "steps and epochs exclude each other"),
        ({"steps": 0}, "steps is 0; it must be greater than 0"),
        ({"seed": -1}, "seed is -1; it must be 0 or more"),
        ({"methods": ("fp7",)}, "method 'fp7' is unknown; choose among"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StudySettings(out=Path("x"), **changes)


@pytest.mark.parametrize(
    ("given", "finetune_steps"),
    [
        ({}, 100),
        ({"steps": 5}, 5),
        ({"steps": 500}, 100),
        ({"steps": 5, "finetune_steps": 20}, 20),
        ({"epochs": 1.0, "finetune_steps": 20}, 20),
    ],
)
def test_few_steps_are_few_of_fine_tuning_too(given: dict[str, Any], finetune_steps: int) -> None:
    settings = StudySettings(out=Path("x"), **given)
    assert settings.training.finetune_steps == planned(settings)["finetune_steps"] == finetune_steps


def test_a_short_epoch_bounds_fine_tuning_too(micro_settings: StudySettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "micro", dataclasses.replace(PRESETS["micro"], finetune_steps=50))
    rows = run_study(dataclasses.replace(micro_settings, epochs=0.05, methods=("rowwise",)))
    trained = sum(row["kind"] == "train_step" and row["phase"] == "baseline" for row in rows)
    assert trained < 10
    assert {row["steps"] for row in rows if row["kind"] == "finetune"} == {trained}


@pytest.mark.gpu
def test_on_a_gpu_fp8_runs_natively_and_memory_is_measured(micro_settings: StudySettings) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no FP8 units")
    rows = run_study(dataclasses.replace(micro_settings, device="cuda"))
    execution = {row["method"]: row["execution"] for row in rows if row["kind"] == "ptq"}
    assert {execution[key] for key in ("tensor_static", "tensor_dynamic", "rowwise", "int8")} == {"native"}
    assert {execution[key] for key in ("block128", "mxfp8")} == {"emulated"}
    tuned = [row for row in rows if row["kind"] == "finetune"]
    assert all(row["peak_memory_bytes"] > 0 for row in tuned)
    assert {row["execution"] for row in tuned} == {"high precision", "native"}
