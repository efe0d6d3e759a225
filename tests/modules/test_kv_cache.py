"""KV caches: what goes in comes out, paged as contiguous bit for bit, and generation gives the uncached forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.attention_reference import chained
from torch import Tensor, nn

import octavo
from octavo import KVCache, PagedKVCache
from octavo.modules.kv_cache import Cache
from octavo.recipes import RowwiseScaling

HIDDEN, HEADS, GROUPS = 32, 4, 2


class Model(nn.Module):
    """Two layers with rotary embeddings."""

    def __init__(self, layout: str = "bshd", **options: Any) -> None:
        super().__init__()
        self.rotary = octavo.RotaryPositionEmbedding(HIDDEN // HEADS)
        self.layers = nn.ModuleList(
            octavo.TransformerLayer(HIDDEN, 64, HEADS, GROUPS, attn_input_format=layout, **options) for _ in range(2)
        )

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        angles = self.rotary(64)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles, kv_cache=cache)
        return x


def caches(batch: int = 3) -> tuple[KVCache, PagedKVCache]:
    return KVCache(batch, 40), PagedKVCache(batch, 40, page_size=4)


def heads(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, tokens, 2, 8), torch.randn(batch, tokens, 2, 8)


@pytest.mark.parametrize("which", [0, 1])
def test_what_goes_in_comes_out_in_order(which: int) -> None:
    cache, layers = caches()[which], ("first", "second")
    sent: dict[str, list[tuple[Tensor, Tensor]]] = {layer: [] for layer in layers}
    for tokens in (5, 1, 1, 7):
        for layer in layers:
            sent[layer].append(heads(3, tokens))
            held = cache.append(layer, *sent[layer][-1])
            for got, parts in zip((held.k, held.v), zip(*sent[layer], strict=True), strict=True):
                assert torch.equal(got, torch.cat(parts, 1))
    assert cache.lengths("first", 3) == (14, 14, 14)
    assert cache.lengths("third", 3) == (0, 0, 0)


@pytest.mark.parametrize("which", [0, 1])
def test_sequences_have_lengths_of_their_own(which: int) -> None:
    cache = caches()[which]
    sent: list[list[Tensor]] = [[], [], []]
    for real in ([5, 0, 3], [1, 4, 0], [2, 2, 2]):
        k, v = heads(3, 5)
        cache.expect(real)
        held = cache.append("layer", k, v)
        assert held.num_new == tuple(real)
        for b, n in enumerate(real):
            sent[b].append(k[b, :n])
            assert torch.equal(held.k[b, : held.lengths[b]], torch.cat(sent[b]))
    assert held.lengths == (8, 6, 5)
    assert held.k.shape[1] == 8


def test_pages_are_taken_as_sequences_grow_and_given_back() -> None:
    cache = PagedKVCache(3, 40, page_size=4, num_pages=6)
    k, v = heads(3, 4)
    cache.append("layer", k, v)
    assert cache.num_free_pages == 3
    cache.expect([1, 0, 4])
    cache.append("layer", k, v)
    assert cache.num_free_pages == 1
    # A second layer of the model finds the pages that the first one took.
    cache.expect([4, 4, 4])
    cache.append("other", k, v)
    assert cache.num_free_pages == 1
    cache.reset([0])
    assert cache.num_free_pages == 3
    assert cache.lengths("layer", 3) == (0, 4, 8)
    # Whoever comes next gets pages that lie anywhere, and reads its own.
    cache.expect([4, 2, 0])
    held = cache.append("layer", 2 * k, 2 * v)
    assert torch.equal(held.k[0, :4], 2 * k[0])
    assert torch.equal(held.k[1, :6], torch.cat((k[1], 2 * k[1, :2])))
    assert torch.equal(held.k[2, :8], torch.cat((k[2], k[2])))


def test_nothing_of_a_sequence_that_was_reset_is_seen_again() -> None:
    for cache in caches(2):
        k, v = heads(2, 6)
        cache.append("layer", k * torch.nan, v * torch.nan)
        cache.reset()
        cache.expect([6, 2])
        held = cache.append("layer", k, v)
        assert not held.k.isnan().any()
        assert not held.v.isnan().any()


@torch.no_grad()
def generate(model: Model, x: Tensor, cache: Cache, chunks: list[int], dim: int = 1) -> Tensor:
    return torch.cat([model(part, cache) for part in x.split(chunks, dim)], dim)


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("options", [{}, {"window_size": (4, 0)}, {"qk_norm_type": "RMSNorm"}])
@pytest.mark.parametrize("chunks", [[20], [9] + [1] * 11, [1] * 20, [7, 6, 7]])
def test_generation_is_the_uncached_forward_and_paged_is_contiguous(
    chunks: list[int], options: dict[str, Any], layout: str
) -> None:
    model = Model(layout, **options).eval()
    batch_dim = 0 if layout == "bshd" else 1
    x = torch.randn(3, 20, HIDDEN).transpose(0, batch_dim)
    with torch.no_grad():
        whole = model(x)
    contiguous, paged = (generate(model, x, cache, chunks, 1 - batch_dim) for cache in caches())
    assert torch.equal(contiguous, paged)
    # Two layers of ten products each, the longest of 64 terms.
    assert relative_error(whole, contiguous) < chained(64, 20)


def test_generation_under_a_recipe_that_scales_each_token_by_itself() -> None:
    """A scale a row, of power of two: what a token becomes does not depend on which tokens are beside it."""
    model = Model().eval()
    x = torch.randn(3, 20, HIDDEN)
    with octavo.autocast(recipe=RowwiseScaling()), torch.no_grad():
        whole = model(x)
        stepwise = generate(model, x, KVCache(3, 40), [9] + [1] * 11)
    # Rounding in attention moves a value over the middle of two codes now and then: a step of E4M3, 2^-4, for one of
    # 2^16 values or so; the errors of FP8 itself are far larger.
    assert relative_error(whole, stepwise) < 2.0**-4 * 2.0**-4
    with torch.no_grad():
        assert relative_error(whole, model(x)) > 0.005


@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_sequences_of_different_lengths_generate_as_each_would_alone(mask_type: str) -> None:
    model = Model(self_attn_mask_type=mask_type).eval()
    prompts = [7, 3, 5]
    x = torch.randn(3, 12, HIDDEN)
    outcomes = []
    for cache in caches():
        cache.expect(prompts)
        with torch.no_grad():
            parts = [model(x[:, :7], cache)]
            cache.expect(None)
            parts += [model(x[:, 7 + step : 8 + step], cache) for step in range(5)]
        outcomes.append(torch.cat(parts, 1))
    for b, length in enumerate(prompts):
        alone = torch.cat((x[b : b + 1, :length], x[b : b + 1, 7:]), 1)
        expected = generate(model, alone, KVCache(1, 40), [length] + [1] * 5)
        for outcome in outcomes:
            mine = torch.cat((outcome[b : b + 1, :length], outcome[b : b + 1, 7:]), 1)
            assert relative_error(expected, mine) < chained(64, 20)
    assert torch.equal(*outcomes)


def test_a_cache_is_an_ordinary_tensor_after_inference_mode() -> None:
    model, cache = Model().eval(), KVCache(2, 8)
    with torch.inference_mode():
        model(torch.randn(2, 3, HIDDEN), cache)
    with torch.no_grad():
        model(torch.randn(2, 3, HIDDEN), cache)
    assert cache.lengths(model.layers[0].self_attention.core_attention, 2) == (6, 6)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: KVCache(0, 4), "max_batch_size is 0: it must be a positive integer"),
        (lambda: PagedKVCache(1, 4, page_size=0), "page_size is 0"),
        (lambda: KVCache(1, 4).append(0, *heads(1, 5)), "would have 5 tokens, .* max_sequence_length = 4"),
        (lambda: KVCache(1, 4).append(0, *heads(2, 1)), "there are 2 sequences, .* max_batch_size = 1"),
        (lambda: PagedKVCache(1, 9, 4, 1).append(0, *heads(1, 5)), "2 pages more are needed, and 1 of 1 are free"),
        (lambda: Model()(torch.randn(1, 3, HIDDEN), KVCache(1, 4)), r"generate under torch.no_grad\(\)"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_expectations_must_fit_the_batch() -> None:
    cache = KVCache(2, 4)
    cache.expect([1, 3])
    with pytest.raises(ValueError, match=r"expect\(\[1, 3\]\) does not go with 2 sequences of 2 tokens"):
        cache.append(0, *heads(2, 2))


def test_angles_must_reach_as_far_as_the_tokens() -> None:
    layer = octavo.TransformerLayer(HIDDEN, 64, HEADS, attn_input_format="bshd").eval()
    with pytest.raises(ValueError, match="has 4 places, and tokens go up to place 5"):
        layer(torch.randn(1, 5, HIDDEN), rotary_pos_emb=octavo.RotaryPositionEmbedding(HIDDEN // HEADS)(4))


def test_packed_sequences_have_no_cache() -> None:
    layer = octavo.TransformerLayer(HIDDEN, 64, HEADS, attn_input_format="thd").eval()
    with torch.no_grad(), pytest.raises(ValueError, match="qkv_format='thd' has no KV cache"):
        layer(torch.randn(5, HIDDEN), kv_cache=KVCache(1, 9), cu_seqlens_q=torch.tensor([0, 5]))


@pytest.mark.parametrize("kind", [octavo.KVCache, octavo.PagedKVCache])
def test_sequences_and_tokens_beyond_the_cache_are_refused_at_once(kind: Any) -> None:
    cache = kind(2, 8)
    for gone in ([5], [0, 2], [-1]):
        with pytest.raises(
            ValueError, match=rf"names {gone[-1]}, .* max_batch_size = 2: sequences are numbered from 0 to 1"
        ):
            cache.reset(gone)
    for expected in ([9, 3], [1, 1, 1], [-1]):
        with pytest.raises(ValueError, match=r"expect\(.*max_batch_size = 2 and max_sequence_length = 8: give each"):
            cache.expect(expected)
    cache.expect([8, 0])
    cache.reset([1])
