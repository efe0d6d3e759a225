"""The study itself: phases in order, each recorded when it ends and skipped when a resumed run has it already.

`preflight` finds what would fail later (a folder that cannot be written, a full disk, text that is not there) before
anything is computed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from octavo.study.atomic import write_json
from octavo.study.baseline_phase import train_baseline
from octavo.study.budget import TimeBudget
from octavo.study.corpus import check_source
from octavo.study.data_phase import prepare_data
from octavo.study.environment import run_row
from octavo.study.finetune_phase import finetune
from octavo.study.folder import existing_parent, undone_if_refused
from octavo.study.pretrained import check_checkpoint
from octavo.study.progress import Progress, SilentProgress, Stop
from octavo.study.quantize_phase import quantize_baseline
from octavo.study.record import Record, Row
from octavo.study.report_phase import closing_rows, write_report
from octavo.study.resuming import PreflightError, stored_settings
from octavo.study.run import RECORD, SETTINGS, Run
from octavo.study.settings import StudySettings

PHASES: dict[str, Callable[[Run], list[Row]]] = {
    "data": prepare_data,
    "baseline": train_baseline,
    "ptq": quantize_baseline,
    "finetune": finetune,
    "report": closing_rows,
}


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
    first, *others = PHASES
    with nullcontext() if resume else undone_if_refused(settings.out):
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
        _run_phases(run, [first])
    _run_phases(run, others)
    write_report(run.record.rows, settings.out)
    run.progress.advance(1, "report.html")
    return run.record.rows


@contextmanager
def cpu_threads(number: int | None) -> Iterator[None]:
    """Run torch with `number` threads, None with its own number; the old number comes back."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)


def _run_phases(run: Run, names: list[str]) -> None:
    with cpu_threads(run.preset.threads if run.device.type == "cpu" else None):
        for name in names:
            if not run.record.finished(name):
                _run_phase(run, name, PHASES[name])


def _run_phase(run: Run, name: str, phase: Callable[[Run], list[Row]]) -> None:
    run.stop.check()
    start = time.monotonic()
    run.progress.started(name)
    rows = phase(run)
    seconds = time.monotonic() - start
    shrunk = [row for row in rows if row["kind"] == "adjustment"]
    remarks = [f"{row['what']} {row['wanted']} -> {row['used']}" for row in shrunk] + run.notes
    run.notes.clear()
    done: Row = {
        "kind": "phase",
        "name": name,
        "seconds": seconds,
        "status": "shrunk" if shrunk else "done",
        "note": "; ".join(remarks) or None,
    }
    run.record.append([*rows, done])
    run.progress.finished(name, seconds)


def preflight(settings: StudySettings, *, resume: bool) -> None:
    """Raise PreflightError or DataError for a folder, disk, device or text that cannot work; makes nothing."""
    if resume:
        stored_settings(settings.out, settings.time_limit_s, vars(settings))
    folder = existing_parent(settings.out)
    if not resume and (settings.out / RECORD).exists():
        raise PreflightError(f"{settings.out} already holds a run; go on with it by --resume, or choose another --out")
    _check_device(settings.device)
    needed = required_bytes(settings)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PreflightError(
            f"{folder} has {free / 1e9:.2f} GB free; checkpoints of this study need about {needed / 1e9:.2f} GB: "
            "free some space or choose another --out"
        )
    if settings.model_dir is not None:
        check_checkpoint(settings.model_dir)
    check_source(settings.data, settings.data_dir)


def required_bytes(settings: StudySettings) -> int:
    """Disk space that a run may need at once.

    In bytes a parameter: two checkpoints with optimizer state (24), the best and four fine-tuned models in fp32 (20),
    and the served models (about 12).
    """
    shape = settings.training.shape
    parameters = shape.layers * 12 * shape.width**2 + (shape.vocab_size + shape.context) * shape.width
    return parameters * 56 + 2**26


def _check_device(name: str) -> None:
    device = torch.device(name)
    if device.type != "cuda":
        return
    if not torch.cuda.is_available():
        raise PreflightError(f"device {name!r} was asked for, but torch finds no CUDA GPU; use --device cpu")
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise PreflightError(f"device {name!r} was asked for, but the last of {count} is cuda:{count - 1}")
