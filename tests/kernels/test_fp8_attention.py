"""fp8_attention: the reference against float64 steps; what of the twin and its reference agrees, and how far."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.attention_reference import attention_steps, chained
from torch import Tensor

from octavo import quantize
from octavo.formats import E4M3
from octavo.kernels.fp8_attention import (
    AttentionCodes,
    attention_gradient_reference,
    cast_tokens_reference,
    decoded,
    fp8_attention,
    fp8_attention_gradient,
    fp8_attention_reference,
    operand_reasons,
    unsupported_reasons,
)

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDOFF = {BF16: 2.0**-9, FP16: 2.0**-12, torch.float32: 2.0**-24}
INF, NAN = math.inf, math.nan
# M, N, D, causal: whole blocks and not, queries that look at nothing, one of each.
CASES = (
    (1, 1, 64, False),
    (130, 257, 64, True),
    (257, 130, 64, True),
    (70, 300, 128, False),
    (128, 128, 128, True),
    (1, 200, 64, True),
)


def operands(
    num_queries: int, num_keys: int, features: int, dtype: torch.dtype = BF16, device: str = "cpu", groups: int = 2
) -> list[Tensor]:
    """q of twice as many heads as k and v; loud tokens among them, so that scales differ from block to block."""
    shapes = (2 * groups, num_queries), (groups, num_keys), (groups, num_keys)
    made = [torch.randn(groups, heads, tokens, features, device=device) for heads, tokens in shapes]
    for x in made[1:]:
        x[:, :, 128:] *= 3
    return [x.to(dtype) for x in made]


def looks(num_queries: int, num_keys: int, causal: bool, device: Any = "cpu") -> Tensor:
    """[M, N] bool"""
    ahead = torch.arange(num_keys, device=device) - torch.arange(num_queries, device=device)[:, None]
    return ahead <= num_keys - num_queries if causal else torch.ones_like(ahead, dtype=torch.bool)


def steps_of_codes(codes: AttentionCodes, extents: tuple[int, int], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(out, the magnitudes that went into it, lse) in float64, of what the codes stand for."""
    q, k, v = (x.double() for x in decoded(codes, *extents, torch.float32))
    scale, allowed = q.shape[-1] ** -0.5, looks(*extents, causal, q.device)
    out, magnitudes = attention_steps(q, k, v, allowed[None, None], None, scale)
    scores = scale * q @ k.repeat_interleave(2, 1).mT
    return out, magnitudes, scores.masked_fill(~allowed, -INF).logsumexp(-1)


def score_rounding(codes: AttentionCodes, extents: tuple[int, int]) -> float:
    """How far a score can be off in float32: its D products and their sum, its factors, the maximum taken off it."""
    q, k, _ = decoded(codes, *extents, torch.float32)
    features = q.shape[-1]
    products = q.abs() @ k.repeat_interleave(2, 1).abs().mT * features**-0.5
    return float(products.max()) * (features + 8) * 2.0**-24


# Casts.


@pytest.mark.parametrize("features", [64, 128])
def test_codes_are_those_of_blocks_of_128_tokens(features: int) -> None:
    x = torch.randn(2, 3, 300, features) * torch.exp2(torch.randint(-9, 9, (2, 3, 300, 1)).float())
    codes, scale = cast_tokens_reference(x.bfloat16())
    for b in range(2):
        for h in range(3):
            # A head is a matrix of no more than 128 columns, and 128 x 128 blocks of it are 128 tokens each.
            expected = quantize(x[b, h].bfloat16(), E4M3, (128, 128), power_of_two=True)
            assert torch.equal(codes[b, h, :300].view(torch.uint8), expected.codes.view(torch.uint8))
            assert torch.equal(scale[b, h], expected.scale[:, 0])
    assert not codes[:, :, 300:].view(torch.uint8).any()


def test_what_codes_stand_for_is_exact_in_bfloat16() -> None:
    q, k, v = (x * 2.0**-40 for x in operands(130, 200, 64))
    _, _, codes = fp8_attention(q, k, v, 0.125)
    exact = decoded(codes, 130, 200, torch.float32)
    for narrow, wide, x in zip(decoded(codes, 130, 200, BF16), exact, (q, k, v), strict=True):
        assert narrow.dtype is BF16
        assert torch.equal(narrow.float(), wide)
        assert relative_error(x, wide) < 2.0**-4
    # A scale of 2^-26 is none of float16, what it stands for is: 448 of it are 112 of the smallest number.
    q = torch.full((1, 2, 130, 64), 112 * 2.0**-24, dtype=FP16)
    _, _, codes = fp8_attention(q, q, q, 0.125)
    assert float(codes.q_scale.max()) == 2.0**-26
    for values in decoded(codes, 130, 130, FP16):
        assert torch.equal(values, q)


