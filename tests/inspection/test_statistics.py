"""`octavo.inspection.statistics` on data whose figures are known."""

from __future__ import annotations

import pytest
import torch

import octavo
import octavo.inspection
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


def test_case_3_an_outlier_under_a_stale_scale_is_counted() -> None:
    """Case 3: what clips is counted, step by step."""
    layer = octavo.Linear(64, 32)
    saturation = []
    for size in (1, 1, 1, 1000, 1, 1):
        with octavo.inspection.watch(layer) as seen, octavo.autocast(recipe=octavo.recipes.DelayedScaling()):
            layer(torch.randn(64, 64) * size)
        saturation.append(seen.statistics["(root)", "input"].saturation)
    # randn * 1000 under a scale for about 4: beyond it lie all but the values below 0.4 %.
    assert saturation[3] > 0.99
    assert max(saturation[4:]) == 0
    assert max(saturation[:3]) < 0.01
