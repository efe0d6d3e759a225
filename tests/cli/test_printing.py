"""A terminal gets what fits it; a pipe gets lines as long as their content."""

from __future__ import annotations

import pytest
from rich.console import Group
from rich.text import Text

from octavo.cli.printing import print_fitted

LONG = "word " * 60 + "end"


def test_a_pipe_gets_lines_as_long_as_their_content(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    widths = []
    print_fitted(lambda width: widths.append(width) or Group(Text(LONG), Text("short")))  # type: ignore[func-returns-value]
    assert widths == [None]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [LONG, "short"]


def test_a_width_that_is_set_is_kept(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    widths = []
    print_fitted(lambda width: widths.append(width) or Text(LONG))  # type: ignore[func-returns-value]
    assert widths == [40]
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 40


def test_a_reader_that_has_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object, **kwargs: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("octavo.cli.printing.Console.print", gone)
    print_fitted(lambda width: Text(LONG))
