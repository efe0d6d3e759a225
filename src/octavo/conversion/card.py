"""A model of a card: the time of a matrix product, of a cast and of a copy, each a function of size. Pure functions.

    product [m, k] @ [k, n]   overhead + sqrt((2 m k n / rate)^2 + (bytes / copy)^2)
    pass over b bytes         overhead + b / (fraction of copy * copy)

A large product takes what it computes, one of few rows what it moves, and near the ridge both count: hence the root of
squares. The overhead is what a kernel takes however little it does: its launch within a CUDA graph, the ramp up and the
last wave of tiles. It makes the rate saturate with size: 2048^3 reaches 0.73 of the FP8 rate of large products.

Rates and overheads are the ones for which the largest error over `MEASURED_*` is least. Left out: the tiles of odd
sizes, the L2 (what was just written may be read from it, sooner than modelled), and clocks that fall as the card heats.
Two runs of the same BF16 Linear on the same H200 differed by up to 12 %; a ratio within one run is more to be trusted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Products = Literal["bf16", "tensor", "row", "block"]

GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """Rates and overheads of a card.

    Attributes:
        name: of the card.
        bf16, fp8: large products, FLOP/s; `fp8` with one scale a tensor.
        copy: bytes/s, read plus written.
        fp8_row, fp8_block: the same with a scale a row, or by block; None takes the H200's share of `fp8`.
        bf16_overhead, fp8_overhead, pass_overhead: seconds of a kernel beside its work.
        memory_gib: of the device; None if unknown.
        source: where the figures come from.
    """

    name: str
    bf16: float
    fp8: float
    copy: float
    fp8_row: float | None = None
    fp8_block: float | None = None
    bf16_overhead: float = 2.0e-6
    fp8_overhead: float = 4.5e-6
    pass_overhead: float = 1.5e-6
    memory_gib: float | None = None
    source: str = ""

    def rate(self, products: Products) -> float:
        """FLOP/s of large products."""
        if products == "bf16":
            return self.bf16
        given = {"tensor": self.fp8, "row": self.fp8_row, "block": self.fp8_block}[products]
        return given if given is not None else self.fp8 * _SHARE[products]

    def overhead(self, products: Products) -> float:
        """Seconds of a product beside its work."""
        return self.bf16_overhead if products == "bf16" else self.fp8_overhead


# Middles of what was measured on large shapes: row-wise 1310 to 1356, block 1070 to 1140, tensor-wise 1240 to 1360.
_SHARE = {"tensor": 1.0, "row": 1333 / 1300, "block": 1105 / 1300}

H200 = Card(
    "H200",
    bf16=695e12,
    fp8=1270e12,
    copy=4.17e12,
    memory_gib=140.4,
    source="measured: NVIDIA H200 700 W, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-29",
)
# The same processor with the older memory: 3.35 of 4.8 TB/s by the maker's data sheets.
H100 = Card(
    "H100",
    bf16=H200.bf16,
    fp8=H200.fp8,
    copy=H200.copy * 3.35 / 4.8,
    memory_gib=79.6,
    source="not measured: the H200's figures with the H100 SXM's memory rate, by the data sheets",
)
CARDS: dict[str, Card] = {"h200": H200, "h100": H100}


@dataclass(frozen=True)
class Pass:
    """One kernel's walk over a matrix.

    Attributes:
        bytes_each: read and written, an element.
        of_copy: its rate as a share of copying's.
    """

    bytes_each: float
    of_copy: float


def product_seconds(products: Products, m: float, k: float, n: float, card: Card = H200, out_bytes: int = 2) -> float:
    """Seconds of [m, k] @ [k, n] -> [m, n].

    Args:
        products: of which operands.
        m, k, n: extents.
        card: the card.
        out_bytes: an element of the result.
    """
    operand_bytes = 2 if products == "bf16" else 1
    computing = 2.0 * m * k * n / card.rate(products)
    moving = (operand_bytes * (m * k + k * n) + out_bytes * m * n) / card.copy
    return card.overhead(products) + math.hypot(computing, moving)


def pass_seconds(elements: float, walk: Pass, card: Card = H200) -> float:
    """Seconds of one pass over a matrix of so many elements."""
    return card.pass_overhead + elements * walk.bytes_each / (walk.of_copy * card.copy)


# What an H200 was measured at, for the test that holds the model to it. Forward and backward of a Linear without bias,
# graph replay, ms: M, K, N; BF16; three FP8 products alone; with a cast at 0.77 of copy, 4 bytes an element, around.
MEASURED_LINEARS: tuple[tuple[tuple[int, int, int], float, float, float], ...] = (
    ((8192, 768, 3072), 0.179, 0.107, 0.155),
    ((8192, 1280, 1280), 0.129, 0.079, 0.116),
    ((8192, 1280, 5120), 0.489, 0.273, 0.344),
    ((4096, 4096, 4096), 0.590, 0.334, 0.394),
    ((16384, 4096, 14336), 8.39, 4.47, 4.95),
    ((16384, 8192, 8192), 9.72, 5.39, 5.57),
)
# One product, M, K, N: TFLOP/s in BF16 and in FP8 with one scale a tensor.
MEASURED_PRODUCTS: tuple[tuple[tuple[int, int, int], float, float], ...] = (
    ((8192, 768, 3072), 639.0, 977.0),
    ((2048, 2048, 2048), 616.0, 919.0),
)
# Large products, TFLOP/s: the least and the most over several shapes.
MEASURED_CEILINGS: dict[Products, tuple[float, float]] = {
    "bf16": (670.0, 735.0),
    "tensor": (1240.0, 1360.0),
    "row": (1310.0, 1356.0),
    "block": (1070.0, 1140.0),
}
