"""The folder of a run: whether it can be made and written, and how a start that is refused leaves none behind."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from octavo.study.progress import StudyInterrupted
from octavo.study.resuming import PreflightError
from octavo.study.run import RECORD, SETTINGS, TOKENIZER, TOKENS


def existing_parent(folder: Path) -> Path:
    """The nearest folder at or above `folder` that exists, found writable; makes nothing.

    Raises PreflightError when it is no folder or cannot be written.
    """
    place = folder.absolute()
    try:
        while not place.exists():
            place = place.parent
        with tempfile.TemporaryFile(dir=place) as file:  # a file without a name, where the system knows such
            file.write(b"1")
    except OSError as error:
        raise PreflightError(
            f"--out {folder} cannot be written ({place}: {error.strerror}); choose another folder"
        ) from error
    return place


@contextlib.contextmanager
def undone_if_refused(folder: Path) -> Iterator[None]:
    """Make `folder` for a start that has nothing to lose yet; if the body fails, take away what the start wrote.

    Files of others stay, and so do folders that were there before. An interrupted start is kept, to be resumed.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PreflightError(f"--out {folder} cannot be made ({error.strerror}); choose another folder") from error
    try:
        yield
    except StudyInterrupted:
        raise
    except Exception:
        for name in (SETTINGS, RECORD, TOKENIZER, TOKENS):
            (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # one that is not empty ends it: those above are not empty either
            for place in made:
                place.rmdir()
        raise
