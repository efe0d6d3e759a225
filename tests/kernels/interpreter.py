"""Triton's interpreter with a right conversion to eight bits, for tests of kernels on a machine without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.formats import E4M3, E5M2, cast_float32


def convert_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put Octavo's reference in the place of the interpreter's own conversion, which neither rounds nor saturates."""
    import triton.language as tl
    from triton.runtime import interpreter

    formats, convert = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}, interpreter.InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        format = formats.get(target.scalar)
        if format is None or source.dtype.scalar != tl.float32:
            return convert(self, source, target, rounding)
        codes = cast_float32(torch.from_numpy(source.data.copy()), format).view(torch.uint8).numpy()
        return interpreter.TensorHandle(codes, target.scalar)

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        # Triton 3.6 makes a number of an array of one element by `int`, which numpy 2.4 refuses.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_with_index)
