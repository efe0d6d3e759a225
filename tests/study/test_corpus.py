from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from octavo.study.corpus import DataError, check_source, load_corpus


def test_a_folder_of_texts_is_read_in_order_and_other_files_are_not(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe")
    assert [document.text for document in load_corpus(str(tmp_path)).documents] == ["first", "second"]


def test_one_file_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join("line " * 200 for _ in range(100)))
    assert len(load_corpus(str(path)).documents) > 3


def test_wikitext_from_a_folder_keeps_its_own_splits(tmp_path: Path) -> None:
    for stem in ("train", "valid", "test"):
        (tmp_path / f"wiki.{stem}.raw").write_text(f" = {stem} = ")
    parts = load_corpus("wikitext-2", tmp_path).split()
    assert {name: members[0].text for name, members in parts.items()} == {
        "train": " = train = ",
        "validation": " = valid = ",
        "test": " = test = ",
    }


def test_wikitext_without_files_or_library_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"no wiki.train.raw.*--data docs"):
        check_source("wikitext-2", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install datasets"):
        check_source("wikitext-2", None)


@pytest.mark.parametrize("data", ["no/such/place", "wikitext"])
def test_an_unknown_source_is_named(data: str) -> None:
    with pytest.raises(DataError, match=f"{data}.*no such file"):
        check_source(data, None)


def test_a_folder_without_text_and_a_file_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no text file"):
        check_source(str(tmp_path), None)
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine \xff not")
    with pytest.raises(DataError, match=r"a\.txt is not UTF-8 text \(byte 5\)"):
        load_corpus(str(path))
