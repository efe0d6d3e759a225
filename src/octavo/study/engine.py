"""The study itself: phases in order, each recorded when it ends and skipped when a resumed run has it already.

`preflight` finds what would fail later (a folder that cannot be written, a full disk, text that is not there) before
anything is computed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.study.atomic import read_json, replacing, write_json
from octavo.study.baseline_phase import train_baseline
from octavo.study.budget import TimeBudget
from octavo.study.corpus import check_source
from octavo.study.data_phase import prepare_data
from octavo.study.environment import run_row
from octavo.study.progress import Progress, SilentProgress, Stop
from octavo.study.record import Record, Row
from octavo.study.run import RECORD, SETTINGS, Run
from octavo.study.settings import StudySettings

PHASES: dict[str, Callable[[Run], list[Row]]] = {
    "data": prepare_data,
    "baseline": train_baseline,
}


class PreflightError(ValueError):
    """Something that would make the study fail later; nothing has been computed yet."""


def run_study(
    settings: StudySettings,
    *,
    resume: bool = False,
    command: list[str] | None = None,
    progress: Progress | None = None,
    stop: Stop | None = None,
) -> list[Row]:
    """Run all phases that the record in `settings.out` lacks, and return all its rows.

    Raises PreflightError before anything is computed, StudyInterrupted when stopped (what is done is saved).
    """
    preflight(settings, resume=resume)
    if not resume:
        write_json(settings.out / SETTINGS, settings.to_json())
    run = Run(
        settings,
        Record(settings.out / RECORD),
        TimeBudget(settings.time_limit_s),
        progress or SilentProgress(),
        stop or Stop(),
    )
    if not run.record.of_kind("run"):
        run.record.append([run_row(settings, command or [])])
    for name, phase in PHASES.items():
        if not run.record.finished(name):
            _run_phase(run, name, phase)
    return run.record.rows


def _run_phase(run: Run, name: str, phase: Callable[[Run], list[Row]]) -> None:
    run.stop.check()
    start = time.monotonic()
    rows = phase(run)
    shrunk = [row for row in rows if row["kind"] == "adjustment"]
    note = "; ".join(f"{row['what']} {row['wanted']} -> {row['used']}" for row in shrunk) or None
    done: Row = {
        "kind": "phase",
        "name": name,
        "seconds": time.monotonic() - start,
        "status": "shrunk" if shrunk else "done",
        "note": note,
    }
    run.record.append([*rows, done])


def preflight(settings: StudySettings, *, resume: bool) -> None:
    """Raise PreflightError for a folder, disk, device or text that cannot work."""
    folder = settings.out
    record = folder / RECORD
    if resume:
        _check_resumable(settings)
    elif record.exists():
        raise PreflightError(f"{folder} already holds a run; go on with it by --resume, or choose another --out")
    _check_writable(folder)
    needed = required_bytes(settings)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{folder} has {free / 1e9:.2f} GB free; checkpoints of this study need about {needed / 1e9:.2f} GB: "
            "free some space or choose another --out"
        )
    if torch.device(settings.device).type == "cuda" and not torch.cuda.is_available():
        raise PreflightError(f"device {settings.device!r} was asked for, but torch finds no CUDA GPU; use --device cpu")
    check_source(settings.data, settings.data_dir)


def required_bytes(settings: StudySettings) -> int:
    """Disk space that a run may need at once: fp32 weights with optimizer state twice, and each served model."""
    shape = settings.training.shape
    parameters = shape.layers * 12 * shape.width**2 + (shape.vocab_size + shape.context) * shape.width
    return parameters * 4 * 3 * 2 + parameters * 4 * 6 + 2**26


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / ".writable") as temporary:
            temporary.write_bytes(b"1")
        (folder / ".writable").unlink()
    except OSError as error:
        raise PreflightError(f"--out {folder} cannot be written ({error.strerror}); choose another folder") from error


def _check_resumable(settings: StudySettings) -> None:
    path = settings.out / SETTINGS
    if not path.exists():
        raise PreflightError(f"{settings.out} holds no run to resume ({SETTINGS} is missing); leave out --resume")
    stored, asked = read_json(path), settings.to_json()
    asked["methods"] = None if asked["methods"] is None else list(asked["methods"])
    differing = [f"{key} was {stored.get(key)!r}, now {asked[key]!r}" for key in asked if stored.get(key) != asked[key]]
    if differing:
        raise PreflightError(
            f"{settings.out} was begun with other settings ({'; '.join(differing)}); resume with the same, "
            "or choose another --out"
        )