# The reference.


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("num_queries", "num_keys", "features", "causal"), CASES)
def test_the_result_is_that_of_the_codes_but_for_rounded_probabilities(
    num_queries: int, num_keys: int, features: int, causal: bool, dtype: torch.dtype
) -> None:
    """A probability is off by 2^-4 of itself, or, below 2^-14 of the largest, by 2^-18 of that, which is 1 or less."""
    q, k, v = operands(num_queries, num_keys, features, dtype)
    out, lse, codes = fp8_attention(q, k, v, features**-0.5, causal)
    exact, magnitudes, exact_lse = steps_of_codes(codes, (num_queries, num_keys), causal)
    off = score_rounding(codes, (num_queries, num_keys)) + 2.0**-20 + num_keys * 2.0**-24
    small = 2.0**-18 * v.double().abs().sum(2, keepdim=True).repeat_interleave(2, 1)
    bound = (2.0**-4 + 2 * off) * magnitudes + small * 1.1
    bound = (bound + ROUNDOFF[dtype] * (exact.abs() + bound)) + torch.finfo(dtype).tiny
    assert out.dtype is dtype
    assert bool(((out.double() - exact).abs() <= bound).all())
    # What looks at nothing gives zeros, and inf so that the backward makes zeros of it.
    nothing = ~looks(num_queries, num_keys, causal).any(-1)
    assert not out[:, :, nothing].any()
    assert bool((lse[:, :, nothing] == INF).all())
    assert bool(
        ((lse.double() - exact_lse)[:, :, ~nothing].abs() <= off + exact_lse[:, :, ~nothing].abs() * 2e-7).all()
    )


@pytest.mark.parametrize(("num_queries", "num_keys", "features", "causal"), CASES)
def test_gradients_are_those_of_the_codes(num_queries: int, num_keys: int, features: int, causal: bool) -> None:
    """With the result and lse of float64, where no probability is rounded."""
    extents = (num_queries, num_keys)
    q, k, v = operands(*extents, features)
    codes = fp8_attention(q, k, v, features**-0.5, causal)[2]
    leaves = [x.double().requires_grad_() for x in decoded(codes, *extents, torch.float32)]
    allowed = looks(*extents, causal)
    exact, _ = attention_steps(*leaves, allowed[None, None], None, features**-0.5)
    dy = torch.randn(exact.shape)
    exact.backward(dy.double())
    lse = steps_of_codes(codes, extents, causal)[2]
    lse = torch.where(lse == -INF, INF, lse)
    gradients = attention_gradient_reference(
        dy, codes, exact.detach().float(), lse.float(), num_keys, features**-0.5, causal
    )
    # lse is rounded to 2^-24 of itself, up to 30 here.
    bound = chained(features, 4) + 60 * ROUNDOFF[torch.float32] + 2 * score_rounding(codes, extents)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if num_keys > 1 or leaf is leaves[2]:
            assert relative_error(leaf.grad, gradient) < bound  # type: ignore[arg-type]
        else:  # of one key the probability is 1 whatever its score
            assert float(gradient.abs().max()) < 1e-5


def test_blocks_of_values_of_other_sizes_keep_their_own_scales() -> None:
    """Of a thousandfold block the small ones beside it would be subnormal codes, were there one scale."""
    q, k, v = operands(64, 384, 64)
    v[:, :, 128:256] *= 2.0**20
    q[:] = 0  # every key counts the same
    out, lse, codes = fp8_attention(q, k, v, 0.125)
    assert torch.allclose(lse, torch.tensor(384.0).log())
    assert relative_error(v[:, :, :128], decoded(codes, 64, 384, torch.float32)[2][:, :, :128]) < 2.0**-4
    mean = decoded(codes, 64, 384, torch.float32)[2].mean(2, keepdim=True).repeat_interleave(2, 1)
    assert relative_error(mean.expand_as(out), out) < 2 * ROUNDOFF[BF16]


def special(device: str = "cpu") -> tuple[Tensor, ...]:
    q, k, v = operands(140, 140, 64, device=device)
    q[0, 0, 3, 5], k[0, 1, 7, 0], v[1, 0, 135, 2], q[1, 3, 9, 1] = NAN, NAN, NAN, INF
    return q, k, v


