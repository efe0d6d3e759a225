"""A model that is converted before it moves: the report says what the choice would have been where it goes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import octavo
from octavo.conversion.elsewhere import card_at_hand
from octavo.recipes import CurrentScaling

CARD = "octavo.conversion.elsewhere.card_at_hand"


def model(device: str) -> nn.Sequential:
    """Two layers that FP8 slows down on a GPU (one for its size, one for its padding), and one that gains."""
    return nn.Sequential(
        nn.Linear(64, 64, device=device), nn.Linear(767, 64, device=device), nn.Linear(4096, 4096, device="meta")
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_beside_a_card_the_report_counts_what_it_would_leave_out(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CARD, lambda: "NVIDIA H200")
    expected = "2 of these layers would be left out on NVIDIA H200: move the model first, then convert"
    for dry_run in (True, False):
        report = octavo.convert(model(device), dry_run=dry_run)
        assert len(report.converted) == 3
        assert [remark for remark in report.remarks if expected in remark]
        assert expected in str(report)
    kept_out = octavo.convert(model(device), CurrentScaling(overrides={"^0$": None}))
    assert any("1 of these layers would be left out" in remark for remark in kept_out.remarks)


def test_on_meta_without_a_card_any_gpu_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CARD, lambda: None)
    report = octavo.convert(model("meta"))
    assert [text for text in report.remarks if text.startswith("2 of these layers would be left out on a GPU with FP8")]


def test_on_a_cpu_alone_the_report_says_that_nothing_was_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CARD, lambda: None)
    report = octavo.convert(model("cpu"))
    (remark,) = report.remarks
    assert remark.startswith("the default filter leaves no layer out for its speed on cpu, and its choice stays when")
    assert str(report).count("for its speed") == 1


@pytest.mark.parametrize("card", ["NVIDIA H200", None])
def test_no_remark_where_the_choice_is_the_users_or_would_be_the_same(
    card: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CARD, lambda: card)
    assert octavo.convert(model("cpu"), filter="all").remarks == ()
    assert octavo.convert(nn.Linear(4096, 4096, device="meta")).remarks == ()
    monkeypatch.setattr("octavo.conversion.selection.device_reasons", lambda device: [])
    assert octavo.convert(model("cpu")).remarks == (), "as on the device itself: it was weighed"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is so without a CUDA device")
def test_no_card_without_a_cuda_device() -> None:
    assert card_at_hand() is None


@pytest.mark.gpu
def test_a_model_that_is_moved_afterwards_keeps_what_a_moved_one_leaves_out() -> None:
    """The remark tells the difference between the two orders, on the card itself."""
    before, after = model("cpu"), model("cpu")[:2].cuda()
    remarks = octavo.convert(before).remarks
    assert any(f"2 of these layers would be left out on {torch.cuda.get_device_name()}" in remark for remark in remarks)
    with pytest.warns(UserWarning, match="NOTHING WAS CONVERTED"):
        assert len(octavo.convert(after).skipped) == 2
