from __future__ import annotations

import pytest

from octavo.bench.roofline import Ceilings
from octavo.bench.serving_floors import Cost, decode_work, floor_s, prefill_work, work_of

LLAMA = {"width": 4096, "heads": 32, "key_value_heads": 8, "layers": 8, "vocabulary": 32000}
LAYER = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096), (4096, 14336), (4096, 14336), (14336, 4096)]
CEILINGS = Ceilings(copy=4e12, bf16=5e14, fp8_tensor=1e15, fp8_row=1e15)


def test_the_work_of_a_prefill() -> None:
    work = work_of(LLAMA, 8 * LAYER)
    # 8 (2 4096^2 + 2 4096 1024 + 3 4096 14336) weights
    assert work.weights == 1_744_830_464
    found = prefill_work(work, 2, 1024, Cost(activation=5))
    assert found["linear_flops"] == 2 * 2048 * 1_744_830_464
    # Attention: 2 products of 2 * 1024^2 * 4096 FLOP, half of them masked, 2 sequences, 8 layers; a row of logits each.
    assert found["other_flops"] == 2 * 2 * 1024**2 * 4096 * 8 + 2 * 2 * 4096 * 32000
    # Six inputs of 4096 and one of 14336 a layer, read twice in 16 bits and written in 8.
    assert found["cast_bytes"] == 5 * 2048 * 8 * (6 * 4096 + 14336)
    fused = prefill_work(work, 2, 1024, Cost(activation=1, weight=3))
    assert fused["cast_bytes"] == 2048 * 8 * (6 * 4096 + 14336) + 3 * 1_744_830_464
    assert prefill_work(work, 2, 1024, Cost())["cast_bytes"] == 0


def test_the_bytes_of_a_token() -> None:
    work = work_of(LLAMA, 8 * LAYER)
    found = decode_work(work, 32, 256, Cost(weight_bits=8))
    assert found["weights_read"] == 1_744_830_464 + 2 * 4096 * 32000
    # Keys and values of 1024 numbers in 16 bits.
    assert found["cache_read"] == 32 * 256 * 8 * 2 * 1024 * 2
    assert decode_work(work, 1, 256, Cost())["weights_read"] == 2 * (1_744_830_464 + 4096 * 32000)


def test_every_head_has_keys_of_its_own_unless_said_otherwise() -> None:
    assert work_of({"width": 768, "heads": 12, "layers": 12, "vocabulary": 50304}, []).kv_width == 768


def test_a_floor_is_at_the_ceilings_of_the_run() -> None:
    row = {"linear_flops": 5e12, "other_flops": 1e12, "cast_bytes": 4e9}
    assert floor_s(row | {"products": "bf16"}, CEILINGS) == pytest.approx(0.013)
    assert floor_s(row | {"products": "row"}, CEILINGS) == pytest.approx(0.008)
    assert floor_s({"weights_read": 3e9, "cache_read": 1e9}, CEILINGS) == pytest.approx(0.001)
    assert floor_s(row | {"products": "row"}, Ceilings(copy=4e12, bf16=5e14)) is None
    assert floor_s(row | {"products": "row"}, Ceilings()) is None
    assert floor_s({"products": "bf16"}, CEILINGS) is None
