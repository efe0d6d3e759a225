"""What an operation must move and compute, and what a card was measured to reach: pure functions.

    Linear, M tokens, K in, N out, forward and backward: three products, 6 M K N FLOP
    cast to both layouts                                2 bytes read + 1 + 1 written an element
    with the scale measured first                       2 more bytes read
    a floor of a Linear in FP8                          its products + 1.12 * bytes of its casts / copy

1.12 is the price of a cast that runs at 89 % of copy (`octavo.conversion.gain` has the same).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from octavo.conversion.card import H200, Card
from octavo.conversion.gain import CAST_BYTES

CAST_PRICE = CAST_BYTES / 4

# A copy is a ceiling where it moves at least this much, 64 MiB read and as much written: more than caches hold.
LEAST_COPY = 1 << 27

# Bytes an element: of a cast to both layouts, without and with a pass before it that measures the amax.
ONE_READ, TWO_READS = 4, 6


@dataclass(frozen=True)
class Ceilings:
    """The largest rates measured in a run: bytes/s for `copy`, FLOP/s for the others; None where not measured."""

    copy: float | None = None
    bf16: float | None = None
    fp8_tensor: float | None = None
    fp8_row: float | None = None
    fp8_block: float | None = None

    def of_products(self, kind: str) -> float | None:
        """The ceiling of products in "bf16", "tensor", "row" or "block" scaled FP8."""
        return self.bf16 if kind == "bf16" else getattr(self, f"fp8_{kind}", None)

    def card(self) -> Card | None:
        """As a card of `octavo.conversion.card`, with an H200's overheads; None if a rate is missing."""
        if self.copy is None or self.bf16 is None or self.fp8_tensor is None:
            return None
        return Card("measured", self.bf16, self.fp8_tensor, self.copy, self.fp8_row, self.fp8_block)


def ceilings_of(rows: Iterable[dict[str, Any]]) -> Ceilings:
    """The largest rate of each kind among a record's `ceiling` rows; of copying, also among the copies beside casts.

    A ceiling is a maximum: how fast a card copies depends on the size, and no size is the fastest everywhere.
    """
    best: dict[str, float] = {}
    for row in rows:
        value, name = row.get("per_s"), _ceiling_named(row)
        if name is not None and isinstance(value, (int, float)):
            best[name] = max(best.get(name, 0.0), float(value))
    return Ceilings(**{name: value for name, value in best.items() if name in Ceilings.__dataclass_fields__})


def _ceiling_named(row: dict[str, Any]) -> str | None:
    """Which ceiling a row may raise, or None."""
    name = str(row.get("name"))
    if row.get("kind") == "ceiling":
        return name
    large = (row.get("bytes") or 0) >= LEAST_COPY
    return "copy" if row.get("kind") == "cast" and name.startswith("copy") and large else None


def matmul_flops(m: int, k: int, n: int) -> float:
    """FLOP of [m, k] @ [k, n]."""
    return 2.0 * m * k * n


def linear_flops(m: int, k: int, n: int) -> float:
    """FLOP of a Linear's forward and backward."""
    return 3 * matmul_flops(m, k, n)


def linear_elements(m: int, k: int, n: int) -> int:
    """Elements of x, w and dy, each of which is cast once."""
    return m * k + k * n + m * n


def linear_bytes(m: int, k: int, n: int, operand_bytes: int = 2) -> float:
    """Bytes that three products must move: each reads two operands of `operand_bytes`, and writes 2-byte results."""
    return float(2 * operand_bytes * linear_elements(m, k, n) + 2 * linear_elements(m, k, n))


def linear_floor_s(
    gemms_s: float, shape: tuple[int, int, int], copy: float, *, reads: int = 1, weight_cached: bool = False
) -> float:
    """Seconds that a Linear in FP8 should not exceed, given its three products alone.

    Args:
        gemms_s: seconds of the three products alone.
        shape: M, K, N.
        copy: bytes/s.
        reads: 1 where scales are known before (delayed), 2 where an amax is measured first (current, row-wise).
        weight_cached: the weight's codes are there already.
    """
    m, k, n = shape
    elements = linear_elements(m, k, n) - (k * n if weight_cached else 0)
    bytes_each = ONE_READ + 2 * (reads - 1)
    return gemms_s + CAST_PRICE * bytes_each * elements / copy


__all__ = [
    "CAST_PRICE",
    "LEAST_COPY",
    "Ceilings",
    "H200",
    "ONE_READ",
    "TWO_READS",
    "Card",
    "ceilings_of",
    "linear_bytes",
    "linear_elements",
    "linear_floor_s",
    "linear_flops",
    "matmul_flops",
]
