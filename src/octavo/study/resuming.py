"""What a run's folder remembers of its settings, and what a study would do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.study.atomic import read_json
from octavo.study.run import SETTINGS
from octavo.study.settings import StudySettings


class PreflightError(ValueError):
    """Something that would make the study fail later; nothing has been computed yet."""


def stored_settings(out: Path, time_limit_s: float | None, given: dict[str, Any]) -> StudySettings:
    """The settings that the run in `out` began with.

    Raises PreflightError when there is no run, or when one of `given` says otherwise than the run.
    """
    path = out / SETTINGS
    if not path.exists():
        raise PreflightError(f"{out} holds no run to resume ({SETTINGS} is missing); leave out --resume")
    stored = StudySettings.from_json(read_json(path), out, time_limit_s)
    differing = [
        f"{key} was {getattr(stored, key)!r}, now {value!r}"
        for key, value in given.items()
        if getattr(stored, key) != value
    ]
    if differing:
        raise PreflightError(
            f"{out} was begun with other settings ({'; '.join(differing)}); resume with the same, "
            "or choose another --out"
        )
    return stored


def planned(settings: StudySettings) -> dict[str, Any]:
    """What a study would do, as plain data."""
    preset = settings.training
    by_epochs = settings.epochs is not None
    capped = by_epochs and settings.finetune_steps is None
    return {
        "out": str(settings.out),
        "preset": settings.preset,
        "model": None if settings.model_dir is None else str(settings.model_dir),
        "device": settings.device,
        "data": settings.data,
        "seed": settings.seed,
        "dtype": settings.dtype,
        "layers": preset.shape.layers,
        "width": preset.shape.width,
        "context": preset.shape.context,
        "steps": f"{settings.epochs} epochs" if by_epochs else preset.steps,
        "finetune_steps": f"at most {preset.finetune_steps}" if capped else preset.finetune_steps,
        "batch_tokens": preset.batch_size * preset.shape.context,
        "methods": "all" if settings.methods is None else ", ".join(settings.methods),
        "time_limit_s": settings.time_limit_s,
        "phases": "data, baseline, ptq, finetune, report",
    }
