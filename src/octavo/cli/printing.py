"""Printing what may be wider than a terminal: a terminal gets what fits it, a file or a pipe everything, whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from rich.console import Console, RenderableType

# So wide that nothing wraps while it is measured.
_BOUNDLESS = 100_000
_LEAST = 80


def print_fitted(build: Callable[[int | None], RenderableType]) -> None:
    """Print to stdout what `build` makes for a width.

    Args:
        build: called with the letters of a terminal's line (or with COLUMNS, if that is set), or with None where stdout
            is no terminal: then lines are as long as their content.
    """
    console = Console()
    with contextlib.suppress(BrokenPipeError):
        if console.is_terminal or os.environ.get("COLUMNS"):
            console.print(build(console.width), highlight=False)
            return
        whole = build(None)
        width = Console(width=_BOUNDLESS).measure(whole).maximum
        Console(width=max(width, _LEAST)).print(whole, highlight=False)
