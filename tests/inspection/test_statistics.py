"""`octavo.inspection.statistics` on data whose figures are known."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.inspection import statistics


def test_case_5_underflow_counts_what_was_flushed_and_not_what_was_zero() -> None:
    """Case 5: 30 % exact zeros, 10 % flushed to +0, 10 % to -0: reported 20 %."""
    x = torch.ones(1000)
    x[:300] = 0.0
    x[300:400], x[400:500] = 1e-9, -1e-9
    q = octavo.quantize(x, octavo.E4M3)
    flushed = q.codes.view(torch.uint8)[300:500]
    assert flushed[:100].tolist() == [0x00] * 100
    assert flushed[100:].tolist() == [0x80] * 100
    seen = statistics(x, q)
    assert seen.underflow == pytest.approx(0.2)
    assert seen.saturation == 0
    assert seen.amax == 1.0
