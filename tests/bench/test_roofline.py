from __future__ import annotations

import pytest

from octavo.bench.roofline import (
    Ceilings,
    ceilings_of,
    linear_bytes,
    linear_elements,
    linear_floor_s,
    linear_flops,
)


def test_a_linear_has_three_products_and_reads_each_operand_twice() -> None:
    # 2 x 3 x 5: three products of 2 * 30 FLOP; x 6, w 15, dy 10 elements, each in two products, each written once.
    assert linear_flops(2, 3, 5) == 180
    assert linear_elements(2, 3, 5) == 31
    assert linear_bytes(2, 3, 5, operand_bytes=1) == 2 * 31 + 2 * 31


def test_the_floor_is_the_products_and_casts_at_their_price() -> None:
    # 31 elements at 4 bytes and 31 bytes/s: 4 s of copying, 12 % more for a cast.
    assert linear_floor_s(1.0, (2, 3, 5), 31.0) == pytest.approx(1.0 + 1.12 * 4)
    assert linear_floor_s(1.0, (2, 3, 5), 31.0, reads=2) == pytest.approx(1.0 + 1.12 * 6)
    # Without the weight's 15 elements.
    assert linear_floor_s(1.0, (2, 3, 5), 16.0, weight_cached=True) == pytest.approx(1.0 + 1.12 * 4)


def test_ceilings_are_the_largest_rates_of_the_record() -> None:
    rows = [
        {"kind": "ceiling", "name": "bf16", "per_s": 5.0},
        {"kind": "ceiling", "name": "bf16", "per_s": 7.0},
        {"kind": "ceiling", "name": "copy", "per_s": 3.0},
        {"kind": "ceiling", "name": "fp8_row", "per_s": None},
        {"kind": "cast", "name": "copy", "per_s": 99.0, "bytes": 1 << 26},  # so small that a cache may hold it
        {"kind": "cast", "name": "delayed", "per_s": 98.0, "bytes": 1 << 30},
    ]
    found = ceilings_of(rows)
    assert found == Ceilings(copy=3.0, bf16=7.0)
    assert found.of_products("bf16") == 7.0
    assert found.of_products("row") is None
    assert found.card() is None


def test_a_faster_copy_beside_a_cast_is_the_ceiling() -> None:
    rows = [
        {"kind": "ceiling", "name": "copy", "per_s": 3.0},
        {"kind": "cast", "name": "copy", "per_s": 4.0, "bytes": 1 << 27},
        {"kind": "cast", "name": "copy again", "per_s": 4.5, "bytes": 1 << 28},
    ]
    assert ceilings_of(rows).copy == 4.5


def test_measured_rates_make_a_card() -> None:
    card = Ceilings(copy=1.0, bf16=2.0, fp8_tensor=3.0).card()
    assert card is not None
    assert (card.copy, card.bf16, card.fp8) == (1.0, 2.0, 3.0)
