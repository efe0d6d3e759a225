"""Where Triton's kernels run, and the reason given where they do not."""

from __future__ import annotations

import pytest
import torch

from octavo.kernels import triton_support
from octavo.kernels.triton_support import device_reasons

CUDA = torch.device("cuda", 0)


def on_a_card(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool = True) -> list[str]:
    monkeypatch.setattr(triton_support, "_capability", lambda index: capability)
    monkeypatch.setattr(triton_support, "triton_is_installed", lambda: installed)
    return device_reasons(CUDA)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_hopper_and_later_run_them(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert on_a_card(monkeypatch, capability) == []


@pytest.mark.parametrize("capability", [(8, 9), (8, 0), (7, 5)])
def test_ada_and_earlier_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    (reason,) = on_a_card(monkeypatch, capability)
    assert reason.startswith(f"compute capability {capability[0]}.{capability[1]}: exact FP8 conversion needs 9.0")


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_a_card(monkeypatch, (9, 0), installed=False) == ["Triton is not installed: pip install octavo[gpu]"]


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_other_devices_are_named(device: str) -> None:
    assert device_reasons(torch.device(device)) == [f"the tensor is on {device}: Triton kernels need a CUDA device"]
