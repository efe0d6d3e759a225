from __future__ import annotations

from pathlib import Path

import pytest

from octavo.study.budget import TimeBudget
from octavo.study.corpus import DataError
from octavo.study.data_phase import prepare_data
from octavo.study.documents import Corpus, Document, split_of
from octavo.study.pieces import PIECE, consecutive, in_pieces
from octavo.study.record import Record
from octavo.study.run import Run
from octavo.study.settings import Preset, StudySettings

LINE = "a line of a book that has no blank line anywhere\n"


def run_of(folder: Path, text: str) -> Run:
    book = folder / "book.txt"
    book.write_text(text, encoding="utf-8")
    return Run(
        StudySettings(out=folder, preset="micro", data=str(book)), Record(folder / "record.jsonl"), TimeBudget(None)
    )


def test_pieces_end_at_line_breaks_and_lose_nothing() -> None:
    text = LINE * 1000
    pieces = consecutive(text, 200)
    assert "".join(pieces) == text
    assert all(len(piece) <= 200 and piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("text", ["word " * 500, "x" * 2_500])
def test_without_line_breaks_pieces_end_at_spaces_or_where_they_must(text: str) -> None:
    pieces = consecutive(text, 199)
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 199
    assert len(set(pieces[:-1])) == 1


@pytest.mark.parametrize("lines", [30, 8_000])  # 1.5 KB and 400 KB
def test_one_book_fills_three_splits_and_the_source_says_how(lines: int) -> None:
    book = Corpus("book.txt", "text files at book.txt", (Document("book.txt", LINE * lines),))
    cut = in_pieces(book)
    characters = dict.fromkeys(("train", "validation", "test"), 0)
    for piece in cut.documents:
        characters[split_of(piece)] += len(piece.text)
        assert len(piece.text) <= PIECE
    total = len(LINE) * lines
    assert sum(characters.values()) == total
    # A tenth each, up to one piece, which is a twentieth of a text cut into twenty.
    assert abs(characters["validation"] / total - 0.1) <= 0.05
    assert abs(characters["test"] / total - 0.1) <= 0.05
    assert "split within documents" in cut.source
    assert cut == in_pieces(book)


def test_a_study_of_one_file_says_that_it_was_split_within(micro: Preset, tmp_path: Path) -> None:
    row, _ = prepare_data(run_of(tmp_path, LINE * 300))
    assert row["documents"] == 1
    assert "split within documents" in row["source"]
    assert min(row["tokens"].values()) > micro.shape.context


def test_what_is_too_small_is_refused_with_size_rule_and_remedy(micro: Preset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds 98 bytes of text \(documents: 1\).*needs 33: give about [\d,]+ bytes"):
        prepare_data(run_of(tmp_path, LINE * 2))
    with pytest.raises(DataError, match=r"holds 0 bytes.*train is empty"):
        prepare_data(run_of(tmp_path, ""))
