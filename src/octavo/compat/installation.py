"""`install`: another library's import names in `sys.modules`, and answers for its distribution.

After `octavo.compat.install("transformer_engine")`, `import transformer_engine.pytorch as te` finds Octavo's names, and
so does `importlib.metadata.version("transformer-engine")`, which integrations ask before they use a library.

The modules are the very ones of `octavo.compat`, under a second name: a switch set in one is set in the other.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

_TE = "octavo.compat.transformer_engine"
_FLOAT8 = "octavo.compat.float8_experimental"


@dataclass(frozen=True)
class Library:
    """What stands for another library.

    Attributes:
        distribution: its name on the package index.
        version: what is answered for it.
        modules: {import name: module of Octavo}.
    """

    distribution: str
    version: str
    modules: dict[str, str]


LIBRARIES = {
    "transformer_engine": Library(
        "transformer-engine",
        # The first release that has both the names with fp8 in them and those without, as Octavo has.
        "2.9.0",
        {
            "transformer_engine": _TE,
            "transformer_engine.common": f"{_TE}.common",
            "transformer_engine.common.recipe": f"{_TE}.common.recipe",
            "transformer_engine.pytorch": f"{_TE}.pytorch",
            "transformer_engine.pytorch.attention": f"{_TE}.pytorch.attention",
            "transformer_engine.pytorch.fp8": f"{_TE}.pytorch.fp8",
            "transformer_engine.pytorch.optimizers": f"{_TE}.pytorch.optimizers",
            "transformer_engine.pytorch.quantization": f"{_TE}.pytorch.quantization",
            "quickstart_utils": "octavo.compat.quickstart_utils",
        },
    ),
    "float8_experimental": Library(
        "float8_experimental",
        # The only version that it ever had.
        "0.0.1",
        {
            "float8_experimental": _FLOAT8,
            "float8_experimental.config": f"{_FLOAT8}.config",
            "float8_experimental.float8_dynamic_linear": f"{_FLOAT8}.float8_dynamic_linear",
            "float8_experimental.float8_linear": f"{_FLOAT8}.float8_linear",
            "float8_experimental.float8_linear_utils": f"{_FLOAT8}.float8_linear_utils",
        },
    ),
}


def install(library: str) -> None:
    """Let imports of `library` find Octavo's names; doing it twice is no error.

    Args:
        library: "transformer_engine" (with its documentation's `quickstart_utils`) or "float8_experimental".

    Raises:
        ValueError: an unknown name.
        RuntimeError: the library itself is imported already; part of the program would hold its classes.
    """
    chosen = _known(library)
    modules = {name: importlib.import_module(target) for name, target in chosen.modules.items()}
    for name, module in modules.items():
        present = sys.modules.get(name)
        if present is not None and present is not module:
            where = getattr(present, "__file__", None) or "memory"
            raise RuntimeError(
                f"{name} is already imported, from {where}: call octavo.compat.install({library!r}) before anything"
                " imports it, or use octavo.compat's own import lines"
            )
    sys.modules.update(modules)
    _FINDER.installed[library] = chosen
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def uninstall(library: str) -> None:
    """Undo `install`; what was imported in between keeps working. Without an `install` nothing happens.

    Raises:
        ValueError: an unknown name.
    """
    chosen = _known(library)
    for name, target in chosen.modules.items():
        if name in sys.modules and sys.modules[name] is sys.modules.get(target):
            del sys.modules[name]
    _FINDER.installed.pop(library, None)
    if not _FINDER.installed and _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)


class _Distribution(importlib.metadata.Distribution):
    """Metadata of a library that Octavo stands for."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def read_text(self, filename: str) -> str | None:
        """Name, version and a word on who answers; the import names."""
        if filename == "METADATA":
            return (
                f"Metadata-Version: 2.1\nName: {self._library.distribution}\nVersion: {self._library.version}\n"
                "Summary: Octavo, under this library's names\n"
            )
        if filename == "top_level.txt":
            return "".join(f"{name}\n" for name in self._library.modules if "." not in name)
        return None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Below Octavo's own folder."""
        return Path(__file__).parent / path


_ANY = importlib.metadata.DistributionFinder.Context()


class _Finder(importlib.metadata.DistributionFinder):
    """Finds metadata of installed names, and modules never: those are in `sys.modules`."""

    def __init__(self) -> None:
        self.installed: dict[str, Library] = {}

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> None:
        """None: whatever is not in `sys.modules` is not ours."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context = _ANY
    ) -> Iterable[importlib.metadata.Distribution]:
        """The libraries asked for; all of them if no name is given."""
        for library in self.installed.values():
            if context.name is None or _normal(context.name) == _normal(library.distribution):
                yield _Distribution(library)


_FINDER = _Finder()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _known(library: str) -> Library:
    if library not in LIBRARIES:
        raise ValueError(f"no names for {library!r}: octavo.compat stands for {', '.join(LIBRARIES)}")
    return LIBRARIES[library]
