from __future__ import annotations

import pytest
import torch

from octavo.study.generation import GenerationPlan, generate, measure_generation
from octavo.study.model import GPT, ModelShape, build_model

SHAPE = ModelShape(layers=2, width=32, heads=4, context=24, vocab_size=50)


@pytest.fixture
def model() -> GPT:
    return build_model(SHAPE, seed=1).double().eval()


@pytest.mark.parametrize("chunks", [[24], [10, 14], [1] * 24, [5, 1, 1, 17]])
def test_with_a_cache_the_logits_are_those_of_one_pass(model: GPT, chunks: list[int]) -> None:
    tokens = torch.randint(50, (3, 24))
    whole = model(tokens)
    cache = model.new_cache(3)
    parts = [model(part, cache) for part in tokens.split(chunks, dim=1)]
    # float64: the same sums in another order, far below 1e-10.
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_no_token_sees_the_future(model: GPT) -> None:
    tokens = torch.randint(50, (1, 24))
    changed = tokens.clone()
    changed[0, 12:] = (changed[0, 12:] + 1) % 50
    before, after = model(tokens), model(changed)
    assert before[:, :12].equal(after[:, :12])
    assert not before[:, 12:].equal(after[:, 12:])


def test_the_head_is_the_embedding(model: GPT) -> None:
    assert model.lm_head.weight is model.token_embedding.weight
    assert sum(p.numel() for p in model.parameters()) == 50 * 32 + 24 * 32 + 2 * (12 * 32**2 + 13 * 32) + 2 * 32


def test_the_same_seed_gives_the_same_weights_and_touches_no_other_randomness() -> None:
    state = torch.get_rng_state()
    first, second = build_model(SHAPE, 7), build_model(SHAPE, 7)
    assert torch.get_rng_state().equal(state)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not first.token_embedding.weight.equal(build_model(SHAPE, 8).token_embedding.weight)


def test_too_many_tokens_and_a_bad_width_are_refused(model: GPT) -> None:
    with pytest.raises(ValueError, match="25 tokens do not fit into the context of 24"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="width 30 is no multiple of heads 4"):
        ModelShape(layers=1, width=30, heads=4, context=8, vocab_size=9)


def test_greedy_decoding_with_a_cache_is_greedy_decoding(model: GPT) -> None:
    prompts = torch.randint(50, (2, 6))
    sequence = prompts
    for _ in range(10):
        sequence = torch.cat([sequence, model(sequence)[:, -1:].argmax(-1)], dim=1)
    assert generate(model, prompts, 10).equal(sequence[:, 6:])


def test_generation_speed_is_tokens_over_time(model: GPT) -> None:
    plan = GenerationPlan(prompts=torch.randint(50, (2, 6)), new_tokens=4, repeats=2)
    speed = measure_generation(model, plan)
    assert speed.ttft_s > 0
    assert speed.prefill_tokens_per_s > 0
    assert speed.decode_tokens_per_s > 0
