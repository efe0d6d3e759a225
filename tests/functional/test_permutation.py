"""Tokens by expert and back, in both forms of routing, against the references expert by expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octavo
from octavo.functional.permutation import permute_reference, unpermute_reference

BF16 = torch.bfloat16
T, H, E, K = 13, 6, 5, 2


def indices(tokens: int = T, k: int = K, experts: int = E) -> Tensor:
    """k different experts a token."""
    return torch.rand(tokens, experts).argsort(1)[:, :k]


def mask_of(routing: Tensor, experts: int = E) -> Tensor:
    return torch.zeros(routing.shape[0], experts, dtype=torch.bool).scatter_(1, routing, True)


def spread(probs: Tensor, routing: Tensor, experts: int = E) -> Tensor:
    """Probabilities [T, k] as [T, E]."""
    return torch.zeros(routing.shape[0], experts, dtype=probs.dtype).scatter(1, routing, probs)


ROUTINGS = {
    "mixed": indices,
    "one token": lambda: indices(1),
    "no token": lambda: indices(0),
    "all to one": lambda: torch.full((T, 1), 3),
    "some without tokens": lambda: torch.randint(1, 3, (T, 1)) * 2,
    "every expert": lambda: indices(T, E),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("form", ["index", "mask", "mask, rows known"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_as_the_reference_forward_and_backward(form: str, routing: str, dtype: torch.dtype) -> None:
    chosen = ROUTINGS[routing]()
    mask, k = mask_of(chosen), chosen.shape[1]
    x = torch.randn(chosen.shape[0], H, dtype=dtype, requires_grad=True)
    probs = torch.rand(chosen.shape).requires_grad_()
    wide = spread(probs, chosen)
    options = {} if form == "mask" else {"num_out_tokens": chosen.numel(), "top_k": k}
    if form == "index":
        made = octavo.permute_tokens(x, chosen, probs, num_experts=E)
    else:
        made = octavo.permute_tokens(x, mask, wide, **options)
    assert torch.equal(made.rows, permute_reference(x, mask))
    assert made.probs is not None
    assert torch.equal(made.probs, torch.cat([wide[mask[:, expert], expert] for expert in range(E)]))
    assert made.m_splits.tolist() == mask.sum(0).tolist()
    assert made.m_splits.dtype == torch.int32
    # There and back: rows scaled, summed by token.
    y = octavo.unpermute_tokens(made.rows * 2, made.map, probs if form == "index" else wide)
    expected = unpermute_reference(permute_reference(x, mask) * 2, mask, spread(probs, chosen))
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    # Sums of at most E terms of about 1 in another order, rounded once to dtype.
    assert torch.allclose(y, expected, **tolerance)
    dy = torch.randn_like(y)
    for one, other in zip(
        torch.autograd.grad(y, [x, probs], dy), torch.autograd.grad(expected, [x, probs], dy), strict=True
    ):
        assert one.dtype == other.dtype
        # The reference's backward rounds to dtype twice more, at sums of up to E and H terms.
        assert torch.allclose(one, other, rtol=8 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps)


def test_without_probabilities_rows_are_summed() -> None:
    x, chosen = torch.randn(T, H), indices()
    made = octavo.permute_tokens(x, chosen, num_experts=E)
    assert made.probs is None
    assert torch.equal(octavo.unpermute_tokens(made.rows, made.map), x + x)


def test_both_forms_give_the_same_bits() -> None:
    x, chosen, probs = torch.randn(T, H, dtype=BF16), indices().sort(1).values, torch.rand(T, K)
    one = octavo.permute_tokens(x, chosen, probs, num_experts=E)
    other = octavo.permute_tokens(x, mask_of(chosen), spread(probs, chosen))
    assert torch.equal(one.rows, other.rows)
    assert torch.equal(one.probs, other.probs)
    back = octavo.unpermute_tokens(one.rows, one.map, probs)
    assert torch.equal(back, octavo.unpermute_tokens(other.rows, other.map, spread(probs, chosen)))


def test_tokens_with_different_numbers_of_experts() -> None:
    mask = torch.rand(T, E) < 0.4
    mask[3] = False
    x, probs = torch.randn(T, H), torch.rand(T, E)
    made = octavo.permute_tokens(x, mask, probs)
    assert torch.equal(made.rows, permute_reference(x, mask))
    y = octavo.unpermute_tokens(made.rows, made.map, probs)
    assert torch.allclose(y, unpermute_reference(made.rows, mask, probs), rtol=1e-6, atol=1e-6)
    assert bool((y[3] == 0).all())


def test_rows_of_nobody_do_not_reach_a_token() -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    made = octavo.permute_tokens(torch.ones(3, H), mask)
    rows = made.rows.clone()
    rows[0] = float("nan")
    y = octavo.unpermute_tokens(rows, made.map)
    assert bool(y[0].isnan().all())
    assert torch.equal(y[1], torch.zeros(H))
    assert bool(y[2].isfinite().all())


def test_gradients_by_finite_differences() -> None:
    chosen, x, probs = indices(4), torch.randn(4, 3, dtype=torch.float64), torch.rand(4, K, dtype=torch.float64)

    def through(x: Tensor, probs: Tensor) -> Tensor:
        made = octavo.permute_tokens(x, chosen, probs, num_experts=E)
        rows = made.rows.sin() * made.probs[:, None]
        return octavo.unpermute_tokens(rows, made.map, probs)

    assert torch.autograd.gradcheck(through, (x.requires_grad_(), probs.requires_grad_()))


@pytest.mark.parametrize("form", ["index", "mask"])
def test_compiles_whole(form: str) -> None:
    def through(x: Tensor, routing: Tensor, probs: Tensor) -> Tensor:
        options = {"num_experts": E} if form == "index" else {"num_out_tokens": T * K, "top_k": K}
        made = octavo.permute_tokens(x, routing, probs, **options)
        return octavo.unpermute_tokens(made.rows * made.probs[:, None], made.map)

    chosen, x, probs = indices(), torch.randn(T, H, requires_grad=True), torch.rand(T, K)
    routing, weights = (chosen, probs) if form == "index" else (mask_of(chosen), spread(probs, chosen))
    expected = through(x, routing, weights)
    y = torch.compile(through, fullgraph=True, backend="aot_eager")(x, routing, weights)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(one, x, dy)[0] for one in (y, expected)))


def test_what_does_not_fit_is_refused() -> None:
    x, chosen = torch.randn(T, H), indices()
    with pytest.raises(ValueError, match="give num_experts"):
        octavo.permute_tokens(x, chosen)
    with pytest.raises(ValueError, match="names expert 4: experts are 0 to 3"):
        octavo.permute_tokens(x, torch.full((T, 1), 4), num_experts=4)
    with pytest.raises(ValueError, match="num_out_tokens is 7, and the mask chooses 26"):
        octavo.permute_tokens(x, mask_of(chosen), num_out_tokens=7)
    with pytest.raises(ValueError, match="num_experts is 4, and the mask has 5"):
        octavo.permute_tokens(x, mask_of(chosen), num_experts=4)
    with pytest.raises(ValueError, match="expected integers"):
        octavo.permute_tokens(x, torch.rand(T, E))
    with pytest.raises(ValueError, match="expected that of routing"):
        octavo.permute_tokens(x, chosen, torch.rand(T, E), num_experts=E)
    with pytest.raises(ValueError, match="expected \\[T, H\\]"):
        octavo.permute_tokens(x[:5], chosen, num_experts=E)
    made = octavo.permute_tokens(x, chosen, num_experts=E)
    with pytest.raises(ValueError, match="the map is one of 26 rows"):
        octavo.unpermute_tokens(made.rows[:7], made.map)
    with pytest.raises(ValueError, match=r"\(4, 2\): expected \(13, 2\)"):
        octavo.unpermute_tokens(made.rows, made.map, torch.rand(4, K))


def test_probs_of_the_other_form_are_refused_by_both_shapes() -> None:
    x, chosen = torch.randn(T, H), indices()
    by_index = octavo.permute_tokens(x, chosen, num_experts=E)
    with pytest.raises(ValueError, match=r"shape \(13, 5\): expected \(13, 2\).*index form"):
        octavo.unpermute_tokens(by_index.rows, by_index.map, torch.rand(T, E))
    # The map of a mask is as wide as it is told a token may choose: E is what counts.
    for options in ({}, {"top_k": K}):
        by_mask = octavo.permute_tokens(x, mask_of(chosen), **options)
        for width in (K, E - 1, E + 2):
            with pytest.raises(ValueError, match=rf"shape \(13, {width}\): expected \(13, 5\).*mask form"):
                octavo.unpermute_tokens(by_mask.rows, by_mask.map, torch.rand(T, width))
    with pytest.raises(ValueError, match=r"shape \(13,\): expected"):
        octavo.unpermute_tokens(by_index.rows, by_index.map, torch.rand(T))


@pytest.mark.parametrize("name", ["top_k", "num_out_tokens"])
def test_what_only_a_mask_needs_is_refused_with_indices(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 2.*index form.*leave it out"):
        octavo.permute_tokens(torch.randn(T, H), indices(), num_experts=E, **{name: 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts": 3.5}, "num_experts is 3.5: expected an integer"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_experts": 0}, "num_experts is 0"),
        ({"num_out_tokens": 26.0}, "num_out_tokens is 26.0"),
        ({"num_out_tokens": -1}, "num_out_tokens is -1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": True}, "top_k is True"),
    ],
)
def test_numbers_that_are_no_integers_are_refused(options: dict[str, float], words: str) -> None:
    chosen = indices()
    routing = chosen if "num_experts" in options else mask_of(chosen)
    with pytest.raises(ValueError, match=words):
        octavo.permute_tokens(torch.randn(T, H), routing, **options)


def test_an_expert_named_twice_is_refused() -> None:
    chosen = torch.tensor([[0, 1, 2], [4, 3, 4]])
    with pytest.raises(ValueError, match=r"names expert 4 twice for token 1, \[4, 3, 4\]"):
        octavo.permute_tokens(torch.randn(2, H), chosen, num_experts=E)
