"""Delayed scaling against a model written from the rule alone, in float64 and Python lists."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy
import pytest
import torch

from octavo.formats import E4M3, E5M2
from octavo.scaling import resized_history, updated_history
from octavo.scaling.history import AmaxComputeAlgo

SPIKE = 1e6


class Model:
    """One operand: the past, newest last, and a scale; the window is `last` and the past."""

    def __init__(self, length: int, format_max: float, margin: int, choose: Callable[[list[float]], float]) -> None:
        self.past = [0.0] * (length - 1)
        self.scale, self.format_max, self.margin, self.choose = 1.0, format_max, margin, choose

    def update(self, last: float) -> None:
        if last == 0 or not math.isfinite(last):
            return
        amax = self.choose([last, *self.past])
        if amax > 0 and math.isfinite(amax):
            # float64 holds more than twice the bits of float32: rounding its quotient to float32 rounds once.
            exact = float(numpy.float32(amax * 2.0**self.margin / self.format_max))
            self.scale = min(max(exact, 2.0**-126), 2.0**126)
        self.past = [*self.past, last][1:] if self.past else []


def amaxes(count: int) -> list[float]:
    """Amaxes of a run with everything that goes wrong in one; float32 values."""
    drawn = []
    for _ in range(count):
        kind = random.random()
        if kind < 0.08:
            drawn.append(0.0)
        elif kind < 0.12:
            drawn.append(math.inf)
        elif kind < 0.16:
            drawn.append(math.nan)
        elif kind < 0.2:
            drawn.append(SPIKE * random.random())
        elif kind < 0.22:
            drawn.append(2.0**-140)
        else:
            drawn.append(random.lognormvariate(0, 2))
    return [float(numpy.float32(value)) for value in drawn]


def least_positive(window: torch.Tensor) -> torch.Tensor:
    return torch.where(window > 0, window, math.inf).min()


ALGORITHMS: dict[str, tuple[AmaxComputeAlgo, Callable[[list[float]], float]]] = {
    "max": ("max", max),
    "most_recent": ("most_recent", lambda window: window[0]),
    "callable": (least_positive, lambda window: min(value for value in window if value > 0)),
}


@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_two_thousand_updates_are_the_models(length: int, algorithm: str, margin: int) -> None:
    rule, choose = ALGORITHMS[algorithm]
    count, operands = 2000 // 4, 4
    models = [Model(length, E4M3.max, margin, choose) for _ in range(operands)]
    history, scale = torch.zeros(operands, length), torch.ones(operands)
    steps = list(zip(*(amaxes(count) for _ in range(operands)), strict=True))
    for last in steps:
        history[:, 0] = torch.tensor(last)  # where amaxes are gathered; the update is given `last` and clears it
        history, scale = updated_history(
            history, scale, torch.tensor(last), format_max=E4M3.max, margin=margin, algorithm=rule
        )
        for model, value in zip(models, last, strict=True):
            model.update(value)
        assert scale.tolist() == [model.scale for model in models]
        assert history[:, 1:].tolist() == [model.past for model in models]
        assert (history[:, 0] == 0).all()


@pytest.mark.parametrize("length", [1, 2, 3, 16])
def test_a_spike_is_remembered_for_exactly_as_many_updates_as_the_history_is_long(length: int) -> None:
    history, scale = torch.zeros(1, length), torch.ones(1)
    remembered = 0
    for step in range(3 * length + 3):
        last = torch.tensor([SPIKE if step == length else 1.0])
        history, scale = updated_history(history, scale, last, format_max=E4M3.max)
        remembered += scale.item() == torch.tensor(SPIKE).div(E4M3.max).item()
    assert remembered == length
    assert scale.item() == torch.tensor(1.0).div(E4M3.max).item()


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_an_amax_that_is_not_a_positive_number_changes_nothing(bad: float) -> None:
    history = torch.tensor([[9.0, 1.0, 2.0, 3.0]])
    scale = torch.tensor([0.7])
    after, kept = updated_history(history, scale, torch.tensor([bad]), format_max=E4M3.max)
    assert kept.item() == scale.item()
    assert after.tolist() == [[0.0, 1.0, 2.0, 3.0]]


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_a_rule_that_returns_no_positive_number_keeps_the_scale_but_not_the_past(bad: float) -> None:
    history, scale = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0.7])
    after, kept = updated_history(
        history, scale, torch.tensor([5.0]), format_max=E4M3.max, algorithm=lambda window: torch.tensor(bad)
    )
    assert kept.item() == scale.item()
    assert after.tolist() == [[0.0, 2.0, 5.0]]


def test_the_users_rule_sees_the_newest_first_and_then_the_past_from_the_oldest() -> None:
    seen: list[list[float]] = []

    def rule(window: torch.Tensor) -> torch.Tensor:
        seen.append(window.tolist())
        return window.max()

    updated_history(
        torch.tensor([[7.0, 1.0, 2.0]]), torch.ones(1), torch.tensor([4.0]), format_max=E4M3.max, algorithm=rule
    )
    assert seen == [[4.0, 1.0, 2.0]]


@pytest.mark.parametrize("margin", [0, 1, 3, -1])
def test_a_margin_leaves_powers_of_two_of_headroom(margin: int) -> None:
    _, scale = updated_history(
        torch.zeros(1, 4), torch.ones(1), torch.tensor([3.0]), format_max=E5M2.max, margin=margin
    )
    assert scale.item() == numpy.float32(3.0 * 2.0**margin / E5M2.max)


def test_scales_stay_within_bounds_whose_reciprocals_are_normal() -> None:
    last = torch.tensor([2.0**-149, 3e38])
    _, scale = updated_history(torch.zeros(2, 2), torch.ones(2), last, format_max=E5M2.max)
    assert scale[0] == 2.0**-126
    assert scale[1] == torch.tensor(3e38) / E5M2.max
    assert scale.reciprocal().isfinite().all()


def test_what_the_update_was_given_stays_as_it_was() -> None:
    history, scale, last = torch.rand(3, 4), torch.rand(3), torch.rand(3)
    before = history.clone(), scale.clone(), last.clone()
    after, new_scale = updated_history(history, scale, last, format_max=E4M3.max)
    for tensor, copy in zip((history, scale, last), before, strict=True):
        assert torch.equal(tensor, copy)
    assert after.data_ptr() != history.data_ptr()
    assert new_scale.data_ptr() != scale.data_ptr()


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (5, [9.0, 1.0, 2.0, 3.0, 4.0]),
        (3, [9.0, 3.0, 4.0]),
        (2, [9.0, 4.0]),
        (1, [9.0]),
        (7, [9.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_a_resized_history_keeps_the_newest(length: int, expected: list[float]) -> None:
    assert resized_history(torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0]), length).tolist() == expected


def test_a_history_of_one_grows_and_one_of_none_begins() -> None:
    assert resized_history(torch.tensor([9.0]), 3).tolist() == [9.0, 0.0, 0.0]
    assert resized_history(torch.empty(0), 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("algorithm", [lambda window: 1.0, lambda window: window])
def test_an_algorithm_must_return_one_element(algorithm) -> None:
    history, one = torch.zeros(2, 4), torch.ones(2)
    with pytest.raises(ValueError, match="it must return a tensor of one element"):
        updated_history(history, one, one, format_max=2.0, algorithm=algorithm)
