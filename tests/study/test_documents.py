from __future__ import annotations

import pytest

from octavo.study.documents import Corpus, Document, cut, split_of


def corpus(*names: str) -> Corpus:
    return Corpus("c", "s", tuple(Document(name, f"text of {name}") for name in names))


def test_a_document_is_in_exactly_one_split_and_none_is_lost() -> None:
    whole = corpus(*(f"d{i}" for i in range(300)))
    parts = whole.split()
    names = [document.name for members in parts.values() for document in members]
    assert sorted(names) == sorted(document.name for document in whole.documents)
    assert len(set(names)) == 300


def test_a_documents_split_depends_on_its_name_alone() -> None:
    few, many = corpus("a", "b", "c"), corpus(*(f"x{i}" for i in range(200)), "a", "b", "c")
    before = {document.name: split_of(document) for document in few.documents}
    assert all(split_of(d) == before[d.name] for d in many.documents if d.name in before)
    # 80, 10, 10 per cent of 20,000 names: a binomial share of 0.8 has a deviation of 0.3 %.
    train = sum(split_of(Document(f"n{i}", "")) == "train" for i in range(20_000)) / 20_000
    assert abs(train - 0.8) < 5 * 0.003


def test_the_hash_sees_names_texts_splits_and_order() -> None:
    base = corpus("a", "b")
    assert base.sha256 == corpus("a", "b").sha256
    others = [
        corpus("b", "a"),
        corpus("a", "c"),
        Corpus("c", "s", (Document("a", "other"), base.documents[1])),
        Corpus("c", "s", (Document("a", "text of a", "test"), base.documents[1])),
    ]
    assert len({base.sha256, *(other.sha256 for other in others)}) == 5


def test_too_few_documents_name_the_empty_split() -> None:
    with pytest.raises(ValueError, match=r"1 documents leave .* empty"):
        corpus("a").split()


def test_cutting_loses_no_paragraph() -> None:
    text = "\n\n".join(f"paragraph {i} " + "x" * 50 for i in range(40))
    pieces = cut("t", text, size=300)
    assert len(pieces) > 5
    assert "\n\n".join(piece.text for piece in pieces) == text
    assert cut("t", "short") == [Document("t", "short")]
