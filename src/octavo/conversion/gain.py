"""Which Linears gain from FP8: a model of the card, from the time of its products and of its casts.

For M tokens, K inputs and N outputs, forward and backward,

    bf16:  6 M K N / r16
    FP8:   6 M K N / r8 + 1.12 * 4 bytes * (M K + M N + N K) / copy

r16, r8 and `copy` are what an H200 was measured to reach on large shapes; the casts read 2 bytes an element and write
2. With many tokens the ratio tends to a limit that depends on K and N alone, and that limit decides.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """Rates of a card: products in FLOP/s, copies in bytes/s (read plus written)."""

    name: str
    bf16: float
    fp8: float
    copy: float


# NVIDIA H200, torch 2.11.0+cu130, 2026-11-29: bf16 670 to 735, FP8 1240 to 1360 TFLOP/s, copy 4.24 TB/s.
H200 = Card("H200", 700e12, 1300e12, 4.24e12)

# A cast moves 4 bytes an element (2 read, 1 + 1 written), at 1 / 1.12 of the copy rate.
CAST_BYTES = 1.12 * 4


def expected_gain(in_features: int, out_features: int, tokens: int | None = None, card: Card = H200) -> float:
    """Time of a Linear's forward and backward in bf16 over that in FP8; above 1 FP8 is faster.

    Args:
        in_features, out_features: K and N.
        tokens: M; None for the limit of many tokens.
        card: the rates.
    """
    products = 6.0 * in_features * out_features
    cast = float(in_features + out_features) + (in_features * out_features / tokens if tokens else 0.0)
    return (products / card.bf16) / (products / card.fp8 + CAST_BYTES * cast / card.copy)
