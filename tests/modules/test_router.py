"""octavo.TopKRouter and `route`: choices, probabilities and losses against their formulas."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo.functional.routing import load_balancing_loss, route, z_loss

T, H, E, K = 17, 12, 6, 2


def test_the_best_experts_with_the_softmax_of_their_logits() -> None:
    logits = torch.randn(T, E)
    routing = route(logits, K)
    best = logits.topk(K)
    assert torch.equal(routing.indices, best.indices)
    assert torch.allclose(routing.probs, best.values.softmax(-1))
    assert routing.m_splits.tolist() == [int((best.indices == e).sum()) for e in range(E)]
    assert torch.equal(routing.mask.nonzero()[:, 1].reshape(T, K), best.indices.sort(1).values)
    assert float(routing.aux_loss) == 0


def test_the_softmax_over_all_experts() -> None:
    logits = torch.randn(T, E)
    routing = route(logits, K, softmax_before_choice=True, scaling_factor=2.5)
    assert torch.allclose(routing.probs, logits.softmax(-1).topk(K).values * 2.5)


def test_sigmoid_with_a_bias_that_only_chooses() -> None:
    logits, bias = torch.randn(T, E), torch.randn(E) * 0.3
    scores = logits.sigmoid()
    indices = (scores + bias).topk(K).indices
    chosen = scores.gather(1, indices)
    routing = route(logits, K, score_function="sigmoid", expert_bias=bias)
    assert torch.equal(routing.indices, indices)
    assert torch.allclose(routing.probs, chosen / chosen.sum(1, keepdim=True))
    assert torch.allclose(route(logits, 1, score_function="sigmoid").probs, scores.max(1, keepdim=True).values)


def test_equal_scores_go_to_the_first() -> None:
    assert route(torch.zeros(3, E), K).indices.tolist() == [[0, 1]] * 3


def test_the_load_loss_is_1_if_even_and_grows_with_unevenness() -> None:
    even = torch.eye(E) * 50
    assert route(even, 1, aux_loss_coefficient=1.0).aux_loss.item() == pytest.approx(1.0)
    alone = torch.tensor([[50.0] + [0.0] * (E - 1)]).expand(T, E)
    assert route(alone, 1, aux_loss_coefficient=0.5).aux_loss.item() == pytest.approx(0.5 * E)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_against_their_formulas(score: str) -> None:
    logits = torch.randn(T, E)
    routing = route(logits, K, score_function=score, aux_loss_coefficient=0.3, z_loss_coefficient=0.7)
    shares = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    shares = shares / shares.sum(1, keepdim=True)
    load = sum(float(routing.mask[:, e].sum()) / (T * K) * float(shares[:, e].mean()) for e in range(E)) * E
    z = float((logits.exp().sum(1).log() ** 2).mean())
    assert float(routing.aux_loss) == pytest.approx(0.3 * load + 0.7 * z, rel=1e-5)
    assert float(load_balancing_loss(shares, routing.m_splits, K)) == pytest.approx(load, rel=1e-5)
    assert float(z_loss(logits)) == pytest.approx(z, rel=1e-5)


def test_gradients_by_finite_differences_in_float32() -> None:
    logits = (torch.randn(4, E) * 2).requires_grad_()

    def total(logits: torch.Tensor) -> torch.Tensor:
        routing = route(logits, K, aux_loss_coefficient=0.5, z_loss_coefficient=0.1)
        return routing.aux_loss + (routing.probs * torch.arange(K)).sum()

    (gradient,) = torch.autograd.grad(total(logits), logits)
    direction = torch.randn_like(logits)
    step = 1e-2
    with torch.no_grad():
        difference = (total(logits + step * direction) - total(logits - step * direction)) / (2 * step)
    # The second difference is of order step^2 = 1e-4 of third derivatives of order 1.
    assert float((gradient * direction).sum()) == pytest.approx(float(difference), abs=1e-2)


def test_load_gradient_pushes_away_from_the_crowded_expert() -> None:
    logits = torch.zeros(T, E)
    logits[:, 2] = 1.0
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(route(logits, 1, aux_loss_coefficient=1.0).aux_loss, logits)
    assert bool((gradient[:, 2] > 0).all())
    assert bool((gradient[:, 3] < 0).all())


def test_no_tokens() -> None:
    routing = route(torch.zeros(0, E), K, aux_loss_coefficient=1.0, z_loss_coefficient=1.0)
    assert routing.probs.shape == (0, K)
    assert float(routing.aux_loss) == 0
    assert routing.m_splits.tolist() == [0] * E


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_module_computes_in_float32(dtype: torch.dtype) -> None:
    router = octavo.TopKRouter(H, E, K, dtype=dtype, aux_loss_coefficient=0.01)
    assert list(router.state_dict()) == ["weight"]
    x = torch.randn(3, 5, H, dtype=dtype)
    expected = route(x.reshape(15, H).float() @ router.weight.float().t(), K, aux_loss_coefficient=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found.indices, expected.indices)
    assert torch.allclose(found.probs, expected.probs)
    (found.aux_loss + found.probs.square().sum()).backward()
    assert router.weight.grad.dtype == dtype
    assert bool(router.weight.grad.abs().sum() > 0)


def test_the_bias_is_a_buffer() -> None:
    router = octavo.TopKRouter(H, E, K, score_function="sigmoid", expert_bias=True)
    assert sorted(router.state_dict()) == ["expert_bias", "weight"]
    router.expert_bias[4] = 10
    assert bool((router(torch.randn(T, H)).indices[:, 0] == 4).all())


def test_compiles_whole() -> None:
    router = octavo.TopKRouter(H, E, K, aux_loss_coefficient=0.01, z_loss_coefficient=0.01)
    x = torch.randn(T, H)
    expected, found = router(x), torch.compile(router, fullgraph=True, backend="aot_eager")(x)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_mixture_of_experts_trains() -> None:
    """Router, permutation, two grouped layers and back: the loss falls, in FP8, on what a mixture can learn."""
    router = octavo.TopKRouter(16, 4, 2, aux_loss_coefficient=0.01)
    up, down = octavo.GroupedLinear(4, 16, 64), octavo.GroupedLinear(4, 64, 16)
    parameters = [*router.parameters(), *up.parameters(), *down.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    x = torch.randn(64, 16)
    target = torch.where(x[:, :1] > 0, x.flip(1), -2 * x)
    losses = []
    for _ in range(60):
        with octavo.autocast(recipe=octavo.recipes.CurrentScaling()):
            routing = router(x)
            made = octavo.permute_tokens(x, routing.indices, num_experts=4)
            rows = down(up(made.rows, made.m_splits).relu(), made.m_splits)
            y = octavo.unpermute_tokens(rows, made.map, routing.probs)
        loss = (y - target).square().mean() + routing.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_what_does_not_fit_is_refused() -> None:
    for options, words in (
        ({"top_k": 7}, "top_k is 7: a token goes to from 1 to 6"),
        ({"top_k": 2, "score_function": "relu"}, "score_function is 'relu'"),
        ({"top_k": 2, "score_function": "sigmoid", "softmax_before_choice": True}, "has no use with"),
        ({"top_k": 2, "expert_bias": True}, "for score_function='sigmoid'"),
    ):
        with pytest.raises(ValueError, match=words):
            octavo.TopKRouter(H, E, **options)
    with pytest.raises(ValueError, match="in_features = 12"):
        octavo.TopKRouter(H, E, K)(torch.randn(3, H + 1))
    with pytest.raises(ValueError, match=r"expected \[T, E\]"):
        route(torch.randn(3), 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": True}, "top_k is True.*integer"),
        ({"top_k": 2.0}, "top_k is 2.0.*integer"),
        ({"top_k": "2"}, "top_k is '2'.*integer"),
        ({"aux_loss_coefficient": float("nan")}, "aux_loss_coefficient is nan: expected a finite number"),
        ({"aux_loss_coefficient": -0.1}, "aux_loss_coefficient is -0.1"),
        ({"z_loss_coefficient": float("inf")}, "z_loss_coefficient is inf"),
        ({"z_loss_coefficient": None}, "z_loss_coefficient is None"),
        ({"scaling_factor": "a"}, "scaling_factor is 'a': expected a finite number"),
        ({"scaling_factor": 0.0}, "scaling_factor is 0.0"),
        ({"scaling_factor": True}, "scaling_factor is True"),
        ({"softmax_before_choice": "no"}, "softmax_before_choice is 'no': expected True or False"),
        ({"expert_bias": 1}, "expert_bias is 1: expected True or False"),
        ({"num_experts": 6.0}, "num_experts is 6.0: expected an integer"),
        ({"in_features": 0}, "in_features is 0: expected an integer"),
    ],
)
def test_options_that_are_no_numbers_of_their_kind_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        octavo.TopKRouter(**{"in_features": H, "num_experts": E, "top_k": K, **options})


def biased() -> octavo.TopKRouter:
    return octavo.TopKRouter(H, E, K, score_function="sigmoid", expert_bias=True)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_the_bias_stays_float32_so_that_small_steps_count(cast: str) -> None:
    router = biased()
    router.expert_bias.fill_(1.001)
    getattr(router, cast)()
    assert router.weight.dtype == {"bfloat16": torch.bfloat16, "half": torch.float16, "double": torch.float64}[cast]
    assert router.expert_bias.dtype == torch.float32
    # Not cast there and back: 1.001 is none of bfloat16's.
    assert float(router.expert_bias[0]) == pytest.approx(1.001, rel=1e-7)
    router.expert_bias += 1e-3
    assert float(router.expert_bias[0]) == pytest.approx(1.002, rel=1e-6)
    assert router(torch.randn(T, H, dtype=router.weight.dtype)).indices.shape == (T, K)


@pytest.mark.parametrize("assign", [False, True])
def test_the_bias_is_float32_wherever_it_comes_from(assign: bool) -> None:
    state = {name: value.bfloat16() for name, value in biased().state_dict().items()}
    router = biased()
    router.load_state_dict(state, assign=assign)
    assert router.expert_bias.dtype == torch.float32
    assert sorted(router.state_dict()) == ["expert_bias", "weight"]
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert biased().expert_bias.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert biased().to("meta").to_empty(device="cpu").expert_bias.dtype == torch.float32
