"""The embedded data set: the English text that ships with every CPython.

Two sources, both read as source code with `ast`, so nothing is imported and nothing can run:
`pydoc_data/topics.py` (the language reference as `help()` shows it), and the docstrings of the standard library.
Packages that distributions leave out or install separately (tests, IDLE, tkinter, ensurepip …) are left out, and so
are files generated for one machine; the rest is the same for every build of one Python version.
"""

from __future__ import annotations

import ast
import inspect
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from octavo.study.documents import Corpus, Document

_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "distutils",
        "ensurepip",
        "idlelib",
        "lib-dynload",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
        "venv",
    }
)
_SHORTEST = 40  # characters; shorter docstrings are labels, not text


def load_python_documentation(root: Path | None = None) -> Corpus:
    """Gather the documentation below `root` (the running Python's standard library by default).

    One document a topic and one a source file, sorted by path; a text that occurred before is dropped. Raises
    FileNotFoundError when the folder holds no documentation, as in stripped installations.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    seen: set[str] = set()
    documents = [*_topics(root, seen), *_docstrings(root, seen)]
    if not documents:
        raise FileNotFoundError(
            f"no documentation found below {root}: this Python was installed without its sources; "
            "use --data PATH with text files of your own"
        )
    return Corpus("docs", "documentation of CPython: pydoc topics and docstrings of the library", tuple(documents))


def _topics(root: Path, seen: set[str]) -> Iterator[Document]:
    path = root / "pydoc_data" / "topics.py"
    if not path.is_file():
        return
    tree = _parse(path)
    literals = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)] if tree else []
    topics: dict[str, str] = ast.literal_eval(literals[0]) if literals else {}
    for name, text in sorted(topics.items()):
        if text.strip() and text not in seen:
            seen.add(text)
            yield Document(f"topic/{name}", text.strip() + "\n")


def _docstrings(root: Path, seen: set[str]) -> Iterator[Document]:
    for path in sorted(_source_files(root), key=lambda item: item.relative_to(root).as_posix()):
        tree = _parse(path)
        if tree is None:
            continue
        parts = []
        for node in ast.walk(tree):
            if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
            if len(text) >= _SHORTEST and text not in seen:
                seen.add(text)
                parts.append(text)
        if parts:
            yield Document(f"module/{path.relative_to(root).as_posix()}", "\n\n".join(parts) + "\n")


def _source_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            if entry.name not in _LEFT_OUT and not entry.name.startswith("config-"):
                yield from _source_files(entry)
        elif entry.suffix == ".py" and not entry.name.startswith("_sysconfigdata"):
            yield entry


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in others' sources are no concern of the reader
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None  # unreadable, or written for another Python: not text that this Python ships
