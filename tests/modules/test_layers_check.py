"""The check of the layers on a GPU notices what it is there for; here on a CPU, where both sides are emulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks import check_layers, check_norm_backward
from torch import nn

LAYER = "LayerNormLinear"


def test_emulation_notices_half_a_decibel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_layers.emulation("cpu", LAYER, "current")["ok"]
    real, calls = check_layers.step, []

    def step(*arguments: Any) -> Any:
        calls.append(arguments)
        found = real(*arguments)
        if len(calls) > 4:  # the reference, three steps emulated, and then the device's
            # FP8 of E4M3 is 2.6 % off; as much again costs 3 dB.
            found["y"] = found["y"] * (1 + 0.03 * torch.randn(found["y"].shape))
        return found

    monkeypatch.setattr(check_layers, "step", step)
    result = check_layers.emulation("cpu", LAYER, "current")
    assert not result["ok"]
    assert result["of"] == "y"


def test_parts_with_another_weight_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_layers.composed("cpu", LAYER, "current") == {"ok": True, "differing": 0, "worst": 0.0}
    real = check_layers.composition_of

    def other(layer: nn.Module) -> nn.Module:
        parts: Any = real(layer)
        with torch.no_grad():
            parts.fc1.weight[0, 0] += 0.5
        return parts

    monkeypatch.setattr(check_layers, "composition_of", other)
    assert not check_layers.composed("cpu", LAYER, "current")["ok"]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_one_bit_of_a_gradient_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_norm_backward.exact_gradients("cpu", kind, torch.float32)["mismatches"] == 0
    real = check_norm_backward.norm_backward

    def off(*arguments: Any) -> Any:
        dx, dweight, dbias = real(*arguments)
        dx[3, 5] = torch.nextafter(dx[3, 5], torch.tensor(float("inf")))
        return dx, dweight, dbias

    monkeypatch.setattr(check_norm_backward, "norm_backward", off)
    assert check_norm_backward.exact_gradients("cpu", kind, torch.float32)["mismatches"] == 1


def test_every_layer_and_every_check_has_its_part() -> None:
    assert {name.split()[0] for name in check_layers.PARTS} == {
        "norm_backward", "emulation", "composed", "graphed", "no", "compiled",
    }  # fmt: skip
    kinds = {name.split()[0] for name in check_layers.LAYERS}
    assert kinds == {"LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer", "GroupedLinear"}


def test_without_a_device_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_layers.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err
