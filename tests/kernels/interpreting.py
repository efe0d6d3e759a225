"""Triton's interpreter for tests of kernels: in a process of its own, with conversions that round as instructions do.

Triton decides at import whether it interprets, so tests marked `interpreted` run in a call of pytest of their own, with
TRITON_INTERPRET=1 (`./dev test` makes both; tests/conftest.py parts the tests). The interpreter's conversions to eight
bits and to bfloat16 cut off or round half up, and that from bfloat16 knows no subnormals; in their place stand Octavo's
cast, which tests/formats holds to ml_dtypes, and torch's conversions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.formats import E4M3, E5M2, cast_float32

interpreted = pytest.mark.interpreted
# The interpreter computes in numpy, which warns of what a GPU does in silence.
silent = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


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

    patch_once_a_launch(monkeypatch)
    monkeypatch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(builder, "cast_impl", cast_impl)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)


def patch_once_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each function that a kernel calls put the interpreter into Triton's language once a launch.

    Every call does by itself, in a third of a kernel's time.
    """
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_once(function: Any) -> Any:
        # Only the launch, whose kernel is the first function, takes back what it is given here.
        if function in done:
            return None
        done.add(function)
        return patch(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> None:
        done.clear()
        launch(self, *arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_anew)
