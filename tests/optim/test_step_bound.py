"""How far a step of Adam moves a weight at most: held to torch's own Adam under the worst gradients there are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.optim.step_bound import NoBoundError, Step, adam_factor, adam_step, check_known, given_step

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.95, 0.98), (0.0, 0.5), (0.5, 0.9999)]


def test_the_number_of_the_default_betas() -> None:
    assert adam_factor(0.9, 0.999, 1e-8, torch.float32) == pytest.approx(7.27, abs=0.01)


@pytest.mark.parametrize("betas", BETAS)
def test_gradients_that_grow_reach_it_and_do_not_pass(betas: tuple[float, float]) -> None:
    """Cauchy-Schwarz holds with equality for g_t = (b2 / b1)^t; after many steps that is all of the bound."""
    b1, b2 = betas
    growth = b2 / b1 if b1 else 1e3
    steps = min(400, int(math.log(1e15) / math.log(growth))) if b1 else 3
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, eps=1e-15)
    largest = 0.0
    for t in range(steps):
        before = weight.item()
        weight.grad = torch.full((1,), growth**t * 1e-3, dtype=torch.float64)
        optimizer.step()
        largest = max(largest, abs(weight.item() - before))
    bound = adam_factor(b1, b2, 1e-8, torch.float64)
    assert largest <= bound
    # Bias corrections of b2 lower it while 1 - b2^t is small.
    assert largest > 0.9 * bound * math.sqrt(1 - b2**steps)


@given(
    st.sampled_from(BETAS),
    st.lists(st.one_of(st.just(0.0), st.floats(-1e6, 1e6), st.floats(-1e-6, 1e-6)), min_size=1, max_size=40),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_gradients_pass_it(
    betas: tuple[float, float], gradients: list[float], amsgrad: bool, dtype: torch.dtype
) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
    optimizer = torch.optim.Adam([weight], lr=1.0, betas=betas, amsgrad=amsgrad)
    try:
        bound = float(adam_step(optimizer.param_groups[0], dtype).added)
    except ValueError:
        assert dtype is torch.bfloat16, "roundings leave these betas no bound"
        return
    for gradient in gradients:
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.full((1,), gradient, dtype=dtype)
        optimizer.step()
        assert abs(weight.item()) <= bound


def test_decay_shrinks_unless_it_overshoots() -> None:
    def factor(kind: Any, lr: Any, decay: float) -> Any:
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], lr=lr, weight_decay=decay)
        return adam_step(optimizer.param_groups[0], torch.float32).factor

    assert factor(torch.optim.AdamW, 1e-3, 0.1) == 1.0
    assert factor(torch.optim.AdamW, 1.0, 3.0) == 2.0
    assert factor(torch.optim.Adam, 1.0, 3.0) == 1.0, "coupled decay is part of the gradient"
    assert factor(torch.optim.AdamW, torch.tensor(1.0), 3.0).item() == 2.0


@pytest.mark.parametrize("lr", [-0.1, torch.tensor(-0.1)])
def test_a_rate_below_zero_moves_a_weight_as_far(lr: Any) -> None:
    group = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.1, weight_decay=0.5).param_groups[0]
    forward, back = (adam_step(group | {"lr": rate}, torch.float32) for rate in (0.1, lr))
    assert float(back.added) == pytest.approx(float(forward.added))
    assert float(back.factor) == pytest.approx(1.05), "decay grows the weight then"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), r"a step of SGD .* step_bound="),
        (lambda p: type("Mine", (torch.optim.AdamW,), {"step": lambda self: None})(p), "a step of Mine"),
        (lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True), "are tensors"),
    ],
)
def test_optimizers_without_a_known_bound_are_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"(?i){message}"):
        check_known(make([torch.nn.Parameter(torch.zeros(1))]))


def test_a_subclass_that_steps_as_adam_does_is_known() -> None:
    check_known(type("Named", (torch.optim.AdamW,), {})([torch.nn.Parameter(torch.zeros(1))]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.9, 0.5, 1e-8, torch.float32), r"betas are \(0.9, 0.5\)"),
        ((0.9, 0.999, 0.0, torch.float32), "eps is 0.0"),
        ((0.9, 0.999, 1e-8, torch.float16), "float16, in which the second moment underflows"),
        ((0.99, 0.9802, 1e-8, torch.bfloat16), "room for the roundings of torch.bfloat16"),
    ],
)
def test_what_has_no_bound_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adam_factor(*arguments)


def given(returned: Any) -> Step:
    return given_step(lambda group: returned, {}, 3, torch.float32, torch.device("cpu"))


NO_NUMBERS = [
    *(-1.0, float("inf"), float("nan"), "1", True, 1j, 3.5e38, 10**400),
    *(torch.tensor(value) for value in (-1.0, float("inf"), float("nan"), True, [0.1, 0.2], [], 1j)),
    torch.zeros((), device="meta"),
]


@pytest.mark.parametrize("returned", NO_NUMBERS, ids=repr)
def test_a_given_bound_that_is_none_is_refused(returned: Any) -> None:
    what = f"step_bound returned {re.escape(repr(returned))} for param group 3"
    with pytest.raises(ValueError, match=f"{what}: expected .* of 0 or more.* Return that") as caught:
        given(returned)
    assert not isinstance(caught.value, NoBoundError)


@pytest.mark.parametrize("returned", [0, 1, 0.25, torch.tensor(0.25), torch.tensor([0.25]), torch.tensor(1)])
def test_a_given_bound_may_be_a_number_or_a_tensor_of_one(returned: Any) -> None:
    assert float(given(returned).added) == pytest.approx(float(returned))


def test_a_given_bound_on_the_device_of_the_weights_is_not_waited_for() -> None:
    rate = torch.zeros(1, device="meta", requires_grad=True)
    step = given_step(lambda group: rate, {}, 0, torch.float32, rate.device)
    assert isinstance(step.added, torch.Tensor)
    assert step.added.shape == ()
    assert not step.added.requires_grad


def test_none_is_no_bound() -> None:
    with pytest.raises(NoBoundError, match="step_bound returned None"):
        given(None)
