from __future__ import annotations

import pytest
import torch
from torch import nn

from octavo.study.integer_linear import Int4Linear, Int8Linear, dequantize_int4, quantize_int4, quantize_int8


def test_int8_codes_reach_127_and_err_by_half_a_step() -> None:
    x = torch.randn(20, 64)
    codes, scale = quantize_int8(x)
    assert codes.dtype == torch.int8
    assert codes.abs().amax(dim=1).eq(127).all()
    assert ((codes.float() * scale - x).abs() <= scale * (0.5 + 1e-5)).all()


def test_a_row_of_zeros_stays_zeros() -> None:
    codes, scale = quantize_int8(torch.zeros(2, 8))
    assert codes.eq(0).all()
    assert scale.eq(1).all()


@pytest.mark.parametrize("columns", [128, 200, 32])
def test_int4_errs_by_at_most_a_step_and_keeps_zero(columns: int) -> None:
    weight = torch.randn(6, columns) + 0.3
    weight[:, 5] = 0
    codes, scale, offset = quantize_int4(weight)
    restored = dequantize_int4(codes, scale, offset, columns)
    assert restored.shape == weight.shape
    assert restored[:, 5].eq(0).all()
    steps = scale.float().repeat_interleave(128, dim=1)[:, :columns, 0]
    # Half a step by rounding a value, half by rounding the offset, and fp16's 2^-11 of a scale over 15 steps.
    assert ((restored - weight).abs() <= steps * 1.01).all()
    assert codes.numel() == 6 * -(-columns // 128) * 64


@pytest.mark.parametrize(("kind", "bound"), [(Int8Linear, 0.02), (Int4Linear, 0.15)])
def test_the_layers_compute_what_they_store(kind: type[nn.Module], bound: float) -> None:
    linear = nn.Linear(256, 64)
    x = torch.randn(2, 10, 256)
    exact = linear(x)
    y = kind(linear)(x)
    assert y.shape == exact.shape
    # N(0, 1) against uniform steps: int8 steps of 3.5/127 give 0.8 % a side, int4 of 2 w_max/15 about 8 %.
    assert (y - exact).norm() / exact.norm() < bound
    assert kind(linear)(x.bfloat16() if kind is Int8Linear else x).dtype == (
        torch.bfloat16 if kind is Int8Linear else torch.float32
    )
