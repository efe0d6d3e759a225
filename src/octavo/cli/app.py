"""The typer application that the commands belong to."""

from __future__ import annotations

from typing import Annotated

import typer

from octavo.cli.advise import advise
from octavo.cli.bench import bench
from octavo.cli.doctor import doctor
from octavo.cli.study import study
from octavo.version import __version__

app = typer.Typer(
    name="octavo",
    help="FP8 for transformers in PyTorch: what it does to a model, and what this machine can do.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
app.command()(study)
app.command()(bench)
app.command()(advise)
app.command()(doctor)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
]


@app.callback()
def root(version: VersionOption = False) -> None:
    """FP8 for transformers in PyTorch."""
