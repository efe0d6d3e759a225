"""The model of the card against what was measured, and what follows from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import octavo
from octavo.conversion.card import (
    CARDS,
    H100,
    H200,
    MEASURED_CEILINGS,
    MEASURED_LINEARS,
    MEASURED_PRODUCTS,
    Card,
    Pass,
    Products,
    pass_seconds,
    product_seconds,
)
from octavo.conversion.gain import (
    BY_CHANCE,
    EMULATED,
    METHODS,
    MIXED,
    Method,
    bf16_seconds,
    expected_gain,
    fp8_seconds,
    method_of,
    smallest_square,
    smallest_tokens,
    unmodelled,
)
from octavo.conversion.selection import speed_reasons
from octavo.recipes import (
    BlockScaling,
    CurrentScaling,
    CustomRecipe,
    DelayedScaling,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# The largest error of the fit over all its points is 3.9 %.
BAND = 0.04
# A cast of 0.77 of copy: the kernel around which the third column was measured.
FIRST_KERNEL = Method("first kernel", "tensor", (Pass(4, 0.77),))

Shape = tuple[int, int, int]


@pytest.mark.parametrize(("shape", "bf16_ms", "products_ms", "casts_ms"), MEASURED_LINEARS)
def test_the_model_meets_every_measured_linear(
    shape: Shape, bf16_ms: float, products_ms: float, casts_ms: float
) -> None:
    m, k, n = shape
    three = sum(product_seconds("tensor", *one) for one in ((m, k, n), (m, n, k), (n, m, k)))
    assert bf16_seconds(m, k, n) * 1e3 == pytest.approx(bf16_ms, rel=BAND)
    assert three * 1e3 == pytest.approx(products_ms, rel=BAND)
    assert fp8_seconds(FIRST_KERNEL, m, k, n) * 1e3 == pytest.approx(casts_ms, rel=BAND)


@pytest.mark.parametrize(("shape", "bf16", "fp8"), MEASURED_PRODUCTS)
def test_the_model_meets_every_measured_product(shape: Shape, bf16: float, fp8: float) -> None:
    m, k, n = shape
    teraflop = 2 * m * k * n / 1e12
    assert teraflop / product_seconds("bf16", m, k, n) == pytest.approx(bf16, rel=BAND)
    assert teraflop / product_seconds("tensor", m, k, n) == pytest.approx(fp8, rel=BAND)


@pytest.mark.parametrize("products", MEASURED_CEILINGS)
def test_large_products_reach_the_measured_rates(products: Products) -> None:
    low, high = MEASURED_CEILINGS[products]
    for m, k, n in ((8192, 8192, 8192), (16384, 4096, 14336)):
        reached = 2 * m * k * n / product_seconds(products, m, k, n) / 1e12
        # 1.5 %: row-wise, whose range comes from a run with higher clocks than the Linears', is missed by 1.4 %.
        assert low * 0.985 <= reached <= high


# Sums of kernel times on a cooler card, casts of another library: ms.
PEER = {
    "delayed": (0.172, 0.123, 0.366, 0.431, 4.49, 5.32),
    "current": (0.194, 0.134, 0.401, 0.427, 4.75, 5.50),
}


@pytest.mark.parametrize("name", PEER)
def test_another_library_lies_near(name: str) -> None:
    """From -13 %, where its casts are slower on small shapes, to +10 %, where its card was cooler. Not fitted."""
    for (shape, *_), measured in zip(MEASURED_LINEARS, PEER[name], strict=True):
        assert fp8_seconds(METHODS[name], *shape) * 1e3 == pytest.approx(measured, rel=0.13)


def test_the_gain_by_block_is_that_of_its_own_run() -> None:
    """Within 10 %, which BF16 itself differed by when it was measured twice.

    Not at K = 768, whose products by block run at 0.8 of the rate of the others.
    """
    rows = [json.loads(line) for line in (RESULTS / "2026-11-30-h200-bench-kernels.jsonl").read_text().splitlines()]
    timed = {(row["rival"], tuple(row["shape"])): row["ms"] for row in rows if row["kind"] == "linear" and "ms" in row}
    shapes = [shape for rival, shape in timed if rival == "octavo-block" and shape[1] != 768]
    assert len(shapes) == 5
    for shape in shapes:
        plain = (timed["bf16", shape] + timed["bf16-again", shape]) / 2
        expected = bf16_seconds(*shape) / fp8_seconds(METHODS["block"], *shape)
        assert expected == pytest.approx(plain / timed["octavo-block", shape], rel=0.10)


def test_the_model_meets_bf16_of_another_run() -> None:
    """Within 16 %: for 4096^3 that run and the one the model was fitted to differ by 12 % themselves."""
    rows = [json.loads(line) for line in (RESULTS / "2026-11-29-h200-linear.jsonl").read_text().splitlines()]
    timed = [row for row in rows if row["check"] == "linear time"]
    assert len(timed) == 4
    for row in timed:
        assert bf16_seconds(*row["shape"]) * 1e3 == pytest.approx(row["bf16_gpu_ms"], rel=0.16)


# A share of copying the same matrix, as measured: of 16384 x 8192, of 8192 x 1280; bytes an element.
CASTS = [("delayed", 4, (0.91, 0.93), 0.95), ("current", 6, (0.93, 0.95), None), ("rowwise", 6, (0.73, 0.80), None)]


@pytest.mark.parametrize(("name", "size", "large", "small"), CASTS)
def test_casts_run_at_their_measured_share_of_copying(
    name: str, size: int, large: tuple[float, float], small: float | None
) -> None:
    def share(elements: float) -> float:
        copying = pass_seconds(elements, Pass(size, 1.0))
        return copying / sum(pass_seconds(elements, walk) for walk in METHODS[name].casts)

    # 1 %: an overhead of 1.5 us a pass, of 130 to 190 us.
    assert large[0] * 0.99 <= share(16384 * 8192) <= large[1]
    if small is not None:
        assert share(8192 * 1280) == pytest.approx(small, rel=0.03)


def test_a_float32_weight_is_read_in_four_bytes() -> None:
    shape = (8192, 4096, 4096)
    narrow, wide = (fp8_seconds(METHODS["delayed"], *shape, float32_weight=wide) for wide in (False, True))
    elements = 4096 * 4096
    # 6 bytes at 0.99 for 4 at 0.92; and a gradient of 4 bytes rather than 2, which is hidden behind computing but for
    # the root of squares.
    casts = elements / H200.copy * (6 / 0.99 - 4 / 0.92)
    assert casts < wide - narrow < casts + elements * 2 / H200.copy
    # BF16 pays for the cast as well, and for its gradient's.
    assert bf16_seconds(*shape, float32_weight=True) - bf16_seconds(*shape) == pytest.approx(
        2 * (1.5e-6 + 6 * elements / H200.copy)
    )


def test_a_bias_costs_bf16_a_read_of_dy_and_fp8_a_slower_cast() -> None:
    shape = (8192, 1280, 5120)
    elements = 8192 * 5120 / H200.copy
    bf16 = bf16_seconds(*shape, bias=True) - bf16_seconds(*shape)
    fp8 = fp8_seconds(METHODS["delayed"], *shape, bias=True) - fp8_seconds(METHODS["delayed"], *shape)
    assert bf16 == pytest.approx(1.5e-6 + 2 * elements)
    assert fp8 == pytest.approx(4 * elements * (1 / 0.81 - 1 / 0.92))


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (DelayedScaling(), "delayed"),
        (CurrentScaling(), "current"),
        (RowwiseScaling(), "rowwise"),
        (BlockScaling(), "block"),
        (StaticScaling(input_scale=1.0, weight_scale=1.0, grad_output_scale=1.0), "delayed"),
    ],
)
def test_a_recipe_costs_what_its_specs_cost(recipe: Recipe, name: str) -> None:
    assert method_of(recipe) == METHODS[name]


def test_a_recipe_that_is_emulated_on_every_device_is_not_weighed() -> None:
    assert method_of(MXFP8Scaling()) is None
    assert unmodelled(MXFP8Scaling()) == EMULATED


ONE = QuantizeSpec(format="E4M3")
OPERANDS_OF_PRODUCTS = (
    "fprop_input", "fprop_weight", "dgrad_grad_output", "dgrad_weight", "wgrad_grad_output", "wgrad_input",
)  # fmt: skip


def custom(**changes: Any) -> CustomRecipe:
    return CustomRecipe(**dict.fromkeys(OPERANDS_OF_PRODUCTS, ONE) | changes)


def by(granularity: Any, **more: Any) -> QuantizeSpec:
    return QuantizeSpec(format="E4M3", granularity=granularity, **more)


@pytest.mark.parametrize("kind", [DelayedScaling, CurrentScaling, RowwiseScaling, BlockScaling])
@pytest.mark.parametrize(("field", "extents"), [("saved_input", (0, 1)), ("saved_weight", (2, 1))])
def test_what_is_cast_again_is_charged_a_read_more(kind: Any, field: str, extents: tuple[int, int]) -> None:
    shape = (8192, 1280, 5120)
    elements = float(shape[extents[0]] * shape[extents[1]])
    once, again = method_of(kind()), method_of(kind(**{field: "high_precision"}))
    *before, last = once.casts
    # A read of 2 bytes and a launch at the rate of the cast, and what measures the scale once more.
    more = sum(pass_seconds(elements, walk) for walk in (*before, Pass(2, last.of_copy)))
    assert fp8_seconds(again, *shape) - fp8_seconds(once, *shape) == pytest.approx(more)
    assert expected_gain(1280, 5120, method=again) < expected_gain(1280, 5120, method=once)


def test_an_operand_with_a_spec_for_each_product_is_cast_twice() -> None:
    e5m2 = QuantizeSpec(format="E5M2")
    assert method_of(custom()).twice == ()
    assert method_of(custom(wgrad_input=e5m2)).twice == ("input",)
    assert method_of(custom(dgrad_weight=e5m2, wgrad_grad_output=e5m2)).twice == ("weight", "grad_output")
    # Of a product in high precision nothing is cast.
    assert method_of(custom(wgrad_input=None, wgrad_grad_output=None, dgrad_weight=e5m2)).twice == ("weight",)
    assert method_of(RowwiseScaling(high_precision_wgrad=True, saved_weight="high_precision")).twice == ("weight",)


def test_one_measured_scale_makes_a_recipe_as_dear_as_measured_ones() -> None:
    assert method_of(StaticScaling(input_scale=1.0)).name == "current"
    delayed = by("tensor", scaling="delayed")
    assert method_of(custom(fprop_input=delayed, wgrad_input=delayed)).name == "current"


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (CurrentScaling(grad_output_rounding="stochastic"), BY_CHANCE),
        (custom(fprop_input=by("tensor", rounding="stochastic")), BY_CHANCE),
        (custom(wgrad_input=by("row")), MIXED),
        (custom(fprop_input=by((1, 128)), fprop_weight=by((128, 128))), MIXED),
        (custom(wgrad_input=by("mx"), wgrad_grad_output=by("mx")), EMULATED),
        (BlockScaling(saved_weight="high_precision"), ""),
        # What no product takes does not count.
        (custom(fprop_input=by("row"), fprop_weight=by("row"), **dict.fromkeys(OPERANDS_OF_PRODUCTS[2:])), ""),
    ],
)
def test_where_no_model_of_the_cost_exists_no_gain_is_shown(recipe: Recipe, why: str) -> None:
    assert unmodelled(recipe) == why
    report = octavo.convert(nn.Sequential(nn.Linear(4096, 4096, device="meta")), recipe, filter="all", dry_run=True)
    [layer] = report.converted
    assert layer.no_gain == why
    assert math.isnan(layer.expected_gain) == bool(why)
    row, said = str(report).splitlines()[2].split(), [line for line in str(report).splitlines() if "no model" in line]
    cell = "emulated" if why == EMULATED else "unknown" if why else f"{layer.expected_gain:.2f}x"
    assert row[5] == cell
    assert [why in line for line in said] == ([True] if cell == "unknown" else [])


def test_layers_that_lose_without_what_has_no_model_are_left_out_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.conversion.selection.device_reasons", lambda device: [])
    model = nn.ModuleDict({str(size): nn.Linear(size, size, device="meta") for size in (64, 4096)})
    report = octavo.convert(model, DelayedScaling(grad_output_rounding="stochastic"), dry_run=True)
    assert [layer.name for layer in report.converted] == ["4096"]
    assert "slow it down" in report.skipped[0].reason


def test_products_that_stay_in_bf16_are_charged_so() -> None:
    shape = (8192, 4096, 4096)
    all_fp8 = fp8_seconds(method_of(RowwiseScaling()), *shape)
    wgrad = fp8_seconds(method_of(RowwiseScaling(high_precision_wgrad=True)), *shape)
    forward = fp8_seconds(method_of(RowwiseScaling(backward="high_precision")), *shape)
    m, k, n = shape
    assert wgrad - all_fp8 == pytest.approx(product_seconds("bf16", n, m, k) - product_seconds("row", n, m, k))
    # Neither gradient product in FP8, and dy is not cast at all.
    saved = sum(pass_seconds(m * n, walk) for walk in METHODS["rowwise"].casts)
    dgrad = product_seconds("bf16", m, n, k) - product_seconds("row", m, n, k)
    assert forward - wgrad == pytest.approx(dgrad - saved)


@pytest.mark.parametrize("name", METHODS)
def test_the_gain_grows_with_tokens_and_the_smallest_size_is_where_it_passes_one(name: str) -> None:
    method = METHODS[name]
    for k, n in ((1280, 5120), (4096, 4096), (768, 3072)):
        gains = [expected_gain(k, n, 2.0**power, method=method) for power in range(23)]
        assert gains == sorted(gains)
        least = smallest_tokens(k, n, method=method)
        if least is None:
            assert gains[-1] <= 1
        else:
            assert expected_gain(k, n, least - 1, method=method) <= 1 < expected_gain(k, n, least, method=method)
    side = smallest_square(method=method)
    assert side is not None
    below, above = (expected_gain(one, one, one, method=method) for one in (side - 1, side))
    assert below <= 1 < above


def test_narrow_layers_never_gain() -> None:
    assert smallest_tokens(64, 64) is None
    assert smallest_square(Card("slow units", 1e15, 0.9e15, 4e12)) is None


def test_the_order_of_recipes_is_that_of_their_casts() -> None:
    gains = [expected_gain(4096, 4096, 8192, method=METHODS[name]) for name in ("delayed", "current", "rowwise")]
    assert gains == sorted(gains, reverse=True)


def test_speed_reasons_name_one_rule() -> None:
    assert speed_reasons(767, 3072) == ["in_features = 767 is no multiple of 16: each call would pad"]
    assert speed_reasons(4096, 4096) == []
    [reason] = speed_reasons(4096, 4096, tokens=64)
    assert reason == "FP8 would slow it down: expected 0.61x of bf16's speed (filter='all' overrides)"
    assert speed_reasons(704, 704) == []
    assert speed_reasons(704, 704, method=METHODS["rowwise"]) != []


def test_a_card_without_its_own_rates_has_the_h200s_shares() -> None:
    card = Card("other", 1e15, 2e15, 4e12)
    assert card.rate("row") / card.rate("tensor") == pytest.approx(1333 / 1300)
    assert card.rate("block") / card.rate("tensor") == pytest.approx(1105 / 1300)
    assert Card("other", 1e15, 2e15, 4e12, fp8_row=3e15).rate("row") == 3e15


def test_cards_say_whether_they_were_measured() -> None:
    assert CARDS == {"h200": H200, "h100": H100}
    assert H200.source.startswith("measured")
    assert H100.source.startswith("not measured")
    assert H100.copy < H200.copy


def test_the_default_filter_weighs_each_layers_own_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.conversion.selection.device_reasons", lambda device: [])
    model = nn.ModuleDict({name: nn.Linear(704, 704, device="meta") for name in ("a", "b")})
    delayed = octavo.convert(model, DelayedScaling(), dry_run=True)
    assert [row.name for row in delayed.converted] == ["a", "b"]
    assert delayed.layers[0].expected_gain == pytest.approx(expected_gain(704, 704))
    mixed = octavo.convert(model, DelayedScaling(overrides={"b": RowwiseScaling()}), dry_run=True)
    assert [row.name for row in mixed.converted] == ["a"]
    gain = expected_gain(704, 704, method=METHODS["rowwise"])
    assert mixed.skipped[0].reason.startswith(f"FP8 would slow it down: expected {gain:.2f}x of bf16's speed")
    assert mixed.skipped[0].expected_gain == pytest.approx(gain)
    model["c"] = nn.Linear(64, 64, device="meta")
    kept = octavo.convert(model, DelayedScaling(overrides={"b|c": None}), dry_run=True)
    assert {row.reason for row in kept.skipped} == {"the recipe's overrides keep it in high precision"}
    assert kept.skipped[0].reason == "the recipe's overrides keep it in high precision"
