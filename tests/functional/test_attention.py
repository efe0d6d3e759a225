"""Attention against float64 steps: masks, groups of heads, biases, dtypes, gradients; and operands in FP8."""

from __future__ import annotations

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.attention_reference import (
    BFLOAT16,
    FLOAT32,
    allowed_pairs,
    attention_bound,
    attention_steps,
    chained,
)
from torch import Tensor

from octavo.functional.attention import Attention, Extras, attention, needs_mask
from octavo.functional.attention_mask import MASK_TYPES, Valid, alibi_slopes, mask_rules
from octavo.functional.attention_operands import as_fp8_operand

BATCH, HEADS, D = 3, 4, 16
LENGTHS = ((3, 9, 0), (8, 2, 5))


def operands(num_queries: int, num_keys: int, groups: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((HEADS, num_queries), (groups, num_keys), (groups, num_keys))
    return [torch.randn(BATCH, heads, tokens, D, dtype=dtype) for heads, tokens in shapes]


def lengths_of(mask_type: str, num_queries: int, num_keys: int) -> tuple[list[int], list[int]] | None:
    if not mask_type.startswith("padding"):
        return None
    return [min(n, num_queries) for n in LENGTHS[0]], [min(n, num_keys) for n in LENGTHS[1]]


def valid_of(mask_type: str, num_queries: int, num_keys: int) -> Valid | None:
    if not mask_type.startswith("padding"):
        return None
    made = [
        torch.arange(n) < torch.tensor(real)[:, None] for n, real in zip((num_queries, num_keys), LENGTHS, strict=True)
    ]
    return Valid(made[0], made[1])


@pytest.mark.parametrize("window", [None, (3, 0), (0, 0)])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(9, 9), (9, 12), (12, 9), (1, 9)])
@pytest.mark.parametrize("mask_type", [name for name in MASK_TYPES if name != "arbitrary"])
@pytest.mark.parametrize(("dtype", "roundoff"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_attention_is_the_steps(
    mask_type: str,
    num_queries: int,
    num_keys: int,
    window: tuple[int, int] | None,
    dtype: torch.dtype,
    roundoff: float,
) -> None:
    q, k, v = operands(num_queries, num_keys, 2, dtype)
    allowed = allowed_pairs(
        mask_type, window, (BATCH, num_queries, num_keys), lengths_of(mask_type, num_queries, num_keys)
    )
    setup = Attention(mask_rules(mask_type, window), D**-0.5)
    out = attention(q, k, v, setup, valid_of(mask_type, num_queries, num_keys))
    exact, magnitudes = attention_steps(q, k, v, allowed)
    assert out.dtype is dtype
    assert ((out.double() - exact).abs() <= attention_bound(q, k, magnitudes, roundoff)).all()
    # Who attends to nobody gives zeros, to the bit.
    nobody = ~allowed.any(-1).expand(BATCH, HEADS, num_queries)
    assert not out[nobody].any()


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right", "padding_causal"])
def test_gradients_are_those_of_the_steps(mask_type: str, groups: int) -> None:
    q, k, v = operands(9, 12, groups)
    allowed = allowed_pairs(mask_type, None, (BATCH, 9, 12), lengths_of(mask_type, 9, 12))
    dy = torch.randn(BATCH, HEADS, 9, D)
    mine = [x.clone().requires_grad_() for x in (q, k, v)]
    theirs = [x.double().requires_grad_() for x in (q, k, v)]
    setup = Attention(mask_rules(mask_type), D**-0.5)
    attention(mine[0], mine[1], mine[2], setup, valid_of(mask_type, 9, 12)).backward(dy)
    attention_steps(theirs[0], theirs[1], theirs[2], allowed)[0].backward(dy.double())
    for own, exact in zip(mine, theirs, strict=True):
        # Scores, probabilities, and two products of the backward.
        assert relative_error(exact.grad, own.grad) < chained(D, 4)  # type: ignore[arg-type]
    nobody = ~allowed.any(-1).expand(BATCH, HEADS, 9)
    assert not mine[0].grad[nobody].any()  # type: ignore[index]


def test_an_arbitrary_mask_leaves_out_where_it_is_true() -> None:
    q, k, v = operands(9, 12)
    mask = torch.rand(BATCH, 1, 9, 12) < 0.5
    mask[0, 0, 4] = True
    setup = Attention(mask_rules("arbitrary"), D**-0.5)
    out = attention(q, k, v, setup, None, Extras(mask=mask))
    exact, magnitudes = attention_steps(q, k, v, ~mask)
    assert ((out.double() - exact).abs() <= attention_bound(q, k, magnitudes, FLOAT32)).all()
    assert not out[0, :, 4].any()


@pytest.mark.parametrize("mask_type", ["no_mask", "causal", "causal_bottom_right", "padding_causal_bottom_right"])
def test_alibi_and_biases_are_added_to_the_scores(mask_type: str) -> None:
    q, k, v = operands(9, 12)
    bias, slopes = torch.randn(1, HEADS, 9, 12), alibi_slopes(HEADS)
    valid = valid_of(mask_type, 9, 12)
    out = attention(q, k, v, Attention(mask_rules(mask_type), 0.3), valid, Extras(bias=bias, slopes=slopes))
    slanted = bias.repeat(BATCH, 1, 1, 1)
    for b in range(BATCH):
        real = (9, 12) if valid is None else (LENGTHS[0][b], LENGTHS[1][b])
        beside = 0 if mask_type == "causal" else real[1] - real[0]
        for i in range(9):
            for j in range(12):
                slanted[b, :, i, j] -= slopes * abs(i + beside - j)
    allowed = allowed_pairs(mask_type, None, (BATCH, 9, 12), lengths_of(mask_type, 9, 12))
    exact, magnitudes = attention_steps(q, k, v, allowed, slanted, 0.3)
    # Scores are up to 12 larger, and so is their rounding.
    bound = attention_bound(q, k, magnitudes, FLOAT32) + 2 * 2 * 16 * FLOAT32 * magnitudes
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("mask_type", "window", "extents", "expected"),
    [
        ("no_mask", None, (5, 7), False),
        ("causal", None, (5, 7), False),
        ("causal_bottom_right", None, (5, 5), False),
        ("causal_bottom_right", None, (5, 7), True),
        # One new token sees all that came before: no mask in generation.
        ("causal_bottom_right", None, (1, 7), False),
        ("causal", (6, 0), (7, 7), False),
        ("causal", (5, 0), (7, 7), True),
        ("no_mask", (5, 5), (7, 7), True),
    ],
)
def test_a_mask_tensor_is_made_only_where_one_is_needed(
    mask_type: str, window: tuple[int, int] | None, extents: tuple[int, int], expected: bool
) -> None:
    assert needs_mask(mask_rules(mask_type, window), *extents) is expected


@pytest.mark.parametrize(("num_queries", "num_keys"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_gives_nothing(num_queries: int, num_keys: int) -> None:
    q, k, v = (x.requires_grad_() for x in operands(num_queries, num_keys))
    out = attention(q, k, v, Attention(mask_rules("no_mask"), 1.0))
    assert out.shape == (BATCH, HEADS, num_queries, D)
    assert not out.any()
    out.sum().backward()
    assert not q.grad.any()  # type: ignore[union-attr]
    assert not k.grad.any()  # type: ignore[union-attr]


def test_fp8_operands_cost_what_three_casts_cost() -> None:
    """Of N(0, 1) data, in decibels; the table of docs/layers/dot_product_attention.md.

    A power-of-two scale keeps E4M3 at 31.5 dB. A score is wrong by two casts, 28.5 dB, and a probability by as much;
    its error and that of v average out over the keys, and so does the result: between 28.5 and 26.5 dB.
    """
    torch.manual_seed(0)
    leaves = [torch.randn(4, 8, 128, 64).requires_grad_() for _ in range(3)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = attention(*(as_fp8_operand(x) for x in leaves), Attention(mask_rules("causal"), 64**-0.5))
    reference, _ = attention_steps(exact[0], exact[1], exact[2], allowed_pairs("causal", None, (4, 128, 128)))
    dy = torch.randn_like(out)
    out.backward(dy)
    reference.backward(dy.double())
    measured = [sqnr_db(reference, out)]
    measured += [sqnr_db(one.grad, other.grad) for one, other in zip(exact, leaves, strict=True)]  # type: ignore[arg-type]
    assert measured == pytest.approx([27.9, 26.2, 26.2, 30.4], abs=0.5)


def test_fp8_operands_are_codes_by_block_and_pass_the_gradient() -> None:
    # One head of a token has a scale of its own: a large one beside it changes nothing.
    x = torch.randn(2, 3, 5, 16)
    loud = x.clone()
    loud[:, :, 2] *= 1000
    small = as_fp8_operand(x)
    assert torch.equal(as_fp8_operand(loud)[:, :, [0, 1, 3, 4]], small[:, :, [0, 1, 3, 4]])
    # 3 bits of mantissa: at most half a step of 2^-3 away, relatively, save in the subnormals.
    scale = x.abs().amax(-1, keepdim=True) / 256
    assert ((small - x).abs() <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10)).all()
    assert not torch.equal(small, x)
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    as_fp8_operand(leaf).backward(dy)
    assert torch.equal(leaf.grad, dy)  # type: ignore[arg-type]
