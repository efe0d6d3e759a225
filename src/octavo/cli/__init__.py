"""The command line: `octavo study` and `octavo doctor`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted (Ctrl-C; what was done is kept).
"""

from __future__ import annotations

import sys

_STUDY_EXTRA = frozenset({"typer", "rich", "click", "tokenizers", "safetensors", "plotly", "jinja2"})


def main() -> None:
    """Run the command line; the console script `octavo` and `python -m octavo` call this."""
    try:
        from octavo.cli.app import app
    except ModuleNotFoundError as error:
        explain_missing(error)
        sys.exit(1)
    app()


def explain_missing(error: ModuleNotFoundError) -> None:
    """Say on stderr which extra brings the library that is absent; raise the error again if none does."""
    name = (error.name or "").partition(".")[0]
    if name not in _STUDY_EXTRA:
        raise error
    sys.stderr.write(f"octavo: the command line needs {name}, which is not installed: pip install octavo[study]\n")
