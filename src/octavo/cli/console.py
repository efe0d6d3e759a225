"""What commands print: results to stdout, everything else to stderr; bars on a terminal, elsewhere plain lines."""

from __future__ import annotations

import re
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_DURATION = re.compile(r"(?:(?P<h>\d+(?:\.\d+)?)h)?(?:(?P<m>\d+(?:\.\d+)?)m(?:in)?)?(?:(?P<s>\d+(?:\.\d+)?)s)?")


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `8m` or `1h30m`. Raises ValueError that says so."""
    plain = text.strip().lower()
    try:
        return float(plain)
    except ValueError:
        pass
    match = _DURATION.fullmatch(plain)
    if not plain or match is None or not any(match.groups()):
        raise ValueError(f"{text!r} is no duration; write 90s, 8m or 1h30m")
    hours, minutes, seconds = (float(match[name] or 0) for name in ("h", "m", "s"))
    return hours * 3600 + minutes * 60 + seconds


class TerminalProgress:
    """A bar with an ETA for each phase on a terminal; elsewhere a plain line when a phase starts and when it ends."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`, which should be that of stderr."""
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", style="dim"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._newest = ""

    def __enter__(self) -> TerminalProgress:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing."""
        self._bars.stop()

    def started(self, name: str) -> None:
        """A line where there are no bars."""
        self._newest = ""
        self._line(f"{name} started")

    def phase(self, name: str, total: int, unit: str) -> None:
        """A new bar."""
        self._task = self._bars.add_task(name, total=total, text=unit)

    def advance(self, amount: int, text: str) -> None:
        """Move the current bar."""
        self._newest = text
        if self._task is not None:
            self._bars.update(self._task, advance=amount, text=text)

    def finished(self, name: str, seconds: float) -> None:
        """A line where there are no bars, with the newest figure."""
        self._line(f"{name} done in {seconds:.1f} s" + (f" ({self._newest})" if self._newest else ""))

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"octavo study: {text}", highlight=False, soft_wrap=True, markup=False)
