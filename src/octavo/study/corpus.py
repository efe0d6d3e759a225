"""Which text a study reads: `docs`, `wikitext-2`, or a path, resolved to a `Corpus`.

`check_source` finds mistakes without reading everything, so that they show before hours are spent.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from octavo.study.documents import Corpus, Document, cut
from octavo.study.python_documentation import load_python_documentation

_TEXT_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".raw", ".tokens"})
_WIKITEXT_FILES = {"train": "wiki.train", "validation": "wiki.valid", "test": "wiki.test"}
_WIKITEXT_SUFFIXES = (".raw", ".tokens", ".txt")
_WIKITEXT_HELP = (
    "wikitext-2 needs either the library `datasets` and a network (pip install datasets), or --data-dir DIR with "
    "wiki.train.raw, wiki.valid.raw and wiki.test.raw; without either use --data docs, which needs nothing"
)


class DataError(ValueError):
    """The text asked for cannot be had; the message says what to do."""


def check_source(data: str, data_dir: Path | None) -> None:
    """Raise DataError when `data` (a name or a path) or `data_dir` cannot work; reads no text."""
    if data == "docs":
        return
    if data == "wikitext-2":
        if data_dir is not None:
            _wikitext_paths(data_dir)
        elif importlib.util.find_spec("datasets") is None:
            raise DataError(_WIKITEXT_HELP)
        return
    path = Path(data)
    if not path.exists():
        raise DataError(f"--data {data!r}: no such file or folder, nor one of the names docs and wikitext-2")
    _text_files(path)


def load_corpus(data: str, data_dir: Path | None = None) -> Corpus:
    """Read the text named by `data`: `docs`, `wikitext-2` (from `data_dir` if given), or a file or folder of text.

    Raises DataError with the remedy when it is not there or not readable as UTF-8.
    """
    check_source(data, data_dir)
    if data == "docs":
        try:
            return load_python_documentation()
        except FileNotFoundError as error:
            raise DataError(str(error)) from error
    if data == "wikitext-2":
        return _load_wikitext(data_dir)
    return _load_path(Path(data))


def _text_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(item for item in path.rglob("*") if item.is_file() and item.suffix.lower() in _TEXT_SUFFIXES)
    if not found:
        raise DataError(f"--data {path}: the folder holds no text file ({', '.join(sorted(_TEXT_SUFFIXES))})")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _load_path(path: Path) -> Corpus:
    root = path if path.is_dir() else path.parent
    documents: list[Document] = []
    for item in _text_files(path):
        documents.extend(cut(item.relative_to(root).as_posix(), _read(item)))
    return Corpus(path.name, f"text files at {path}", tuple(documents))


def _wikitext_paths(folder: Path) -> dict[str, Path]:
    paths = {}
    for split, stem in _WIKITEXT_FILES.items():
        candidates = [folder / f"{stem}{suffix}" for suffix in _WIKITEXT_SUFFIXES]
        present = [candidate for candidate in candidates if candidate.is_file()]
        if not present:
            raise DataError(f"{folder} has no {stem}.raw; {_WIKITEXT_HELP}")
        paths[split] = present[0]
    return paths


def _load_wikitext(folder: Path | None) -> Corpus:
    if folder is not None:
        parts = {split: _read(path) for split, path in _wikitext_paths(folder).items()}
        source = f"raw files in {folder}"
    else:
        parts = _download_wikitext()
        source = "datasets: Salesforce/wikitext, wikitext-2-raw-v1"
    documents = tuple(Document(f"wikitext-2/{split}", text, split) for split, text in parts.items())
    return Corpus("wikitext-2", source, documents)


def _download_wikitext() -> dict[str, str]:
    import datasets  # an optional library, absence of which check_source reports

    try:
        loaded = datasets.load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1")
    except Exception as error:  # the library raises many kinds for "no network"; all mean the same to the user
        raise DataError(
            f"wikitext-2 could not be fetched ({type(error).__name__}: {error}); {_WIKITEXT_HELP}"
        ) from error
    return {split: "".join(loaded[split]["text"]) for split in ("train", "validation", "test")}
