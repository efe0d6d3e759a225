"""`octavo study`: what FP8 does to a language model, from text to report."""

from __future__ import annotations

import contextlib
import datetime
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from octavo import report
from octavo.cli.console import TerminalProgress, parse_duration
from octavo.study import (
    PRESETS,
    DataError,
    PreflightError,
    StudyInterrupted,
    StudySettings,
    planned,
    preflight,
    run_study,
    stop_on_interrupt,
    stored_settings,
    summarise,
)

FAILED, USAGE, INTERRUPTED = 1, 2, 130


PresetOption = Annotated[
    str | None, typer.Option(help=f"Model: {', '.join(PRESETS)}. Default: tiny without a GPU, gpt2 with one.")
]
ModelOption = Annotated[Path | None, typer.Option(help="A local transformers checkpoint instead of training one.")]
DataOption = Annotated[
    str | None, typer.Option(help="docs (default: the text that ships with Python), wikitext-2, or a file or folder.")
]
DataDirOption = Annotated[Path | None, typer.Option(help="Where wikitext-2's raw files lie.")]
SeedOption = Annotated[int | None, typer.Option(help="Everything random follows from it. Default: 0.")]
StepsOption = Annotated[int | None, typer.Option(help="Steps of the baseline's training.")]
EpochsOption = Annotated[float | None, typer.Option(help="The same in passes over the text.")]
FinetuneOption = Annotated[
    int | None,
    typer.Option(help="Steps of each fine-tuning. Default: 100, or those of --steps or --epochs where fewer."),
]
DtypeOption = Annotated[str | None, typer.Option(help="16-bit format of the baseline: bf16 (default) or fp16.")]
MethodsOption = Annotated[
    str | None, typer.Option(help="Only these, by comma: tensor_static,rowwise,int8 … Default: all.")
]
TimeLimitOption = Annotated[
    str | None, typer.Option(help="Phases shrink to fit, and say so: 90s, 8m, 1h30m.", metavar="DURATION")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder of the run. Default: runs/<date>-<preset>.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")]


def study(
    preset: PresetOption = None,
    model: ModelOption = None,
    data: DataOption = None,
    data_dir: DataDirOption = None,
    seed: SeedOption = None,
    steps: StepsOption = None,
    epochs: EpochsOption = None,
    finetune_steps: FinetuneOption = None,
    dtype: DtypeOption = None,
    methods: MethodsOption = None,
    time_limit: TimeLimitOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Train in BF16, quantize to FP8, fine-tune in FP8, and report what it cost and gained.

    Examples:

    [bold]octavo study[/bold] — a few minutes on a CPU, FP8 emulated

    [bold]octavo study --preset gpt2 --time-limit 8m[/bold] — on a GPU

    [bold]octavo study --resume --out runs/first[/bold] — go on where it stopped

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (what was done is kept).
    """
    given = {
        "preset": preset,
        "model_dir": model,
        "data": data,
        "data_dir": data_dir,
        "seed": seed,
        "steps": steps,
        "epochs": epochs,
        "finetune_steps": finetune_steps,
        "dtype": dtype,
        "methods": parse_methods(methods),
        "device": device,
    }
    errors = Console(stderr=True)
    try:
        settings = resolve(given, out, time_limit, resume)
        preflight(settings, resume=resume)
    except (DataError, PreflightError, ValueError) as error:
        complain(errors, error)
        raise typer.Exit(USAGE) from error
    if dry_run:
        show_plan(settings, as_json)
    else:
        execute(settings, resume, as_json, errors)


def parse_methods(text: str | None) -> tuple[str, ...] | None:
    """The methods of `a,b`; None for none."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def complain(errors: Console, error: Exception) -> None:
    """One red line on stderr."""
    errors.print(f"octavo study: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


def resolve(options: dict[str, Any], out: Path | None, time_limit: str | None, resume: bool) -> StudySettings:
    """Settings from the options that are not None: over those of the run that is resumed, or over the defaults."""
    given = {key: value for key, value in options.items() if value is not None}
    time_limit_s = None if time_limit is None else parse_duration(time_limit)
    if resume:
        if out is None:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        return stored_settings(out, time_limit_s, given)
    has_gpu = torch.cuda.is_available()
    chosen: dict[str, Any] = {"device": "cuda" if has_gpu else "cpu"} | given
    chosen.setdefault("preset", "gpt2" if chosen["device"].startswith("cuda") else "tiny")
    if out is None:
        now = datetime.datetime.now(datetime.timezone.utc)
        out = Path("runs") / f"{now:%Y%m%d-%H%M%S}-{chosen['preset']}"
    return StudySettings(out=out, time_limit_s=time_limit_s, **chosen)


def show_plan(settings: StudySettings, as_json: bool) -> None:
    """Print what a study would do."""
    plan = planned(settings)
    if as_json:
        typer.echo(json.dumps(plan, indent=1))
        return
    for key, value in plan.items():
        typer.echo(f"{key.replace('_', ' '):<18}{value}")


def execute(settings: StudySettings, resume: bool, as_json: bool, errors: Console) -> None:
    """Run the study, print its summary, and turn what happens into an exit code."""
    command = ["octavo", *sys.argv[1:]]
    try:
        with stop_on_interrupt() as stop, TerminalProgress(errors) as progress:
            rows = run_study(settings, resume=resume, command=command, progress=progress, stop=stop)
    except (StudyInterrupted, KeyboardInterrupt) as error:
        again = shlex.join(["octavo", "study", "--resume", "--out", str(settings.out)])
        errors.print(
            f"octavo study: interrupted; what is done is kept. Go on with: {again}", soft_wrap=True, markup=False
        )
        raise typer.Exit(INTERRUPTED) from error
    except (ValueError, OSError, ModuleNotFoundError) as error:
        complain(errors, error)
        raise typer.Exit(FAILED) from error
    if as_json:
        typer.echo(json.dumps(summarise(rows, settings.out), indent=1, allow_nan=False))
        return
    with contextlib.suppress(BrokenPipeError):
        Console().print(report.summary(rows))
    typer.echo(f"report: {settings.out / 'report.html'}\nrecord: {settings.out / 'record.jsonl'}")
