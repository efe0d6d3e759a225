"""Libraries of the ``study`` extra, imported when needed and named when absent."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """The module ``module``; ModuleNotFoundError that says how to install it when it is absent."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        root = module.partition(".")[0]
        if error.name is not None and error.name.partition(".")[0] != root:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs {root}, which is not installed: pip install octavo[study]", name=root
        ) from error
