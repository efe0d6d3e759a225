"""Advice for one Linear: its figures are those of the model of the card, and its sentences follow from them."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.bench.advice import AdviceError, ShapeAdvice, card_named, methods_named, shape_advice
from octavo.conversion.card import H100, H200
from octavo.conversion.gain import METHODS, expected_gain

H200_CHOSEN = card_named("h200")


def advice(m: int, k: int, n: int, recipe: str | None = None, *, bias: bool = False) -> ShapeAdvice:
    return shape_advice((m, k, n), H200_CHOSEN, methods_named(recipe), bias=bias)


def test_a_large_linear_gains_with_every_recipe() -> None:
    found = advice(16384, 4096, 14336)
    assert [one.recipe for one in found.methods] == ["delayed", "current", "rowwise", "block"]
    for one in found.methods:
        assert one.gain == pytest.approx(expected_gain(4096, 14336, 16384, method=METHODS[one.recipe]))
        assert one.gain == pytest.approx(found.bf16_us / one.fp8_us)
    assert found.best.recipe == "delayed"
    [sentence] = found.sentences
    figures = f"{found.best.gain:.2f}x BF16's speed with delayed scaling, {found.best.fp8_us:.0f} us"
    assert sentence == f"FP8 gains: {figures} against {found.bf16_us:.0f}."


def test_few_tokens_lose_and_are_told_from_where_on_they_gain() -> None:
    found = advice(64, 4096, 4096)
    [one] = [one for one in found.methods if one.recipe == "delayed"]
    assert one.gain < 1
    assert one.smallest_tokens is not None
    assert advice(one.smallest_tokens, 4096, 4096, "delayed").best.gain > 1
    assert advice(one.smallest_tokens - 1, 4096, 4096, "delayed").best.gain <= 1
    assert found.sentences[0].startswith("FP8 does not gain: at best 0.61x BF16's speed with delayed scaling")
    assert found.sentences[1] == f"With K and N as they are it gains from {one.smallest_tokens} tokens on (delayed)."


def test_narrow_ones_never_gain_and_are_told_which_squares_do() -> None:
    found = advice(8192, 64, 64)
    assert {one.smallest_tokens for one in found.methods} == {None}
    square = found.best.smallest_square
    assert square is not None
    assert advice(square, square, square, found.best.recipe).best.gain > 1
    assert f"Square Linears gain from {square} on" in found.sentences[1]


def test_a_recipe_that_loses_where_another_gains_is_named() -> None:
    found = advice(8192, 1280, 1280)
    losing = [one.recipe for one in found.methods if one.gain <= 1]
    assert losing == ["rowwise", "block"]
    assert "Not with every recipe: rowwise, block would be slower than BF16." in found.sentences


def test_a_gain_within_noise_is_called_so() -> None:
    found = advice(8192, 1280, 1280, "current")
    assert 1 < found.best.gain < 1.05
    assert found.sentences[0].startswith("FP8 hardly gains: 1.02x")


def test_sizes_that_pad_and_work_that_the_host_outlasts_are_said() -> None:
    said = " ".join(advice(256, 1000, 1000).sentences)
    assert "--in and --out no multiple of 16" in said
    assert "In eager mode the host decides" in said
    assert "host" not in " ".join(advice(16384, 4096, 4096).sentences)


def test_a_bias_counts() -> None:
    assert advice(8192, 1280, 5120, bias=True).bf16_us > advice(8192, 1280, 5120).bf16_us


@pytest.mark.parametrize(
    ("shape", "option"), [((0, 1, 1), "--tokens 0"), ((1, -3, 1), "--in -3"), ((1, 1, 0), "--out 0")]
)
def test_a_size_below_one_is_refused(shape: tuple[int, int, int], option: str) -> None:
    with pytest.raises(AdviceError, match=f"{option}: a size is 1 or more"):
        shape_advice(shape, H200_CHOSEN, methods_named(None))


def test_cards_by_name() -> None:
    assert card_named("H100").card == H100
    assert card_named("h200", 100).card == dataclasses.replace(H200, memory_gib=100)
    with pytest.raises(AdviceError, match="--device 'a100' is unknown: there is a model of h200, h100; auto"):
        card_named("a100")
    for memory in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(AdviceError, match="give the card's memory in GiB"):
            card_named("h200", memory)


class Properties:
    total_memory = 100 << 30


@pytest.mark.parametrize(
    ("name", "capability", "card", "remark"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100", "not measured"),
        ("NVIDIA H200", (9, 0), "H200", "measured: NVIDIA H200"),
        ("NVIDIA L40S", (8, 9), "NVIDIA L40S (as an H200)", "NVIDIA L40S is not known: rates are an H200's"),
    ],
)
def test_auto_takes_the_card_at_hand(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], card: str, remark: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    chosen = card_named("auto")
    assert (chosen.card.name, chosen.card.memory_gib) == (card, 100.0)
    assert chosen.remark.startswith(remark)


def test_auto_refuses_a_card_without_fp8_and_says_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_named("auto").card == H200
    assert card_named("auto").remark.startswith("no GPU here: the advice is for an H200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    with pytest.raises(AdviceError, match="NVIDIA A100 has no FP8 units"):
        card_named("auto")


def test_recipes_by_name() -> None:
    assert [one.name for one in methods_named(None)] == list(METHODS)
    assert [one.name for one in methods_named("Block, delayed,block")] == ["block", "delayed"]
    with pytest.raises(AdviceError, match="--recipe names 'mxfp8', which is unknown: there are delayed"):
        methods_named("mxfp8")
    with pytest.raises(AdviceError, match="names none"):
        methods_named(",")
    with pytest.raises(AdviceError, match="--saved-weight 'bf16' is unknown: there are fp8, high_precision"):
        methods_named(None, "bf16")


def test_weights_that_are_cast_again_cost_time_and_it_is_said() -> None:
    card, shape = card_named("h200"), (4096, 4096, 14336)
    once, again = (
        shape_advice(shape, card, methods_named("delayed,current", how)) for how in ("fp8", "high_precision")
    )
    # A read of 2 bytes at the cast's share of copying; of a measured scale its amax too.
    reads = (2 / 0.92, 2 / 0.92 + 2 / 0.98)
    for first, second, read, launches in zip(once.methods, again.methods, reads, (1, 2), strict=True):
        more = 4096 * 14336 * read / card.card.copy + launches * card.card.pass_overhead
        assert second.fp8_us - first.fp8_us == pytest.approx(more * 1e6)
    assert [one for one in again.sentences if one not in once.sentences][-1].startswith("With saved_weight=")
    assert not any("saved_weight" in one for one in once.sentences)
