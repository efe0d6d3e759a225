"""Triton's interpreter for tests of kernels: in a process of its own, with conversions that round as instructions do.

Triton decides at import whether it interprets, so the first test of a file starts a process that runs the others. The
interpreter's conversions to eight bits and to bfloat16 cut off or round half up, and that from bfloat16 knows no
subnormals; in their place stand Octavo's cast, which tests/formats holds to ml_dtypes, and torch's conversions.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.formats import E4M3, E5M2, cast_float32

ROOT = Path(__file__).resolve().parents[2]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.interpreted
compiled_only = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process")
# The interpreter computes in numpy, which warns of what a GPU does in silence.
silent = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


def run_interpreted(file: str) -> None:
    """The tests of `file` that are marked `interpreted`, in a process where Triton interprets."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "interpreted", "--show-capture=no", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter round to nearest even, and know `__index__` where numpy asks for it."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    formats, convert, cast = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}, builder.create_fp_to_fp, builder.cast_impl

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        format = formats.get(target.scalar)
        if format is None or source.dtype.scalar != tl.float32:
            return convert(self, source, target, rounding)
        codes = cast_float32(torch.from_numpy(source.data.copy()), format).view(torch.uint8).numpy()
        return interpreter.TensorHandle(codes, target.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = (source.dtype.scalar, target.scalar)
        if kinds == (tl.bfloat16, tl.float32):
            wide = torch.from_numpy(source.data.copy()).view(torch.bfloat16).float().numpy()
            return interpreter.TensorHandle(wide, target.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(source.data.copy()).to(torch.bfloat16).view(torch.uint16).numpy()
            return interpreter.TensorHandle(rounded, target.scalar)
        return cast(self, source, target)

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes a number of an array of one element by `int`, which numpy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
