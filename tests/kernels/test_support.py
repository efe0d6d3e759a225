"""`octavo.is_supported`: an answer for every device, with its reasons."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.kernels import support, triton_support
from octavo.kernels.scaled_mm import native

FEATURES: list[support.Feature] = ["fp8_products", "block_products", "triton_kernels"]


def cards(monkeypatch: pytest.MonkeyPatch, *capabilities: tuple[int, int], current: int = 0) -> None:
    """A machine with CUDA devices of these compute capabilities, or with none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    for module in (native, triton_support):
        monkeypatch.setattr(module, "_capability", lambda index: capabilities[index])
    monkeypatch.setattr(triton_support, "triton_is_installed", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.9")


@pytest.mark.parametrize("what", FEATURES)
def test_hopper_runs_all_of_it(monkeypatch: pytest.MonkeyPatch, what: support.Feature) -> None:
    cards(monkeypatch, (9, 0))
    for device in (None, "cuda", "cuda:0", torch.device("cuda", 0)):
        answer = octavo.is_supported(what, device)
        assert answer
        assert answer.reasons == ()
        assert str(answer) == f"{what}: supported"


def test_ada_multiplies_and_does_not_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (8, 9))
    assert octavo.is_supported("fp8_products")
    answer = octavo.is_supported("triton_kernels")
    assert not answer
    assert "compute capability 8.9" in str(answer)


def test_products_by_block_are_hoppers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, (10, 0), (9, 0))
    assert octavo.is_supported("fp8_products", "cuda:0")
    (reason,) = octavo.is_supported("block_products", "cuda:0").reasons
    assert reason.startswith("compute capability 10.0")
    assert octavo.is_supported("block_products", "cuda:1")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert octavo.is_supported("block_products", "cuda:1").reasons == (
        "CUDA 12.8: products with scales by block need 12.9 or later",
    )


@pytest.mark.parametrize("what", FEATURES)
def test_ampere_runs_none_of_it(monkeypatch: pytest.MonkeyPatch, what: support.Feature) -> None:
    cards(monkeypatch, (8, 0))
    (reason,) = octavo.is_supported(what).reasons
    assert reason.startswith("compute capability 8.0")


@pytest.mark.parametrize("what", FEATURES)
def test_the_current_device_is_asked_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, what: support.Feature
) -> None:
    cards(monkeypatch, (8, 0), (9, 0), current=1)
    assert octavo.is_supported(what)
    assert octavo.is_supported(what, "cuda")
    assert not octavo.is_supported(what, "cuda:0")


@pytest.mark.parametrize("what", FEATURES)
def test_devices_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, what: support.Feature) -> None:
    cards(monkeypatch)
    assert octavo.is_supported(what, "cuda").reasons == ("no CUDA device is available",)
    (reason,) = octavo.is_supported(what).reasons
    assert reason in ("cpu has no FP8 matrix units", "the tensor is on cpu: Triton kernels need a CUDA device")
    cards(monkeypatch, (9, 0), (9, 0))
    assert octavo.is_supported(what, "cuda:2").reasons == ("there is no cuda:2: CUDA devices here are 0 to 1",)


@pytest.mark.parametrize("what", FEATURES)
@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_other_devices_say_why(what: support.Feature, device: str) -> None:
    answer = octavo.is_supported(what, device)
    assert not answer
    assert device in answer.reasons[0]
    assert str(answer) == f"{what}: {answer.reasons[0]}"


def test_every_reason_is_shown() -> None:
    assert str(octavo.Support("fp8_products", ("one", "two"))) == "fp8_products: one; two"


def test_unknown_features_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown feature 'fp4': expected 'fp8_products', 'block_products', 'mx_products', 'tri"
    ):
        octavo.is_supported("fp4", "cuda:99")


def test_products_under_mx_scales_are_native_nowhere() -> None:
    assert "on every device" in octavo.is_supported("mx_products", "cpu").reasons[1]


@pytest.mark.gpu
@pytest.mark.parametrize("what", FEATURES)
def test_on_a_real_card(what: support.Feature) -> None:
    assert bool(octavo.is_supported(what)) == (
        torch.cuda.get_device_capability() >= ((8, 9) if what == "fp8_products" else (9, 0))
    )
