"""benchmarks/check_cross_entropy.py: what of it runs without a device."""

from __future__ import annotations

import pytest
import torch
from benchmarks import check_cross_entropy
from tests.modules import test_lm_head


def test_a_gradient_that_is_not_as_close_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_cross_entropy, "measured", lambda recipe, device: test_lm_head.measured(recipe))
    assert check_cross_entropy.close("current")["ok"]
    monkeypatch.setattr(check_cross_entropy, "measured", lambda recipe, device: (30.5, 29.8))
    assert not check_cross_entropy.close("current")["ok"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    assert check_cross_entropy.main([]) == 2
