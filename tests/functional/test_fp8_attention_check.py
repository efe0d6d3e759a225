"""benchmarks/check_fp8_attention.py: what of it runs without a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks import check_fp8_attention
from torch import Tensor

from octavo.kernels import fp8_attention as kernel


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_fp8_attention, "DEVICE", "cpu")


def test_the_reference_passes_where_it_is_compared_with_itself_and_another_result_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_fp8_attention.agrees((9, 140), 64, True)["ok"]
    assert check_fp8_attention.bias(300) == {"ok": True, "relative": 0.0}
    own = kernel.fp8_attention

    def smaller(*arguments: Any) -> tuple[Tensor, Tensor, Any]:
        out, lse, codes = own(*arguments)
        return (out.float() * 0.96).to(out.dtype), lse, codes

    monkeypatch.setattr(kernel, "fp8_attention", smaller)
    assert not check_fp8_attention.bias(300)["ok"]
    with pytest.raises(AssertionError):
        check_fp8_attention.agrees((9, 140), 64, True)


def test_accuracy_is_beside_that_of_emulated_operands() -> None:
    found = check_fp8_attention.accuracy("normal", True, 200)
    assert found["ok"]
    assert found["bf16_db"][0] > 50 > 30 > found["emulated_db"][0] > found["fp8_db"][0] > 24


def test_heads_of_80_features_are_timed_as_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(calls: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
        return {name: float(call().isfinite().all()) for name, call in calls.items()}

    monkeypatch.setattr(check_fp8_attention, "seconds_of", once)
    monkeypatch.setattr(check_fp8_attention, "EMULATED_SHAPE", (2, 2, 16, 80))
    found = check_fp8_attention.emulated_speed(True)
    assert found["ok"]
    assert found["emulated ms"] == found["bf16 ms"] == 1000.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so() -> None:
    assert check_fp8_attention.main([]) == 2
