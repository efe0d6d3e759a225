"""Splitting within documents: one book, or a few texts, cut into consecutive pieces that share out the splits.

Splitting by document is better, since neighbouring pieces of one text have much in common; it needs enough documents.
Where they are too few, all pieces are numbered in corpus order, and of every ten the fifth is for validation and the
tenth for test. The split depends on the texts alone.
"""

from __future__ import annotations

from octavo.study.documents import Corpus, Document

PIECE = 4_096  # characters: some hundreds of tokens, so that a piece holds whole windows of a small model
_FEWEST = 20  # pieces of a short corpus, so that validation and test have two each
_PLACES = {4: "validation", 9: "test"}  # by number modulo ten; the others are for training


def in_pieces(corpus: Corpus) -> Corpus:
    """The corpus with every document cut into pieces of at most `PIECE` characters; its source says so.

    No character is lost or moved. A short corpus is cut smaller, into about twenty pieces.
    """
    total = sum(len(document.text) for document in corpus.documents)
    size = max(1, min(PIECE, -(-total // _FEWEST)))
    pieces: list[Document] = []
    for document in corpus.documents:
        for index, text in enumerate(consecutive(document.text, size)):
            split = _PLACES.get(len(pieces) % 10, "train")
            pieces.append(Document(f"{document.name}@{index}", text, split))
    note = (
        f"split within documents, since {len(corpus.documents)} of this length cannot fill three splits: "
        f"{len(pieces)} consecutive pieces of at most {size:,} characters, of every ten one for validation and "
        "one for test"
    )
    return Corpus(corpus.name, f"{corpus.source}; {note}", tuple(pieces))


def consecutive(text: str, size: int) -> list[str]:
    """`text` cut after the last line break, else the last space, within each `size` characters; else at `size`."""
    pieces = []
    start = 0
    while start < len(text):
        end = start + size
        if end < len(text):
            breaks = (text.rfind(mark, start, end) + 1 for mark in ("\n", " "))  # 0 where there is none
            end = next((position for position in breaks if position), end)
        pieces.append(text[start:end])
        start = end
    return pieces
