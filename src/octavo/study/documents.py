"""Documents: named texts, how they are split, and the hash that identifies a collection of them.

A document goes to train, validation or test by the hash of its name alone, so that adding or changing one document
never moves another, and no document is in two splits. Collections that bring their own split (WikiText) keep it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SPLITS = ("train", "validation", "test")
_TRAIN_SHARE, _VALIDATION_SHARE = 80, 10  # percent; the rest is test


@dataclass(frozen=True)
class Document:
    """One text and the name that decides its split; `split` overrules the name where the source has its own split."""

    name: str
    text: str
    split: str | None = None


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order with where they came from."""

    name: str
    source: str
    documents: tuple[Document, ...] = field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Size of all texts in UTF-8 bytes."""
        return sum(len(document.text.encode("utf-8")) for document in self.documents)

    @property
    def sha256(self) -> str:
        """Hash over names, splits and texts in order: equal exactly when the study sees the same data."""
        digest = hashlib.sha256()
        for document in self.documents:
            for part in (document.name, split_of(document), document.text):
                encoded = part.encode("utf-8")
                digest.update(len(encoded).to_bytes(8, "little"))
                digest.update(encoded)
        return digest.hexdigest()

    @property
    def brings_split(self) -> bool:
        """Whether the source itself says which document is for what."""
        return any(document.split is not None for document in self.documents)

    def empty_splits(self) -> list[str]:
        """Which of train, validation and test no document would go to."""
        taken = {split_of(document) for document in self.documents if document.text}
        return [name for name in SPLITS if name not in taken]

    def split(self) -> dict[str, list[Document]]:
        """The documents by split, in corpus order. Raises ValueError when a split would be empty."""
        parts: dict[str, list[Document]] = {name: [] for name in SPLITS}
        for document in self.documents:
            parts[split_of(document)].append(document)
        empty = self.empty_splits()
        if empty:
            raise ValueError(
                f"{self.name}: {len(self.documents)} documents leave {', '.join(empty)} empty; "
                "each of train, validation and test needs at least one document: give more or smaller files"
            )
        return parts


def split_of(document: Document) -> str:
    """`train`, `validation` or `test` for one document, from the SHA-256 of its name (80, 10, 10 percent)."""
    if document.split is not None:
        return document.split
    bucket = int.from_bytes(hashlib.sha256(document.name.encode("utf-8")).digest()[:8], "big") % 100
    if bucket < _TRAIN_SHARE:
        return "train"
    return "validation" if bucket < _TRAIN_SHARE + _VALIDATION_SHARE else "test"


def cut(name: str, text: str, size: int = 16_384) -> list[Document]:
    """Cut one long text at paragraph ends into documents of about `size` characters, named `name#0`, `name#1`, …

    A single large file could otherwise fill one split and leave the others empty.
    """
    pieces: list[str] = []
    current: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        current.append(paragraph)
        length += len(paragraph) + 2
        if length >= size:
            pieces.append("\n\n".join(current))
            current, length = [], 0
    if current:
        pieces.append("\n\n".join(current))
    if len(pieces) == 1:
        return [Document(name, pieces[0])]
    return [Document(f"{name}#{index}", piece) for index, piece in enumerate(pieces) if piece.strip()]


def texts(documents: Iterable[Document]) -> Sequence[str]:
    """The texts alone."""
    return [document.text for document in documents]
