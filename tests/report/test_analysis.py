"""Gaps and shares from literal rows: every expected figure is worked out by hand in the test."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.report.analysis import (
    NO_GAP_KNOWN,
    NO_LOSS_KNOWN,
    NOTHING_LOST,
    WHY_NO_SHARE,
    WITHIN_SPREAD,
    factor,
    finetune_results,
    ptq_results,
    recovered_share,
)
from octavo.report.methods import counterpart, method, without_training
from octavo.report.record import Record
from octavo.report.wording import Spread

Row = dict[str, Any]


def ptq(method: str, perplexity: float | None, seed: int = 0, **more: Any) -> Row:
    return {"kind": "ptq", "method": method, "perplexity": perplexity, "seed": seed, "execution": "emulated", **more}


def tuned(method: str, perplexity: float, seed: int = 0, **more: Any) -> Row:
    return {
        "kind": "finetune",
        "method": method,
        "perplexity": perplexity,
        "seed": seed,
        "execution": "emulated",
        **more,
    }


def test_change_is_taken_within_each_seed() -> None:
    rows = [ptq("bf16", 20.0, 0), ptq("bf16", 40.0, 1), ptq("rowwise", 20.2, 0), ptq("rowwise", 41.2, 1)]
    change = ptq_results(Record(rows))[1].change_percent
    # seed 0: +1 %, seed 1: +3 %; across seeds it would be (30.7 / 30 - 1) = 2.33 %
    assert change is not None
    assert change.mean == pytest.approx(2.0)
    assert change.deviation == pytest.approx(2**0.5)


def test_a_seed_without_its_own_baseline_is_not_compared() -> None:
    rows = [ptq("bf16", 20.0, 0), ptq("rowwise", 20.2, 0), ptq("rowwise", 99.0, 1)]
    result = ptq_results(Record(rows))[1]
    assert result.change_percent is not None
    assert result.change_percent.mean == pytest.approx(1.0)
    assert result.change_percent.count == 1
    assert result.perplexity is not None
    assert result.perplexity.count == 2


def test_order_is_16_bits_then_fp8_then_integers() -> None:
    rows = [ptq(key, 20.0) for key in ("int4", "rowwise", "int8", "bf16", "tensor_static")]
    found = [result.method.key for result in ptq_results(Record(rows))]
    assert found == ["bf16", "tensor_static", "rowwise", "int8", "int4"]


def test_recovered_share_compares_each_with_its_own_16_bits() -> None:
    rows = [ptq("bf16", 20.0), ptq("rowwise", 20.2), tuned("bf16", 10.0), tuned("rowwise", 10.02)]
    result = finetune_results(Record(rows))[1]
    # before: +1 %, after: +0.2 %, so 80 % of it is gone
    assert result.gap_percent is not None
    assert result.gap_percent.mean == pytest.approx(0.2)
    assert result.gap_absolute is not None
    assert result.gap_absolute.mean == pytest.approx(0.02)
    assert result.recovered == pytest.approx(0.8)


def test_share_is_a_ratio_of_means_over_seeds() -> None:
    rows = [ptq("bf16", 100.0, seed) for seed in (0, 1)] + [ptq("rowwise", 101.0, 0), ptq("rowwise", 103.0, 1)]
    rows += [tuned("bf16", 100.0, seed) for seed in (0, 1)] + [tuned("rowwise", 100.5, 0), tuned("rowwise", 100.3, 1)]
    # 1 - mean(0.5, 0.3) / mean(1, 3) = 0.8; the mean of the ratios would be 1 - (0.5 + 0.1) / 2 = 0.7
    assert finetune_results(Record(rows))[1].recovered == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("served_as", "before"),
    [("tensor_dynamic", 2.0), ("FP8 tensor, dynamic", 2.0), ("", 1.0), ("a way that was not measured", 1.0)],
)
def test_the_loss_before_is_that_of_the_way_it_is_served(served_as: str, before: float) -> None:
    rows = [
        ptq("bf16", 100.0),
        ptq("tensor_static", 101.0, label="FP8 tensor, static"),
        ptq("tensor_dynamic", 102.0, label="FP8 tensor, dynamic"),
        tuned("bf16", 100.0),
        tuned("delayed", 100.0, served_as=served_as),
    ]
    result = finetune_results(Record(rows))[1]
    assert result.change_before is not None
    assert result.change_before.mean == pytest.approx(before)


@pytest.mark.parametrize(
    ("before", "after", "share", "why"),
    [
        (Spread(1.0, 0.1, 3), Spread(0.1, 0.1, 3), 0.9, ""),
        (Spread(1.0, None, 1), Spread(-0.5, None, 1), 1.5, ""),
        (Spread(1.0, None, 1), Spread(2.0, None, 1), -1.0, ""),
        (Spread(0.049, None, 1), Spread(0.0, None, 1), None, NOTHING_LOST),
        (Spread(-0.3, None, 1), Spread(0.0, None, 1), None, NOTHING_LOST),
        (Spread(0.2, 0.2, 3), Spread(0.1, 0.1, 3), None, WITHIN_SPREAD),
        (None, Spread(0.1, None, 1), None, NO_LOSS_KNOWN),
        (Spread(1.0, None, 1), None, None, NO_GAP_KNOWN),
    ],
)
def test_a_share_is_given_only_of_a_loss(
    before: Spread | None, after: Spread | None, share: float | None, why: str
) -> None:
    found, reason = recovered_share(before, after)
    assert found == (None if share is None else pytest.approx(share))
    assert reason == why
    assert (reason in WHY_NO_SHARE) == (share is None)


def test_the_way_it_is_served_has_the_name_for_people() -> None:
    rows = [ptq("rowwise", 20.2, label="FP8 by rows"), tuned("rowwise", 10.0, served_as="rowwise")]
    assert finetune_results(Record(rows))[0].served_as == "FP8 by rows"
    rows = [tuned("delayed", 10.0, served_as="tensor_static")]
    assert finetune_results(Record(rows))[0].served_as == "FP8 tensor, static"


def test_16_bits_have_no_gap_to_themselves() -> None:
    result = finetune_results(Record([tuned("bf16", 10.0)]))[0]
    assert result.is_baseline
    assert result.gap_percent is None
    assert (result.recovered, result.recovered_why) == (None, "")


def test_fp16_is_the_baseline_where_there_is_no_bf16() -> None:
    rows = [tuned("fp16", 10.0), tuned("rowwise", 10.1)]
    gap = finetune_results(Record(rows))[1].gap_percent
    assert gap is not None
    assert gap.mean == pytest.approx(1.0)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "27.4", True])
def test_what_is_no_figure_counts_as_absent(value: Any) -> None:
    assert ptq_results(Record([ptq("rowwise", value)]))[0].perplexity is None


def test_factor_is_none_without_both_sides() -> None:
    assert factor(Spread(3.0, None, 1), Spread(2.0, 9.0, 2)) == 1.5
    assert factor(None, Spread(2.0, None, 1)) is None
    assert factor(Spread(1.0, None, 1), Spread(0.0, None, 1)) is None


@pytest.mark.parametrize(
    ("key", "name", "family"),
    [
        ("bf16", "bf16", "16-bit"),
        ("tensor_static", "delayed", "FP8"),
        ("fp8-tensor-dynamic", "current", "FP8"),
        ("FP8 row-wise", "rowwise", "FP8"),
        ("block128", "block", "FP8"),
        ("mxfp8", "mxfp8", "FP8"),
        ("te", "te", "FP8"),
        ("int8", "int8", "INT"),
        ("int4", "int4", "INT"),
    ],
)
def test_forms_of_one_idea_share_a_look(key: str, name: str, family: str) -> None:
    assert counterpart(key) == name
    assert method(key).family == family
    assert method(key).color == method(name).color


def test_known_methods_have_colours_of_their_own() -> None:
    names = ("bf16", "delayed", "current", "rowwise", "block", "mxfp8", "te", "int8", "int4")
    assert len({method(name).color for name in names}) == len(names)


def test_an_unknown_method_keeps_its_name() -> None:
    assert without_training("fp6_of_the_future").label == "fp6_of_the_future"
    assert without_training("tensor_static").label == "FP8 tensor, static"
    assert without_training("tensor_static", "mine").label == "mine"
