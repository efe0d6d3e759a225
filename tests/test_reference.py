"""docs/reference.md has every public name of Octavo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import octavo

REFERENCE = (Path(__file__).resolve().parents[1] / "docs" / "reference.md").read_text(encoding="utf-8")


def stands_in(page: str, name: str) -> bool:
    """As what a docstring is taken from, or in the table of names; in running text does not count."""
    return re.search(rf"^(::: octavo\.[\w.]*\b{name}|\| `octavo\.{name}` \|.*)$", page, re.M) is not None


@pytest.mark.parametrize("name", octavo.__all__)
def test_every_public_name_stands_in_the_reference(name: str) -> None:
    assert stands_in(REFERENCE, name)


def test_a_name_that_is_only_spoken_of_is_missed() -> None:
    page = "Call `octavo.convert` first.\n\n::: octavo.conversion.convert.unconvert\n::: octavo.tensor.quantized\n"
    assert stands_in(page, "unconvert")
    assert not stands_in(page, "convert")
    assert not stands_in(page, "quantize")