def assert_special(out: Tensor, lse: Tensor) -> None:
    nan = out.isnan()
    assert bool(nan[0, 0, 3].all())
    assert not nan[0, 0, [0, 1, 2, 4]].any()
    # A key of the second pair of heads: for whoever looks at it, the seventh query and later ones.
    assert bool(nan[0, 2:, 7:].all())
    assert not nan[0, 2:, :7].any()
    # A value: one feature of who looks at it. (Of who does not it may be, too: 0 times NaN is NaN.)
    assert bool(nan[1, :2, 135:, 2].all())
    assert not nan[1, :2, :, 0].any()
    # inf is the largest code there is.
    assert not nan[1, 3].any()
    assert bool(lse[0, 2:, 7:].isnan().all())


def test_what_is_not_finite_stays_where_it_is() -> None:
    assert_special(*fp8_attention(*special(), 0.125, True)[:2])


def test_bad_operands_are_named() -> None:
    q, k, v = operands(9, 12, 64)
    with pytest.raises(ValueError, match=r"found \(2, 4, 9, 64\), \(2, 3, 12, 64\)"):
        fp8_attention(q, k[:, :1].expand(2, 3, 12, 64), v[:, :1].expand(2, 3, 12, 64), 0.125)
    with pytest.raises(ValueError, match=r"of torch\.bfloat16, torch\.float16, torch\.bfloat16"):
        fp8_attention(q, k.half(), v, 0.125)
    with pytest.raises(ValueError, match=r"torch\.float32: FP8 products are of bfloat16 or float16; use scaled_dot"):
        fp8_attention(q.float(), k.float(), v.float(), 0.125)
    with pytest.raises(ValueError, match="heads of 32 and 32 features: FP8 products take equal ones, of 64 or 128"):
        fp8_attention(q[..., :32], k[..., :32], v[..., :32], 0.125)
    with pytest.raises(ValueError, match=r"a softmax scale of -1\.0"):
        fp8_attention(q, k, v, -1.0)
    assert operand_reasons(q[:, :, :0], k, v, 1.0) == ["no queries or no keys"]
    assert operand_reasons(q.float(), k, v, 1.0, BF16) == []
    assert "need a CUDA device" in unsupported_reasons(q)[0]


def test_autocast_changes_nothing() -> None:
    q, k, v = operands(20, 30, 64)
    dy = torch.randn(q.shape, dtype=BF16)

    def both() -> tuple[Tensor, ...]:
        out, lse, codes = fp8_attention(q, k, v, 0.125)
        return out, lse, *fp8_attention_gradient(dy, codes, out, lse, 30, 0.125)

    plain = both()
    with torch.autocast("cpu", BF16):
        assert all(torch.equal(a, b) for a, b in zip(both(), plain, strict=True))


def assert_agrees(
    found: tuple[Tensor, Tensor, AttentionCodes],
    inputs: list[Tensor],
    causal: bool,
    d: float,
    typical: float | None = None,
) -> float:
    """What `octavo.kernels.fp8_attention` derives, for scores that are off by d; -> the relative error.

    `typical`: the relative error allowed, where scores are mostly off by less than d.
    """
    q, k, v = inputs
    extents = (q.shape[2], k.shape[2])
    out, lse, codes = found
    expected, expected_lse, expected_codes = fp8_attention_reference(q, k, v, q.shape[-1] ** -0.5, causal)
    for mine, theirs in zip(codes, expected_codes, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert out.dtype is q.dtype
    assert out.transpose(1, 2).is_contiguous()
    _, magnitudes, _ = steps_of_codes(codes, extents, causal)
    rounding = 2 * ROUNDOFF[q.dtype]
    bound = (2.0**-3 + 2 * d) * magnitudes * (1 + rounding) + rounding * expected.double().abs() + 1e-7
    assert bool(((out.double() - expected.double()).abs() <= bound).all())
    # Both are rounded once more; a difference of e moves that of e / 2^-9 of them by a step of 2^-8.
    typical = (d / 8) ** 0.5 + d if typical is None else typical
    error = relative_error(expected, out)
    assert error <= typical + (typical * rounding) ** 0.5
    seen = expected_lse != INF
    assert torch.equal(lse == INF, ~seen)
    assert bool(((lse - expected_lse)[seen].abs() <= 2 * d + 2.0**-20 * (1 + expected_lse[seen].abs())).all())
    return error


def tensor_core_rounding(codes: AttentionCodes, extents: tuple[int, int]) -> float:
    """How far a score can be off on Hopper: 32 products and the sum so far are cut off 13 bits below the largest."""
    q, k, _ = decoded(codes, *extents, torch.float32)
    features = q.shape[-1]
    products = q.abs() @ k.repeat_interleave(2, 1).abs().mT * features**-0.5
    return float(products.max()) * 33 * (features / 32) * 2.0**-13
