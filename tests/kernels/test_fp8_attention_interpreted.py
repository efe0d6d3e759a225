"""fp8_attention by Triton's interpreter: the twin against the reference, within what E4M3 explains of rounded sums.

The interpreter's products take the code NaN for 480, so what becomes of NaN is a GPU's test.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.kernels.interpreting import exact_conversions, interpreted, silent
from tests.kernels.test_fp8_attention import assert_agrees, operands, score_rounding

from octavo.kernels.fp8_attention import decoded, fp8_attention_reference

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    from octavo.kernels.fp8_attention import triton_kernel

    exact_conversions(monkeypatch)
    return triton_kernel


@interpreted
@silent
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "features", "causal", "dtype", "queries", "groups"),
    [
        (1, 1, 64, False, BF16, 128, 2),
        (2, 128, 64, True, BF16, 128, 1),  # the first of them does not see the last key of a whole block
        (130, 257, 64, True, BF16, 128, 1),
        (257, 130, 64, True, FP16, 64, 1),
        (70, 300, 128, False, FP16, 128, 1),
        (128, 128, 128, True, BF16, 64, 1),
    ],
)
def test_the_twin_agrees_with_its_reference(
    kernels: Any,
    monkeypatch: pytest.MonkeyPatch,
    num_queries: int,
    num_keys: int,
    features: int,
    causal: bool,
    dtype: torch.dtype,
    queries: int,
    groups: int,
) -> None:
    monkeypatch.setattr(kernels, "_QUERIES", queries)
    inputs = operands(num_queries, num_keys, features, dtype, groups=groups)
    # Heads of a token side by side, with others before and behind them, as a fused product leaves them.
    shapes = [(x.shape[0], x.shape[2], x.shape[1] + 2, features) for x in inputs]
    wide = [torch.full(shape, math.nan, dtype=dtype) for shape in shapes]
    views = [w[:, :, 1:-1].copy_(x.transpose(1, 2)).transpose(1, 2) for w, x in zip(wide, inputs, strict=True)]
    found = kernels.fp8_attention_triton(*views, features**-0.5, causal)
    assert_agrees(found, inputs, causal, score_rounding(found[2], (num_queries, num_keys)) + 2.0**-20)


@interpreted
@silent
def test_the_twin_casts_what_has_no_contiguous_features(kernels: Any) -> None:
    inputs = operands(40, 50, 64, groups=1)
    turned = [x.mT.contiguous().mT for x in inputs]
    found, expected = (
        kernels.fp8_attention_triton(*turned, 0.125, False),
        fp8_attention_reference(*inputs, 0.125, False),
    )
    for one, other in zip(found[2], expected[2], strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@interpreted
@silent
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32], ids=str)
def test_the_twin_decodes_to_the_bits_of_its_reference(kernels: Any, dtype: torch.dtype) -> None:
    from octavo.kernels.fp8_attention.cast_kernel import decode_tokens_triton

    codes = fp8_attention_reference(*operands(140, 200, 64, groups=1), 0.125, False)[2]
    expected = decoded(codes, 140, 200, dtype)
    found = (
        decode_tokens_triton(codes.q, codes.q_scale, 140, dtype),
        decode_tokens_triton(codes.k, codes.k_scale, 200, dtype),
        decode_tokens_triton(codes.vt, codes.v_scale, 200, dtype, by_feature=True),
    )
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is dtype
        assert one.transpose(1, 2).is_contiguous()
        assert other.transpose(1, 2).is_contiguous()
        assert torch.equal(one, other)
