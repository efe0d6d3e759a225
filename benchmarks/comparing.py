"""Outputs of a kernel against its reference's, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Result = dict[str, Any]


def differing(a: Tensor | None, b: Tensor | None) -> int:
    """How many bytes or floats differ in their bits; another shape or a missing tensor counts as everything."""
    if a is None or b is None:
        return 0 if a is b else 1
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.numel(), b.numel(), 1)
    width = {1: torch.uint8, 4: torch.int32}[a.dtype.itemsize]
    return int((a.contiguous().view(width) != b.to(a.device).contiguous().view(width)).sum())


def compare(outputs: Any, expected: Any) -> Result:
    """Mismatches over all outputs of a kernel."""
    return {"mismatches": sum(differing(a, b) for a, b in zip(outputs, expected, strict=True))}
