"""`octavo bench`: what Octavo costs and gains in time and memory, beside bf16 and every peer that can be imported."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from octavo.bench import MODELS, SECTIONS, BenchSettings, joined_records, run_bench, with_targets
from octavo.bench.settings import RECORD
from octavo.cli.console import parse_duration
from octavo.cli.printing import print_fitted
from octavo.report.bench_page import build_bench
from octavo.report.bench_terminal import bench_summary

PAGE = "report.html"
FAILED, USAGE, INTERRUPTED = 1, 2, 130
# What a line says of a row: the field, in which words, and what it is multiplied by.
_FIGURES = (
    ("ms", "{:.4g} ms", 1.0),
    ("us", "{:.4g} us", 1.0),
    ("speedup", "{:.3g}x bf16", 1.0),
    ("ratio", "{:.3g}x bf16", 1.0),
    ("of_same_copy", "{:.3g} % of a copy of this", 100.0),
    ("target_ms", "target {:.4g} ms", 1.0),
    ("peak_gib", "{:.4g} GiB", 1.0),
)

_COMPARED = ("speedup", "ratio", "of_same_copy", "target_ms")

OnlyOption = Annotated[
    str | None,
    typer.Option(
        help=f"Sections, by comma: {', '.join(SECTIONS)}. Default: all but layers, inference and article, which take"
        " minutes."
    ),
]
ModelsOption = Annotated[
    str | None, typer.Option(help=f"Models of the steps, by comma: {', '.join(MODELS)}. Default: all but vit-layers.")
]
VariantsOption = Annotated[
    str | None,
    typer.Option(help="Variants of the steps, by comma: bf16-compiled, octavo-delayed, te-current … Default: all."),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Fewer shapes, rounds and steps.")]
TimeLimitOption = Annotated[
    str | None, typer.Option(help="What does not fit is left out, and said: 90s, 8m.", metavar="DURATION")
]
OutOption = Annotated[Path | None, typer.Option(help="Folder of the record and the page. Default: runs/<date>-bench.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU if there is one.")]
SeedOption = Annotated[int, typer.Option(help="Of data and models.")]
MemoryOption = Annotated[float, typer.Option(help="GiB of the article's largest batch.")]
CommitOption = Annotated[str | None, typer.Option(help="For the record, where git does not know it.")]
FromOption = Annotated[
    list[Path] | None,
    typer.Option("--from", help="Measure nothing: tables and page of this record.jsonl (again for several)."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")]


def bench(
    context: typer.Context,
    only: OnlyOption = None,
    models: ModelsOption = None,
    variants: VariantsOption = None,
    quick: QuickOption = False,
    time_limit: TimeLimitOption = None,
    out: OutOption = None,
    device: DeviceOption = None,
    seed: SeedOption = 0,
    memory_limit: MemoryOption = 20.0,
    commit: CommitOption = None,
    records: FromOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure casts, one Linear, host time and whole training steps, beside bf16 and the peers that are installed.

    Examples:

    [bold]octavo bench --time-limit 8m[/bold] — on a GPU; on a CPU a small form that shows that everything runs

    [bold]octavo bench --only steps --models vit --variants bf16-compiled,octavo-delayed-compiled[/bold]

    [bold]octavo bench --from runs/a/record.jsonl --out runs/page[/bold] — tables and page again, without measuring

    Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (what was measured is kept).
    """
    errors = Console(stderr=True)
    folder = out or Path("runs") / f"{datetime.datetime.now(datetime.timezone.utc):%Y%m%d-%H%M%S}-bench"
    try:
        if records:
            _check_from(context, records, folder)
            rows = joined_records(records)
            folder.mkdir(parents=True, exist_ok=True)
            finish(rows, folder, as_json, errors, records)
            return
        choices = {"only": parse_names(only), "models": parse_names(models), "variants": parse_names(variants)}
        settings = BenchSettings(
            out=folder,
            quick=quick,
            time_limit_s=None if time_limit is None else parse_duration(time_limit),
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            seed=seed,
            memory_limit_gib=memory_limit,
            commit=commit,
            **{name: names for name, names in choices.items() if names is not None},
        )
    except (ValueError, OSError) as error:
        complain(errors, error)
        raise typer.Exit(USAGE) from error
    execute(settings, as_json, errors)


# What --from goes with: the others choose what is measured.
_WITH_FROM = ("records", "out", "as_json", "context")


