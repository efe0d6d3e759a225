"""What attention layers keep for the backward, in bytes: the figures of docs/layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe

HIDDEN, FFN, HEADS, GROUPS, TOKENS, BATCH = 128, 512, 8, 4, 64, 4
A, G = HIDDEN, HIDDEN // HEADS * GROUPS
# A weight's codes are kept a call, whatever the number of tokens: in parts, with scales of four bytes.
QKV, PROJ, MLP = (A + 2 * G) * HIDDEN, A * HIDDEN, 2 * HIDDEN * FFN


def kept_bytes(run: Callable[[], Tensor], owner: nn.Module) -> int:
    """Bytes of all memory that autograd holds after a forward, each counted once, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in owner.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(size for size, _ in seen.values())


def bfloat16(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def test_attention_keeps_its_operands_its_result_and_statistics() -> None:
    layer = octavo.DotProductAttention(HEADS, HIDDEN // HEADS, GROUPS, qkv_format="bshd")
    q, k, v = (bfloat16(BATCH, TOKENS, heads, HIDDEN // HEADS) for heads in (HEADS, GROUPS, GROUPS))
    kept = kept_bytes(lambda: layer(q, k, v), layer)
    assert kept == BATCH * TOKENS * (2 * (2 * A + 2 * G) + 4 * HEADS)


@pytest.mark.parametrize("recipe", [None, DelayedScaling(), CurrentScaling()])
def test_multihead_attention(recipe: Recipe | None) -> None:
    layer = octavo.MultiheadAttention(
        HIDDEN, HEADS, None, GROUPS, input_layernorm=True, qkv_format="bshd", dtype=torch.bfloat16
    )
    x = bfloat16(BATCH, TOKENS, HIDDEN)

    def run() -> Tensor:
        with octavo.autocast(enabled=recipe is not None, recipe=recipe):
            y: Tensor = layer(x)
            return y

    kept, tokens = kept_bytes(run, layer), BATCH * TOKENS
    attention = 2 * (2 * A + 2 * G) + 4 * HEADS
    if recipe is None:
        # x, its statistics, n; the weight of q, k and v once more, since its parts were joined.
        assert kept == tokens * (2 * HIDDEN + 8 + 2 * HIDDEN + attention) + 2 * QKV
    else:
        # x, its statistics, codes of n, and codes of what attention gives; four scales.
        assert kept == tokens * (2 * HIDDEN + 8 + HIDDEN + attention + A) + QKV + PROJ + 4 * 4


@pytest.mark.parametrize("groups", [GROUPS, HEADS])
def test_heads_that_are_turned_are_kept_once(groups: int) -> None:
    layer = octavo.MultiheadAttention(HIDDEN, HEADS, None, groups, fuse_qkv_params=True, qkv_format="bshd")
    layer.to(torch.bfloat16)
    x, angles = bfloat16(BATCH, TOKENS, HIDDEN), octavo.RotaryPositionEmbedding(HIDDEN // HEADS)(TOKENS)
    added = kept_bytes(lambda: layer(x, rotary_pos_emb=angles), layer) - kept_bytes(lambda: layer(x), layer)
    # Cosines and sines, for queries and for keys.
    assert added == 4 * 4 * TOKENS * HIDDEN // HEADS


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (None, 4 * HIDDEN + 8 + 4 * FFN),
        (DelayedScaling(), 3 * HIDDEN + 8 + 3 * FFN),
        (CurrentScaling(), 3 * HIDDEN + 8 + 3 * FFN),
    ],
)
def test_a_transformer_layer_adds_what_its_mlp_keeps(recipe: Recipe | None, expected: int) -> None:
    layer = octavo.TransformerLayer(
        HIDDEN, FFN, HEADS, GROUPS, attn_input_format="bshd", fuse_qkv_params=True, dtype=torch.bfloat16
    )
    x = bfloat16(BATCH, TOKENS, HIDDEN)

    def run(part: nn.Module) -> Callable[[], Tensor]:
        def forward() -> Tensor:
            with octavo.autocast(enabled=recipe is not None, recipe=recipe):
                y: Tensor = part(x)
                return y

        return forward

    added = kept_bytes(run(layer), layer) - kept_bytes(run(layer.self_attention), layer)
    weights = 0 if recipe is None else MLP + 4 * 4
    assert added == BATCH * TOKENS * expected + weights


def test_codes_of_what_attention_gives_are_not_kept_by_a_recipe_that_keeps_inputs() -> None:
    """Attention keeps its result anyway: the projection's codes are made of it again."""
    layer = octavo.MultiheadAttention(HIDDEN, HEADS, None, GROUPS, qkv_format="bshd", dtype=torch.bfloat16)
    x = bfloat16(BATCH, TOKENS, HIDDEN)

    def kept(recipe: Recipe) -> int:
        def run() -> Tensor:
            with octavo.autocast(recipe=recipe):
                y: Tensor = layer(x)
                return y

        return kept_bytes(run, layer)

    spared = kept(CurrentScaling()) - kept(CurrentScaling(saved_input="high_precision"))
    # Codes of the two inputs, against x, which nobody else keeps here.
    assert spared == BATCH * TOKENS * (HIDDEN + A - 2 * HIDDEN)
