"""Amaxes agree across ranks: two processes of a gloo group, against one process on the joined batch."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import scenarios
from tests.distributed.ranks import Ranks
from tests.distributed.scenarios import RECIPES, integer_model, local_batch, one_step

# The first context of one rank imports torch.
pytestmark = pytest.mark.timeout(200)
EQUAL, UNEQUAL = (24, 24), (5, 37)


def scales_only(result: scenarios.Values) -> scenarios.Values:
    return {key: value for key, value in result["scales"].items() if key.endswith("_scale")}


def joined(rows: tuple[int, int] = EQUAL) -> scenarios.Values:
    return one_step(integer_model(), torch.cat([local_batch(0, rows), local_batch(1, rows)]))


@pytest.mark.parametrize("rows", [EQUAL, UNEQUAL])
def test_case_26_scales_are_those_of_the_joined_batch(ranks: Ranks, rows: tuple[int, int]) -> None:
    """Case 26: sum loss, rank 1 sees 100x larger activations."""
    first, second = ranks.run(scenarios.case_26, rows)
    assert first == second == joined(rows)
    assert first["0.input_scale"] == pytest.approx(200 / 448)
    alone = one_step(integer_model(), local_batch(0, rows))
    assert first["0.input_scale"] == pytest.approx(100 * alone["0.input_scale"])
    assert first["1.input_scale"] > 10 * alone["1.input_scale"]


def test_case_26_of_a_converted_model(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.case_26_converted)
    assert first == second
    assert first["0.input_scale"] == pytest.approx(200 / 448)
    assert len(first) == 12, "two entries of three operands of two layers"


@pytest.mark.parametrize("inside", [False, True], ids=["explicit", "context"])
@pytest.mark.parametrize("name", list(RECIPES))
def test_parameters_stay_equal_under_data_parallelism(ranks: Ranks, name: str, inside: bool) -> None:
    first, second = ranks.run(scenarios.data_parallel, name, inside)
    assert first["parameters"] == second["parameters"]
    assert scales_only(first) == scales_only(second), "amaxes of the last backward wait for the next update"
    for before, after in zip(first["before"], first["parameters"], strict=True):
        assert torch.tensor(after).isfinite().all()
        assert before != after, "every parameter has moved"
    expected = [[(6, "max")]] * 3 if RECIPES[name].delayed else [[]] * 3
    assert first["collectives"] == second["collectives"] == expected


def test_a_guard_moves_the_same_layers_on_all_ranks(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.guard_moves_alike)
    assert first["moved"] == second["moved"]
    assert first["moved"][1]
    assert first["moved"][::2] == [[], []]
    assert all("on another rank" in reason for reason in first["reasons"].values())
    assert "underflow" in second["reasons"]["0"]
    assert first["warnings"] == second["warnings"] == len(first["reasons"])


def test_wrapping_does_not_broadcast_the_state(ranks: Ranks) -> None:
    for rank, result in enumerate(ranks.run(scenarios.wrapping_keeps_state)):
        assert result["buffers"] == []
        assert result["before"] == result["after"]
        assert result["after"]["0.input_scale"] == 2.0**rank


def test_one_collective_a_step_for_all_layers_that_agree(ranks: Ranks) -> None:
    for steps in ranks.run(scenarios.one_collective):
        assert steps == [[(12, "max")]] * 2


def test_without_agreement_scales_are_each_ranks_own(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.local_scales)
    assert (first["calls"], second["calls"]) == (0, 0)
    assert second["scales"]["0.input_scale"] == pytest.approx(100 * first["scales"]["0.input_scale"])
    assert first["scales"] == one_step(integer_model(), local_batch(0))


def test_the_group_that_is_given_is_the_one_asked(ranks: Ranks) -> None:
    results = ranks.run(scenarios.groups, False)
    for result in results:
        assert result["calls"] == [(6, "max", True)] * 2, "at the context's exit and at update_scales"
        assert result["scales"] == joined()


def test_a_group_of_one_agrees_with_nobody(ranks: Ranks) -> None:
    """Nor does a rank that is not in the group."""
    for rank, result in enumerate(ranks.run(scenarios.groups, True)):
        assert result["calls"] == []
        assert result["scales"] == one_step(integer_model(), local_batch(rank))


def test_an_exception_calls_no_collective(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.failing_step)
    assert first == second
    assert first["calls"] == 0
    assert {key: first["before"][key] for key in first["during"]} == first["during"]
    assert first["after"]["0.input_scale"] == pytest.approx(200 / 448)


@pytest.mark.parametrize(
    ("converted", "context"),
    [(False, True), (True, False), (True, True)],
    ids=["built", "converted", "converted in context"],
)
@pytest.mark.parametrize("unused", [{1: "b"}, {0: "a", 1: "b"}, {1: "ab"}], ids=["one", "other", "all"])
def test_a_layer_that_one_rank_does_not_use(
    ranks: Ranks, unused: dict[int, str], converted: bool, context: bool
) -> None:
    first, second = ranks.run(scenarios.unused_layer, converted, unused, context)
    assert first == second
    users = {name: [rank for rank in (0, 1) if name not in unused.get(rank, "")] for name in "ab"}
    largest = {name: max(2.0 * 100**rank for rank in ranks) for name, ranks in users.items()}
    for name, amax in largest.items():
        assert first[f"{name}.input"] == pytest.approx(amax / 448)
        assert first[f"{name}.weight"] == pytest.approx((1 if name == "a" else 2) / 448)


def test_a_copy_of_the_model_on_one_rank_is_nobody_elses_business(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.copies_on_one_rank)
    assert first == second
    assert first["0.input_scale"] == pytest.approx(200 / 448)


def test_a_rank_without_tokens(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.zero_tokens)
    assert first == second == one_step(integer_model(), local_batch(1))


def test_compiled_code_agrees_through_the_functional_collective(ranks: Ranks) -> None:
    for result in ranks.run(scenarios.compiled_step):
        assert result["operations"], "the graph holds a collective"
        assert result["eager"] == result["compiled"]
