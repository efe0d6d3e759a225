from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from tests.report import rows as fictional

from octavo.report import summary


def printed(rows: list[dict[str, Any]], width: int = 120) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(summary(rows))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().replace("\u00a0", " ")


def test_the_summary_has_the_answer_the_tables_and_the_warning() -> None:
    said = printed(fictional.study(steps=12))
    for part in ("without training", "FP8 row-wise", "INT4 weights", "Gap to BF16", "cannot be answered here"):
        assert part in said
    assert "these figures are no speed of" in said


def test_an_interrupted_study_has_a_summary_too() -> None:
    said = printed(fictional.interrupted())
    assert "Not in this record:" in said
    assert "Gap to BF16" not in said


@pytest.mark.parametrize("width", [80, 120])
def test_headings_are_not_cut(width: int) -> None:
    assert "…" not in printed(fictional.study(steps=12), width)


def test_a_claim_stands_beside_what_was_measured_and_the_verdict() -> None:
    row = {"kind": "claim", "claim": "Tokens a second", "claimed": "1.8×", "measured": "1.2×", "held": False}
    heading, _, line = (part.split() for part in printed([row]).splitlines()[-4:-1])
    assert heading == ["Claim", "Claimed", "Measured", "here", "Verdict"]
    assert line == ["Tokens", "a", "second", "1.8×", "1.2×", "✗", "not", "held"]


def test_brackets_in_texts_are_no_markup() -> None:
    row = {"kind": "claim", "claim": "[bold]loud[/bold] [/]", "measured": "1", "held": True}
    assert "[bold]loud[/bold] [/]" in printed([row])
