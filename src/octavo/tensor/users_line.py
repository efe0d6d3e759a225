"""`warn_user`: a warning that names a line of the user's, however many calls of Octavo's and torch's lie between.

`stacklevel` is a number, and a layer is called through torch's own frames, by containers and wrapped steps of
optimizers; `skip_file_prefixes` of `warnings.warn` does the same from Python 3.12 on.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch

_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent))


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither Octavo's nor torch's; at the outermost line if all are."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
