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

An operand that is cast once for each of its two products (`saved_input` or `saved_weight="high_precision"`, or a spec
of its own for each) is read twice: two casts of 3 bytes, each after an amax of its own where the scale is measured, at
the shares above. Casts of one layout were not measured by themselves.

No model: stochastic rounding, which is slow, and recipes that mix kinds of scales (`unmodelled`).

With many tokens the ratio tends to a limit that depends on K and N alone, and that limit decides what `convert` leaves
out. GPU time only: a host too slow to launch kernels in time hides any gain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.conversion.card import H200, Card, Pass, Products, pass_seconds, product_seconds
from octavo.recipes import OperandName, Recipe
from octavo.recipes.recipe import OPERANDS
from octavo.scaling import MX, ROW, TENSOR
from octavo.tensor import QuantizeSpec

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
        twice: operands that are cast once for each of their two products.
    """

    name: str
    products: Products
    casts: tuple[Pass, ...]
    dgrad_fp8: bool = True
    wgrad_fp8: bool = True
    twice: tuple[OperandName, ...] = ()


METHODS: dict[str, Method] = {
    "delayed": Method("delayed", "tensor", (Pass(4, 0.92),)),
    "current": Method("current", "tensor", (Pass(2, 0.98), Pass(4, 0.92))),
    "rowwise": Method("rowwise", "row", (Pass(2, 0.765), Pass(4, 0.765))),
    "block": Method("block", "block", (Pass(4, 0.42),)),
}


# Why no gain is shown; what is emulated has none.
EMULATED = "emulated on every device"
BY_CHANCE = "stochastic rounding, which is slow"
MIXED = "specs that mix kinds of scales"


def method_of(recipe: Recipe) -> Method | None:
    """What a recipe's specs cost; None of MX blocks, whose products are emulated on every device: they gain nothing.

    Of recipes that `unmodelled` names it is a part of the cost: of stochastic rounding what the same recipe costs to
    nearest, of mixed scales what that of the input costs.
    """
    specs, used = recipe.linear, _used_specs(recipe)
    if any(spec.granularity is MX for spec in used):
        return None
    kind = _kind(specs.input)
    if kind == "delayed" and any(_kind(spec) == "current" for spec in used):
        kind = "current"  # the dearer of the two for all operands
    twice = {
        "input": specs.wgrad_fp8 and (recipe.saved_input == "high_precision" or specs.input_t is not specs.input),
        "weight": specs.dgrad_fp8 and (recipe.saved_weight == "high_precision" or specs.weight_t is not specs.weight),
        "grad_output": specs.dgrad_fp8 and specs.wgrad_fp8 and specs.grad_output_t is not specs.grad_output,
    }
    base = METHODS[kind]
    return replace(
        base,
        dgrad_fp8=specs.dgrad_fp8,
        wgrad_fp8=specs.wgrad_fp8,
        twice=tuple(operand for operand in OPERANDS if twice[operand]),
    )


def unmodelled(recipe: Recipe) -> str:
    """What there is in a recipe whose cost nobody has a model of; empty if its gain can be estimated."""
    used = _used_specs(recipe)
    if any(spec.granularity is MX for spec in used):
        return EMULATED
    if any(spec.rounding == "stochastic" for spec in used):
        return BY_CHANCE
    kinds = {METHODS[_kind(spec)].products for spec in used}
    return MIXED if len(kinds) > 1 else ""


def _used_specs(recipe: Recipe) -> list[QuantizeSpec]:
    """Those of the operands of the products that run in FP8."""
    specs = recipe.linear
    used = [specs.input, specs.weight]
    used += [specs.grad_output, specs.weight_t] if specs.dgrad_fp8 else []
    return used + ([specs.grad_output_t, specs.input_t] if specs.wgrad_fp8 else [])


def _kind(spec: QuantizeSpec) -> str:
    """The entry of METHODS that costs what this spec does."""
    if spec.granularity is TENSOR:
        return "current" if spec.scaling == "current" else "delayed"
    return "rowwise" if spec.granularity is ROW else "block"


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
    weight = _float32(method.casts) if float32_weight else method.casts
    seconds += _cast_seconds(m * k, method.casts, "input" in method.twice, card)
    seconds += _cast_seconds(float(k) * n, weight, "weight" in method.twice, card)
    if method.dgrad_fp8 or method.wgrad_fp8:
        gradient = (*before, Pass(last.bytes_each, min(last.of_copy, WITH_COLUMN_SUMS)) if bias else last)
        return seconds + _cast_seconds(m * n, gradient, "grad_output" in method.twice, card)
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


def _cast_seconds(elements: float, casts: tuple[Pass, ...], twice: bool, card: Card) -> float:
    """Seconds of the passes over an operand: for both layouts at once, or twice for one each, a byte less written."""
    if twice:
        *before, last = casts
        casts = 2 * (*before, Pass(last.bytes_each - 1, last.of_copy))
    return sum(pass_seconds(elements, walk, card) for walk in casts)


def _float32(casts: tuple[Pass, ...]) -> tuple[Pass, ...]:
    """The passes over a float32 weight: each reads 2 bytes more; the cast at 0.99 unless bf16's is slow by itself."""
    *before, last = casts
    slow = last.of_copy < METHODS["delayed"].casts[0].of_copy
    reached = last.of_copy if slow else OF_FLOAT32.of_copy
    return (*(Pass(walk.bytes_each + 2, walk.of_copy) for walk in before), Pass(OF_FLOAT32.bytes_each, reached))
