"""Which Linears gain from FP8: the time of its products and casts, by the model of the card.

For M tokens, K inputs and N outputs, forward and backward:

    BF16   three products in BF16;                                  a bias: a sum over dy, 2 bytes an element
    FP8    three products in FP8, and x, w and dy cast for them;    a bias: the sum comes with the cast of dy

A cast makes both layouts. What its passes move an element, and at which share of copying's rate (measured on an H200,
torch 2.11, Triton 3.6, 2026-11-30, of bf16 unless said otherwise):

    delayed    read, two codes written: 4 bytes at 0.92
    current    the amax first: 2 bytes at 0.98, then as delayed; together 6 at 0.94
    row-wise   6 bytes at 0.765 (of small matrices 0.66, of large ones 0.91)
    block      4 bytes at 0.42 (0.36 to 0.65): what a Linear took beside its products at the rate of the fastest kind;
               the product of two operands with blocks of 1x128 is slower, and this has to make up for it
    float32    6 bytes at 0.99 where bf16 has 4
    column sums of a gradient with it                 0.81

With many tokens the ratio tends to a limit that depends on K and N alone, and that limit decides what `convert` leaves
out. GPU time only: a host too slow to launch kernels in time hides any gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.conversion.card import H200, Card, Pass, Products, pass_seconds, product_seconds
from octavo.recipes import Recipe
from octavo.scaling import MX, ROW, TENSOR

# A cast as the targets of the bench ask for it: 4 bytes an element (2 read, 1 + 1 written) at 1 / 1.12 of copying.
CAST_BYTES = 1.12 * 4
# What a cast's last pass reaches at most if it sums the columns too; and what one of float32 moves and reaches.
WITH_COLUMN_SUMS = 0.81
OF_FLOAT32 = Pass(6, 0.99)
# Casts of BF16 autocast between float32 and bf16, and sums over a gradient: as fast as copying, in BF16's favour.
TO_BF16 = Pass(6, 1.0)
COLUMN_SUMS = Pass(2, 1.0)

# Tokens at which nothing but K and N matters any more.
MANY_TOKENS = 1 << 32
# Above it nobody trains: a size that gains only beyond counts as never.
MOST_TOKENS, LARGEST_SQUARE = 1 << 22, 1 << 16


@dataclass(frozen=True)
class Method:
    """What FP8 costs beside and within its products.

    Attributes:
        name: of the scaling.
        products: which rate they run at.
        casts: passes over each operand in bf16.
        dgrad_fp8, wgrad_fp8: False runs that product in BF16.
    """

    name: str
    products: Products
    casts: tuple[Pass, ...]
    dgrad_fp8: bool = True
    wgrad_fp8: bool = True


METHODS: dict[str, Method] = {
    "delayed": Method("delayed", "tensor", (Pass(4, 0.92),)),
    "current": Method("current", "tensor", (Pass(2, 0.98), Pass(4, 0.92))),
    "rowwise": Method("rowwise", "row", (Pass(2, 0.765), Pass(4, 0.765))),
    "block": Method("block", "block", (Pass(4, 0.42),)),
}


def method_of(recipe: Recipe) -> Method | None:
    """What a recipe's specs cost; of recipes that mix granularities, what that of the input costs.

    None of MX blocks, whose products are emulated on every device: they gain nothing.
    """
    specs = recipe.linear
    granularity = specs.input.granularity
    if granularity is MX:
        return None
    if granularity is TENSOR:
        base = METHODS["current" if specs.input.scaling == "current" else "delayed"]
    else:
        base = METHODS["rowwise" if granularity is ROW else "block"]
    return Method(base.name, base.products, base.casts, specs.dgrad_fp8, specs.wgrad_fp8)


def bf16_seconds(
    tokens: float,
    in_features: int,
    out_features: int,
    card: Card = H200,
    *,
    bias: bool = False,
    float32_weight: bool = False,
) -> float:
    """Seconds of a Linear's forward and backward in BF16.

    Args:
        tokens, in_features, out_features: M, K and N.
        card: the card.
        bias: there is one.
        float32_weight: it is cast to bf16 once, and its gradient back, as torch.autocast does.
    """
    m, k, n = tokens, in_features, out_features
    seconds = sum(product_seconds("bf16", a, b, c, card) for a, b, c in ((m, k, n), (m, n, k), (n, m, k)))
    if float32_weight:
        seconds += 2 * pass_seconds(float(k) * n, TO_BF16, card)
    return seconds + (pass_seconds(m * n, COLUMN_SUMS, card) if bias else 0.0)


def fp8_seconds(
    method: Method,
    tokens: float,
    in_features: int,
    out_features: int,
    card: Card = H200,
    *,
    bias: bool = False,
    float32_weight: bool = False,
) -> float:
    """Seconds of a Linear's forward and backward in FP8, casts included; arguments as of `bf16_seconds`.

    A product that stays in BF16 is charged as such, and the operands' casts in full.
    """
    m, k, n = tokens, in_features, out_features
    dgrad: Products = method.products if method.dgrad_fp8 else "bf16"
    wgrad: Products = method.products if method.wgrad_fp8 else "bf16"
    seconds = product_seconds(method.products, m, k, n, card) + product_seconds(dgrad, m, n, k, card)
    seconds += product_seconds(wgrad, n, m, k, card, out_bytes=4 if float32_weight else 2)
    *before, last = method.casts
    seconds += sum(pass_seconds(m * k, walk, card) for walk in method.casts)
    weight = _float32(method.casts) if float32_weight else method.casts
    seconds += sum(pass_seconds(float(k) * n, walk, card) for walk in weight)
    if method.dgrad_fp8 or method.wgrad_fp8:
        gradient = (*before, Pass(last.bytes_each, min(last.of_copy, WITH_COLUMN_SUMS)) if bias else last)
        return seconds + sum(pass_seconds(m * n, walk, card) for walk in gradient)
    return seconds + (pass_seconds(m * n, COLUMN_SUMS, card) if bias else 0.0)


def expected_gain(
    in_features: int,
    out_features: int,
    tokens: float | None = None,
    card: Card = H200,
    method: Method = METHODS["delayed"],
    *,
    bias: bool = False,
    float32_weight: bool = False,
) -> float:
    """Time of a Linear's forward and backward in bf16 over that in FP8; above 1 FP8 is faster.

    Args:
        in_features, out_features: K and N.
        tokens: M; None for the limit of many tokens.
        card: the rates.
        method: of FP8.
        bias, float32_weight: as of `bf16_seconds`.
    """
    shape = (MANY_TOKENS if tokens is None else tokens, in_features, out_features)
    high = bf16_seconds(*shape, card, bias=bias, float32_weight=float32_weight)
    return high / fp8_seconds(method, *shape, card, bias=bias, float32_weight=float32_weight)


def smallest_tokens(
    in_features: int,
    out_features: int,
    card: Card = H200,
    method: Method = METHODS["delayed"],
    *,
    bias: bool = False,
    float32_weight: bool = False,
) -> int | None:
    """The fewest tokens from which on a Linear of K and N gains; None if it never does."""

    def gain(tokens: int) -> float:
        return expected_gain(in_features, out_features, tokens, card, method, bias=bias, float32_weight=float32_weight)

    return _first(gain, MOST_TOKENS)


def smallest_square(card: Card = H200, method: Method = METHODS["delayed"], *, bias: bool = False) -> int | None:
    """The least M = K = N from which on a Linear gains; None if none up to 65536 does."""
    return _first(lambda size: expected_gain(size, size, size, card, method, bias=bias), LARGEST_SQUARE)


def _first(gain: Callable[[int], float], most: int) -> int | None:
    """The least size up to `most` from which on the gain is above 1."""
    low, high = 0, most
    if gain(high) <= 1:
        return None
    while high - low > 1:  # the gain grows with the size, from below 1
        middle = (low + high) // 2
        low, high = (low, middle) if gain(middle) > 1 else (middle, high)
    return high


def _float32(casts: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The passes over a float32 weight: each reads 2 bytes more; the cast at 0.99 unless bf16's is slow by itself."""
    *before, last = casts
    slow = last.of_copy < METHODS["delayed"].casts[0].of_copy
    reached = last.of_copy if slow else OF_FLOAT32.of_copy
    return (*(Pass(walk.bytes_each + 2, walk.of_copy) for walk in before), Pass(OF_FLOAT32.bytes_each, reached))
