"""The shapes that are measured: M tokens, K inputs, N outputs."""

from __future__ import annotations

from typing import NamedTuple

Shape = tuple[int, int, int]


class LayerShape(NamedTuple):
    """Extents of a TransformerLayer and its input [seq, batch, hidden]."""

    seq: int
    batch: int
    hidden: int
    ffn: int
    heads: int


class Shapes(NamedTuple):
    """What a run measures.

    Attributes:
        matmuls: of the ceilings of products, M, K, N.
        copies: bytes of the matrices by which the ceiling of copying is measured; the fastest is the ceiling.
        casts: matrices, rows and columns.
        linears: M, K, N.
        host: M, K, N of the layer whose host time is taken.
        layers: of TransformerLayers.
    """

    matmuls: tuple[Shape, ...]
    copies: tuple[int, ...]
    casts: tuple[tuple[int, int], ...]
    linears: tuple[Shape, ...]
    host: Shape
    layers: tuple[LayerShape, ...]


LINEARS: tuple[Shape, ...] = (
    (8192, 768, 3072),
    (8192, 1280, 1280),
    (8192, 1280, 5120),
    (4096, 4096, 4096),
    (16384, 4096, 14336),
    (16384, 8192, 8192),
)
HOST: Shape = (256, 1024, 1024)
CAST = (16384, 8192)
# The first is bound by the device, the others by the host.
LAYERS: tuple[LayerShape, ...] = (
    LayerShape(2048, 4, 4096, 16384, 32),
    LayerShape(1024, 8, 768, 3072, 12),
    LayerShape(256, 32, 1280, 5120, 16),
)
# From the least that no cache holds. One of 1 GiB was seen to be copied at two thirds of the others' rate.
COPIES = tuple(size << 20 for size in (64, 128, 192, 256, 320, 384, 512))

# Products by whose rates the floors of serving are reckoned: those of the Llama layers, and of GPT-2's small matrices.
SERVING_PRODUCTS: tuple[Shape, ...] = ((16384, 4096, 14336), (8192, 768, 3072))

FULL = Shapes(
    matmuls=(
        (2048, 2048, 2048),
        (4096, 4096, 4096),
        (8192, 8192, 8192),
        (16384, 8192, 8192),
        (16384, 4096, 14336),
        (8192, 1280, 5120),
        (8192, 768, 3072),
    ),
    copies=COPIES,
    # x, dy and w of the Linears, and the larger of the activations
    casts=(CAST, (16384, 14336), (16384, 4096), (4096, 4096), (8192, 5120), (8192, 1280), (8192, 768), (5120, 1280)),
    linears=LINEARS,
    host=HOST,
    layers=LAYERS,
)
QUICK = Shapes(
    matmuls=((8192, 8192, 8192), (8192, 1280, 5120)),
    copies=COPIES,
    casts=(CAST, (8192, 1280)),
    linears=((8192, 1280, 5120), (4096, 4096, 4096)),
    host=HOST,
    layers=LAYERS,
)
# Small enough for two cores that emulate FP8: the path is exercised, and no figure says anything about FP8.
CPU = Shapes(
    matmuls=((256, 256, 256),),
    copies=(1 << 22, 1 << 24),
    casts=((512, 256),),
    linears=((256, 128, 256),),
    host=(32, 64, 64),
    layers=(LayerShape(16, 2, 64, 128, 4),),
)


def shapes_for(device: str, quick: bool) -> Shapes:
    """The shapes of a run on "cuda" or "cpu"."""
    if device == "cpu":
        return CPU
    return QUICK if quick else FULL
