from __future__ import annotations

from pathlib import Path

import pytest

from octavo.study.python_documentation import load_python_documentation

LONG = "A sentence that is long enough to count as text for the study."


def library(root: Path) -> Path:
    (root / "pydoc_data").mkdir(parents=True)
    (root / "pydoc_data" / "topics.py").write_text("topics = {'with': 'The with statement ...', 'if': 'The if.'}\n")
    (root / "b.py").write_text(f'"""{LONG}"""\nraise SystemExit("imported")\n')
    (root / "a.py").write_text(f'class A:\n    """{LONG}"""\n    def f(self):\n        """{LONG} And more."""\n')
    (root / "test").mkdir()
    (root / "test" / "c.py").write_text(f'"""{LONG} Never."""\n')
    (root / "broken.py").write_text("def (:\n")
    return root


def test_topics_and_docstrings_come_sorted_and_each_once(tmp_path: Path) -> None:
    corpus = load_python_documentation(library(tmp_path))
    assert [document.name for document in corpus.documents] == ["topic/if", "topic/with", "module/a.py"]
    assert corpus.documents[2].text == f"{LONG}\n\n{LONG} And more.\n"  # b.py only repeats a.py's


def test_reading_twice_gives_the_same_hash(tmp_path: Path) -> None:
    root = library(tmp_path)
    assert load_python_documentation(root).sha256 == load_python_documentation(root).sha256


def test_a_stripped_python_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="--data PATH"):
        load_python_documentation(tmp_path)


@pytest.mark.slow
def test_this_python_ships_a_megabyte_of_text() -> None:
    assert load_python_documentation().num_bytes > 1_000_000
