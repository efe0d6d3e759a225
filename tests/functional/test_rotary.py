"""Rotary embeddings against turns in the complex plane, and the ways to go beyond the trained length."""

from __future__ import annotations

import math

import pytest
import torch
from tests.modules.attention_reference import FLOAT32, turned_steps

from octavo.functional.rotary import (
    Llama3Scaling,
    apply_rotary,
    packed_positions,
    rotary_angles,
    rotary_frequencies,
)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("features", [16, 8, 2])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_pairs_are_turned(features: int, interleaved: bool, base: float) -> None:
    x, places = torch.randn(9, 2, 3, 16), list(range(4, 13))
    angles = rotary_angles(rotary_frequencies(features, base), torch.tensor(places), interleaved)
    turned = apply_rotary(x, angles[:, None, None], interleaved)
    exact = turned_steps(x, places, base, interleaved, features)
    # An angle of up to 12 radians is wrong by 4 roundings of it; the turn adds 4 more, of values up to |a| + |b|.
    assert ((turned.double() - exact).abs() <= (12 * 4 + 4) * FLOAT32 * 2 * x.abs().max()).all()
    assert torch.equal(turned[..., features:], x[..., features:])


def test_scores_depend_on_how_far_apart_tokens_are() -> None:
    q, k = torch.randn(2, 1, 1, 16).double().unbind(0)
    frequencies = rotary_frequencies(16)

    def score(at_q: int, at_k: int) -> float:
        a, b = (rotary_angles(frequencies, torch.tensor([at]), False) for at in (at_q, at_k))
        return float((apply_rotary(q, a) * apply_rotary(k, b)).sum())

    assert score(3, 1) == pytest.approx(score(53, 51), rel=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


def test_turning_keeps_bf16_and_turns_in_float32() -> None:
    x = torch.randn(300, 1, 16, dtype=torch.bfloat16)
    angles = rotary_angles(rotary_frequencies(16), torch.arange(300), False)[:, None]
    turned = apply_rotary(x, angles)
    assert turned.dtype is torch.bfloat16
    assert torch.equal(turned, apply_rotary(x.float(), angles).bfloat16())


def test_linear_scaling_divides_every_angle() -> None:
    assert torch.equal(rotary_frequencies(16, scaling="linear", factor=4.0), rotary_frequencies(16) / 4)


def test_ntk_scaling_leaves_the_fastest_and_divides_the_slowest() -> None:
    plain, scaled = rotary_frequencies(16), rotary_frequencies(16, scaling="ntk", factor=4.0)
    assert scaled[0] == plain[0]
    # base^(-14/16) * 4^(-(16/14) * 14/16) = a quarter; float32 powers are within some units in the last place.
    assert float(scaled[-1] / plain[-1]) == pytest.approx(0.25, rel=16 * FLOAT32)
    ratios = plain / scaled
    assert (ratios[1:] > ratios[:-1]).all()


def test_llama3_scaling_is_that_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=parameters)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    mine = rotary_frequencies(128, 500000.0, "llama3", 8.0, Llama3Scaling())
    # Both in float32: a power, a quotient, and a blend.
    assert torch.allclose(mine, theirs, rtol=32 * FLOAT32, atol=0)
    assert not torch.allclose(mine, rotary_frequencies(128, 500000.0), rtol=0.1)


def test_rotation_of_halves_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    angles = rotary_angles(rotary_frequencies(16), torch.arange(9), False)
    theirs = apply_rotary_pos_emb(q, k, angles.cos()[None], angles.sin()[None])
    for x, turned in zip((q, k), theirs, strict=True):
        assert torch.equal(apply_rotary(x, angles), turned)


def test_places_of_packed_tokens() -> None:
    cu = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    # Behind the last sequence there is padding, whose places nobody asks for.
    assert packed_positions(cu, 6)[:5].tolist() == [0, 1, 2, 0, 1]


def test_more_angles_than_features_are_refused() -> None:
    with pytest.raises(ValueError, match="rotary angles are for 16 features, heads have 8"):
        apply_rotary(torch.randn(3, 8), torch.zeros(3, 16))


def test_a_quarter_turn() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    quarter = torch.full((1, 4), math.pi / 2)
    assert apply_rotary(x, quarter).round().tolist() == [[-3.0, -4.0, 1.0, 2.0]]
    assert apply_rotary(x, quarter, True).round().tolist() == [[-2.0, 1.0, -4.0, 3.0]]