def _check_from(context: typer.Context, records: list[Path], folder: Path) -> None:
    """Raise ValueError for an option that does nothing here, a record that lacks, or a page that would be replaced."""
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name not in _WITH_FROM and source is not None and source.name == "COMMANDLINE":
            raise ValueError(
                f"{parameter.opts[0]} chooses what is measured, and --from measures nothing: leave one out"
            )
    for path in records:
        if not (path / RECORD if path.is_dir() else path).is_file():
            raise ValueError(f"--from {path}: no such record; give the {RECORD} that octavo bench wrote, or its folder")
    own = folder / RECORD
    given = {(path / RECORD if path.is_dir() else path).resolve() for path in records}
    if given == {own.resolve()}:
        return
    for path in (own, folder / PAGE):
        if path.exists():
            raise ValueError(f"{path} exists and is of another run: move it, or choose another --out")


def parse_names(text: str | None) -> tuple[str, ...] | None:
    """The names of `a,b`; None for none."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def complain(errors: Console, error: Exception) -> None:
    """One red line on stderr."""
    errors.print(f"octavo bench: {error}", style="red", highlight=False, soft_wrap=True, markup=False)


def execute(settings: BenchSettings, as_json: bool, errors: Console) -> None:
    """Measure, show, and turn what happens into an exit code."""
    status = errors.status("octavo bench") if errors.is_terminal else contextlib.nullcontext()

    emulated = False

    def watch(row: dict[str, Any]) -> None:
        nonlocal emulated
        emulated = emulated or (row["kind"] == "run" and row.get("native_fp8") is False)
        if line := said_of(row, emulated):
            errors.print(f"octavo bench: {line}", highlight=False, soft_wrap=True, markup=False)

    try:
        with status:
            rows = run_bench(settings, command=["octavo", *sys.argv[1:]], watch=watch)
    except KeyboardInterrupt as error:
        message = f"octavo bench: interrupted; what was measured is in {settings.record_path}"
        errors.print(message, soft_wrap=True, markup=False)
        raise typer.Exit(INTERRUPTED) from error
    except (ValueError, OSError) as error:
        complain(errors, error)
        raise typer.Exit(FAILED) from error
    finish(rows, settings.out, as_json, errors, [settings.record_path])
    if any(row["kind"] == "section" and row["status"] == "failed" for row in rows):
        raise typer.Exit(FAILED)


def finish(rows: list[dict[str, Any]], folder: Path, as_json: bool, errors: Console, records: list[Path]) -> None:
    """The page, if its libraries are here, and the tables or the JSON."""
    rows = with_targets(rows)
    page = folder / PAGE
    try:
        build_bench(rows, page)
    except ModuleNotFoundError as error:
        again = " ".join(f"--from {path}" for path in records)
        errors.print(
            f"octavo bench: no page: needs {error.name or error}, pip install octavo[study]; then octavo bench {again}",
            soft_wrap=True, highlight=False, markup=False,
        )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(rows, indent=1, allow_nan=False))
        return
    print_fitted(lambda width: bench_summary(rows, width))
    for name, path in (("page", page), ("record", folder / "record.jsonl")):
        if path.exists():
            typer.echo(f"{name}: {path}")


def said_of(row: dict[str, Any], emulated: bool = False) -> str:
    """A line about a row that has just been measured; empty for those of no interest.

    Where FP8 is emulated figures are told, and nothing that compares them.
    """
    kind, status = row["kind"], row.get("status")
    if kind == "section":
        return f"{row['name']} {status} in {row['seconds']:.1f} s" + (f": {row['reason']}" if row["reason"] else "")
    if kind not in ("ceiling", "cast", "linear", "host", "step", "inference", "article_step", "batch_limit"):
        return ""
    shape = " x ".join(str(extent) for extent in row.get("shape", ()))
    name = row.get("rival") or row.get("name")
    parts = (kind, row.get("model"), shape, *_served(row), name, row.get("pass"))
    about = " ".join(str(part) for part in parts if part)
    if status != "measured":
        return f"{about} {status}: {row['reason']}"
    words = [
        form.format(row[key] * factor) for key, form, factor in _FIGURES
        if isinstance(row.get(key), (int, float)) and not (emulated and key in _COMPARED)
    ]  # fmt: skip
    if kind == "ceiling":
        words.append(f"{row['per_s'] / 1e12:.4g} T{row['unit']}")
    return f"{about}: {', '.join(words)}"


def _served(row: dict[str, Any]) -> tuple[str, ...]:
    """The phase of a served model, how many sequences of how many tokens, and whether it is replayed."""
    if not row.get("phase"):
        return ()
    size = f"{row['batch']} x {row['tokens']}" if row["tokens"] else ""
    return row["phase"], size, row["graph"]
