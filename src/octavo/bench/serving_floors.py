"""What serving must compute and move, and the time below which no way of serving gets: pure functions.

    prefill of B prompts of S tokens
        linear layers    2 B S (sum of K N) FLOP, at the rate of the rival's products
        the rest         attention, causal, 2 B S^2 width FLOP a layer; the head, 2 B width vocabulary for the last
                         token alone; both at BF16's rate
        casts            B S (sum of K) a bytes: an activation is read once, or twice where its scale is measured, and
                         written in 8 bits, a = 3 or 5; 1 where what computes it writes the codes; w bytes for each
                         weight that is cast in every call
    one token each of B sequences, C tokens in the cache
        bytes            weights of the linear layers in their 8 or 16 bits and the head's in 16, once for all
                         sequences; keys and values of C tokens, 4 B C kv_width a layer

Norms, activations, residuals and rotary embeddings are left out: they are the same for all, and no part of the floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from octavo.bench.roofline import Ceilings

Row = dict[str, Any]


class Cost(NamedTuple):
    """Bytes that a way of serving adds or saves.

    Attributes:
        activation: moved to cast an element of a linear layer's input.
        weight: moved in every call to cast an element of a weight.
        weight_bits: in which a weight is kept.
    """

    activation: int = 0
    weight: int = 0
    weight_bits: int = 16


@dataclass(frozen=True)
class Work:
    """What a model consists of.

    Attributes:
        shapes: (K, N) of each linear layer but the head.
        width: of the hidden states.
        kv_width: of the keys of one token, and of its values.
        layers: with attention.
        vocabulary: the head's outputs.
    """

    shapes: tuple[tuple[int, int], ...]
    width: int
    kv_width: int
    layers: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """Elements of the weights of the linear layers."""
        return sum(k * n for k, n in self.shapes)


def work_of(sizes: dict[str, int], shapes: Sequence[tuple[int, int]]) -> Work:
    """Of a model of `octavo.bench.models` with those sizes and linear layers."""
    heads = sizes["heads"]
    kv_width = sizes["width"] // heads * sizes.get("key_value_heads", heads)
    return Work(tuple(shapes), sizes["width"], kv_width, sizes["layers"], sizes["vocabulary"])


def prefill_work(work: Work, batch: int, tokens: int, cost: Cost) -> Row:
    """FLOP and bytes of casts of a prefill."""
    attention = 2 * batch * tokens**2 * work.width * work.layers
    head = 2 * batch * work.width * work.vocabulary
    cast = cost.activation * batch * tokens * sum(k for k, _ in work.shapes) + cost.weight * work.weights
    return {
        "linear_flops": 2.0 * batch * tokens * work.weights,
        "other_flops": float(attention + head),
        "cast_bytes": cast,
    }


def decode_work(work: Work, batch: int, context: int, cost: Cost) -> Row:
    """Bytes that one step of decoding reads."""
    weights = work.weights * cost.weight_bits // 8 + 2 * work.width * work.vocabulary
    return {"weights_read": weights, "cache_read": 4 * batch * context * work.kv_width * work.layers}


def floor_s(row: Row, ceilings: Ceilings) -> float | None:
    """Seconds of a row with the figures above, at the ceilings of its run; None where one of them lacks."""
    if ceilings.copy is None:
        return None
    if "weights_read" in row:
        return float(row["weights_read"] + row["cache_read"]) / ceilings.copy
    products = ceilings.of_products(str(row.get("products")))
    if "linear_flops" not in row or products is None or ceilings.bf16 is None:
        return None
    return float(
        row["linear_flops"] / products + row["other_flops"] / ceilings.bf16 + row["cast_bytes"] / ceilings.copy
    )
