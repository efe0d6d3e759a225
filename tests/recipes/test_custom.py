"""CustomRecipe: each operand of each product as its own spec says, and what cannot be multiplied is refused."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import quantize_weight
from octavo.kernels import scaled_mm
from octavo.recipes import (
    Accumulate,
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
from octavo.recipes.custom import PRODUCTS
from octavo.recipes.recipe import GEMMS
from octavo.runtime import Call, LayerState, plan_linear
from octavo.scaling import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, MX, ROW, TENSOR, Granularity

OPERANDS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}


def spec(granularity: Any = "tensor", format: str = "E4M3", **more: Any) -> QuantizeSpec:
    return QuantizeSpec(format=format, granularity=granularity, **more)


ONE = spec()


def custom(**changes: Any) -> CustomRecipe:
    """E4M3 and one scale a tensor for all, but for what is said."""
    return CustomRecipe(**{f"{gemm}_{operand}": ONE for gemm in GEMMS for operand in OPERANDS[gemm]} | changes)


def written_out(recipe: Recipe, **more: Any) -> CustomRecipe:
    """The same, operand by operand."""
    specs = {f"{gemm}_{operand}": recipe.spec(gemm, operand) for gemm in GEMMS for operand in OPERANDS[gemm]}
    return CustomRecipe(**specs, accumulate=recipe.accumulate, **more)


# Another spec in each use, and another granularity in each product.
MIXED = CustomRecipe(
    fprop_input=spec(BLOCK_1X128, power_of_two=True),
    fprop_weight=spec(BLOCK_128X128),
    dgrad_grad_output=spec(ROW, "E5M2"),
    dgrad_weight=spec(TENSOR, epsilon=1e-3),
    wgrad_grad_output=spec(MX, "E5M2"),
    wgrad_input=spec(MX, scale_rounding="floor"),
)
DELAYED = spec(scaling="delayed")
WEIGHTS_WITH_DELAY = custom(fprop_weight=DELAYED, dgrad_weight=DELAYED)
STEPS = 3


def steps(layer: nn.Module, recipe: Recipe | None, compiled: bool = False) -> list[Tensor]:
    """Outputs and gradients of a few steps."""
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    seen = []
    features = next(layer.parameters()).shape[-1]
    data = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(40, features, generator=data).requires_grad_()
        with octavo.autocast(recipe=recipe):
            y = run(x)
        layer.zero_grad()
        y.backward(torch.randn(y.shape, generator=data))
        seen += [y.detach(), x.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
    return seen


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (CurrentScaling(), {}),
        (CurrentScaling(power_of_two_scales=True, amax_epsilon=0.1, backward="high_precision"), {}),
        (RowwiseScaling(high_precision_wgrad=True), {}),
        (BlockScaling(), {}),
        (MXFP8Scaling(scale_rounding="floor"), {}),
        (StaticScaling(input_scale=0.02, weight_scale=0.001), {}),
        (DelayedScaling(margin=1, amax_history_len=2), {"margin": 1, "amax_history_len": 2}),
        (DelayedScaling(initialise_from_first_batch=True), {"initialise_from_first_batch": True}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_recipe_written_out_is_that_recipe_to_the_bit(recipe: Recipe, more: dict[str, Any]) -> None:
    layer = octavo.Linear(48, 32)
    expected = steps(copy.deepcopy(layer), recipe)
    assert_same(steps(layer, written_out(recipe, **more)), expected)


def product(recipe: CustomRecipe, gemm: Any, matrices: dict[str, Tensor], out_dtype: torch.dtype) -> Tensor:
    """One product by the quantizers of its two specs alone."""
    first, second = (recipe.spec(gemm, operand) for operand in OPERANDS[gemm])
    transposed = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}[gemm]
    codes = []
    for operand, own, turned in zip(OPERANDS[gemm], (first, second), transposed, strict=True):
        alone = custom(**{f"{one}_{name}": own for one in GEMMS for name in OPERANDS[one]})
        plan = plan_linear(Call(alone, False), LayerState(), "")
        made = getattr(plan, operand)(matrices[operand], not turned, turned)
        codes.append(made.column_wise if turned else made.row_wise)
    (a, scale_a), (b, scale_b) = codes
    return scaled_mm(a, b, scale_a, scale_b, None, out_dtype, "precise")


# Of each pair of granularities that has a product, in each of the three.
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("pair", PRODUCTS, ids=str)
def test_every_product_takes_its_operands_as_they_are_said(gemm: str, pair: tuple[Granularity, Granularity]) -> None:
    first, second = OPERANDS[gemm]
    recipe = custom(**{f"{gemm}_{first}": spec(pair[0], "E5M2"), f"{gemm}_{second}": spec(pair[1])})
    layer = octavo.Linear(48, 32, bias=False)
    x, dy = torch.randn(24, 48, requires_grad=True), torch.randn(24, 32)
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    found = {"fprop": y, "dgrad": x.grad, "wgrad": layer.weight.grad}
    matrices = {"input": x.detach(), "weight": layer.weight.detach(), "grad_output": dy}
    for one in GEMMS:
        if one == gemm and (pair[0] is not TENSOR and pair[0] is not ROW):
            continue  # compared with the float32 product below
        expected = product(recipe, one, matrices, torch.float32)
        assert torch.equal(found[one], expected[: found[one].shape[0], : found[one].shape[1]])
    a, b = (matrices[name] for name in OPERANDS[gemm])
    a, b = {"fprop": (a, b.t()), "dgrad": (a, b), "wgrad": (a.t(), b)}[gemm]
    exact = a @ b
    # E5M2 by E4M3 of normal data has an error of about 5.8 per cent.
    assert (found[gemm] - exact).norm() < 0.08 * exact.norm()
    assert (found[gemm] - exact).norm() > 0.01 * exact.norm()


def test_two_uses_of_each_operand_have_each_their_own_codes() -> None:
    linear = MIXED.linear
    assert (linear.input.granularity, linear.input_t.granularity) == (BLOCK_1X128, MX)
    assert (linear.weight.granularity, linear.weight_t.granularity) == (BLOCK_128X128, TENSOR)
    assert (linear.grad_output.granularity, linear.grad_output_t.granularity) == (ROW, MX)
    layer = octavo.Linear(48, 32, bias=False)
    x, dy = torch.randn(24, 48, requires_grad=True), torch.randn(24, 32)
    with octavo.autocast(recipe=MIXED):
        y = layer(x)
    y.backward(dy)
    plan = plan_linear(Call(MIXED, False), LayerState(), "")
    w, given, grad = layer.weight.detach(), plan.input(x.detach(), True, True), plan.grad_output(dy, True, True, True)
    weight = quantize_weight(w, plan, True, True)
    for found, one, other, precision in (
        (y, given.row_wise, weight.row_wise, "fprop"),
        (x.grad, grad.row_wise, weight.column_wise, "dgrad"),
        (layer.weight.grad, grad.column_wise, given.column_wise, "wgrad"),
    ):
        expected = scaled_mm(one[0], other[0], one[1], other[1], None, torch.float32, "precise")
        assert torch.equal(found, expected[: found.shape[0], : found.shape[1]]), precision
    assert torch.equal(grad.column_sum, dy.sum(0))
    assert given.row_wise[1].dtype == torch.float32
    assert given.column_wise[1].dtype == torch.float8_e8m0fnu


def test_each_kind_of_delay_is_seen_by_its_operands_alone() -> None:
    recipe = WEIGHTS_WITH_DELAY
    layer = octavo.Linear(32, 16)
    with octavo.autocast(recipe=recipe):
        layer(torch.randn(8, 32))
    state = layer.delayed_state
    assert float(state.weight.scale) == pytest.approx(float(layer.weight.detach().abs().amax()) / 448)
    assert float(state.input.scale) == float(state.grad_output.scale) == 1.0
    assert float(state.input.history.amax()) == 0.0
    again = octavo.Linear(32, 16)
    again.load_state_dict(layer.state_dict())
    x = torch.randn(8, 32)
    with octavo.autocast(recipe=recipe):
        assert torch.equal(again(x), layer(x))


@pytest.mark.parametrize("high", ["dgrad", "wgrad"])
def test_a_product_without_specs_runs_in_high_precision(high: Any) -> None:
    nothing = {f"{high}_{operand}": None for operand in OPERANDS[high]}
    layer, x, dy = octavo.Linear(32, 16), torch.randn(8, 32, requires_grad=True), torch.randn(8, 16)
    with octavo.count_gemms() as count, octavo.autocast(recipe=custom(**nothing)):
        layer(x).backward(dy)
    assert (count.fp8, count.high_precision) == (2, 1)
    exact = dy @ layer.weight if high == "dgrad" else dy.t() @ x
    assert torch.equal(x.grad if high == "dgrad" else layer.weight.grad, exact)


def test_infinite_gradients_become_nan_whatever_is_said() -> None:
    recipe = custom(dgrad_grad_output=spec(ROW))
    assert recipe.dgrad_grad_output.inf_to_nan
    assert recipe.wgrad_grad_output.inf_to_nan
    assert not recipe.fprop_input.inf_to_nan
    assert recipe == custom(dgrad_grad_output=spec(ROW, inf_to_nan=True))


GRANULARITIES = (TENSOR, ROW, BLOCK_1X128, BLOCK_128X128, MX)


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize(
    "pair",
    [pair for pair in itertools.product(GRANULARITIES, repeat=2) if pair not in PRODUCTS],
    ids=str,
)
def test_what_cannot_be_multiplied_is_refused_and_said(gemm: str, pair: tuple[Granularity, Granularity]) -> None:
    first, second = OPERANDS[gemm]
    a, b = spec(pair[0]), spec(pair[1])
    with pytest.raises(ValueError, match=f"{gemm} cannot multiply") as error:
        custom(**{f"{gemm}_{first}": a, f"{gemm}_{second}": b})
    shown = dataclasses.replace(a, inf_to_nan=True) if first == "grad_output" else a
    assert f"{gemm}_{first} {shown}" in str(error.value)
    assert f"{gemm}_{second} {b}" in str(error.value)
    # What it names as a way out is one.
    for field, other, own in ((first, second, pair[0]), (second, first, pair[1])):
        [known] = re.findall(rf"{gemm}_{field} with granularity ([^;]*?) goes with ([^;]*)", str(error.value))
        assert QuantizeSpec(format="E4M3", granularity=ast.literal_eval(known[0])).granularity is own
        others = known[1].removeprefix(f"{gemm}_{other} with ").split(" or ") if known[1] != "none" else []
        for one in others:
            custom(
                **{f"{gemm}_{field}": spec(own), f"{gemm}_{other}": spec(ast.literal_eval(one))},
                accumulate=Accumulate(fprop="precise", dgrad="precise", wgrad="precise"),
            )


def test_a_pair_that_is_refused_says_which_field_goes_with_what() -> None:
    message = (
        "dgrad_grad_output with granularity 'row' goes with dgrad_weight with 'tensor' or 'row'; dgrad_weight with"
        " granularity (128, 128) goes with dgrad_grad_output with (1, 128)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        custom(dgrad_grad_output=spec("row"), dgrad_weight=spec((128, 128)))
    with pytest.raises(ValueError, match=re.escape("fprop_input with granularity (128, 128) goes with none;")):
        custom(fprop_input=spec((128, 128)))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            ["wgrad_grad_output", "wgrad_input"],
            "wgrad_grad_output and wgrad_input: a QuantizeSpec each, or None for both operands to run wgrad in high"
            " precision",
        ),
        (["dgrad_weight"], "dgrad_weight: a QuantizeSpec"),
        (
            [f"{gemm}_{operand}" for gemm in GEMMS for operand in OPERANDS[gemm]],
            "fprop_input, fprop_weight, dgrad_grad_output, dgrad_weight, wgrad_grad_output and wgrad_input: a"
            " QuantizeSpec each, or None for both operands to run dgrad or wgrad in high precision",
        ),
    ],
)
def test_operands_that_are_missing_are_named(missing: list[str], message: str) -> None:
    given = {f"{gemm}_{operand}": ONE for gemm in GEMMS for operand in OPERANDS[gemm]}
    with pytest.raises(TypeError, match=f"^{re.escape(f'CustomRecipe needs {message}')}$"):
        CustomRecipe(**{name: one for name, one in given.items() if name not in missing})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fprop_input": None},
            r"fprop_input is None: expected a QuantizeSpec, such as .*\(format='E4M3'\); the forward always",
        ),
        (
            {"wgrad_input": octavo.E4M3},
            r"wgrad_input is E4M3: expected .*, such as QuantizeSpec\(.*\), or None for high",
        ),
        ({"dgrad_weight": None}, "dgrad_grad_output is .* and dgrad_weight is None: .* in both operands or in none"),
        ({"wgrad_grad_output": None}, "give two specs or None and None"),
        (
            {"fprop_input": spec(MX), "fprop_weight": spec(MX), "accumulate": Accumulate()},
            r"accumulate.fprop is 'fast' and fprop_input has granularity mx.*Accumulate\(fprop='precise'",
        ),
        ({"fprop_input": DELAYED}, "fprop_input is .*delayed.* and wgrad_input is .*: .*one spec in both its uses"),
        ({"dgrad_weight": DELAYED}, "fprop_weight is .* and dgrad_weight is .*delayed.* give both the same"),
        (
            {"dgrad_grad_output": DELAYED, "wgrad_grad_output": spec(format="E5M2", scaling="delayed")},
            "dgrad_grad_output is .* and wgrad_grad_output is",
        ),
        ({"margin": 2}, "margin is 2, and no operand is scaled with delay: leave it out, or give an operand"),
        ({"reduce_amax": False}, "reduce_amax is False, and no operand"),
        ({"amax_compute_algo": "most_recent"}, "amax_compute_algo is 'most_recent', and no operand"),
        ({"amax_history_len": 0}, "amax_history_len is 0: expected an integer"),
        ({"backward": "high_precision"}, "product by product, give None for dgrad_grad_output"),
        ({"grad_output_rounding": "stochastic"}, "operand by operand, give QuantizeSpec"),
        (
            {"wgrad_input": spec(rounding="stochastic"), "saved_input": "high_precision"},
            "saved_input='high_precision' makes codes again .* wgrad_input rounds stochastically",
        ),
        (
            {"dgrad_weight": spec(rounding="stochastic"), "saved_weight": "high_precision"},
            "saved_weight='high_precision' makes codes again",
        ),
        (
            {"wgrad_input": None, "wgrad_grad_output": None, "saved_input": "high_precision"},
            "saved_input='high_precision' says what an FP8",
        ),
    ],
)
def test_contradictions_are_refused_and_the_remedy_said(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        custom(**changes)


ALLOWED = re.escape("expected 'tensor', 'row', (1, 128), (128, 128) or 'mx', along the rows of the operand")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"scaling": "delayed", "power_of_two": True},
            "power_of_two is True, .* and scaling is 'delayed': leave it out",
        ),
        ({"scaling": "static", "static_scale": 1.0, "epsilon": 1.0}, "epsilon is 1.0, .* scaling is 'static'"),
        ({"rounding": "up"}, "rounding is 'up': expected 'nearest' or 'stochastic'"),
        ({"granularity": "rows"}, f"unknown granularity 'rows': {ALLOWED}"),
        ({"granularity": (1, 64)}, rf"unknown granularity \(1, 64\): {ALLOWED}"),
        ({"granularity": "column"}, f"granularity is 'column', which no product takes: {ALLOWED}"),
        ({"granularity": (128, 1)}, rf"granularity is \(128, 1\), which no product takes: {ALLOWED}"),
        ({"granularity": BLOCK_128X1}, f"granularity is 128x1, which no product takes: {ALLOWED}"),
        ({"granularity": "mx_transposed"}, f"granularity is 'mx_transposed', which no product takes: {ALLOWED}"),
        ({"power_of_two": 1}, "power_of_two is 1: expected True or False"),
        ({"epsilon": "1"}, "epsilon is '1'"),
        (
            {"granularity": "row", "scaling": "delayed"},
            "keeps one scale a tensor, found granularity row: use scaling='current', or granularity='tensor'",
        ),
        ({"format": "E8M0"}, "format is E8M0, which no product takes: use 'E4M3' or 'E5M2'"),
        ({"format": torch.float8_e4m3fnuz}, "format is E4M3FNUZ, which no product takes"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantizeSpec(**{"format": "E4M3", **fields})


def test_a_recipe_shows_what_is_not_as_usual_and_goes_through_pickle() -> None:
    assert repr(MIXED.fprop_input) == "QuantizeSpec(format=E4M3, granularity=1x128, power_of_two=True)"
    assert "dgrad_weight=QuantizeSpec(format=E4M3, epsilon=0.001)" in repr(MIXED)
    forward_alone = custom(dgrad_grad_output=None, dgrad_weight=None, wgrad_grad_output=None, wgrad_input=None)
    assert repr(forward_alone) == (
        "CustomRecipe(fprop_input=QuantizeSpec(format=E4M3), fprop_weight=QuantizeSpec(format=E4M3),"
        " dgrad_grad_output=None, dgrad_weight=None, wgrad_grad_output=None, wgrad_input=None)"
    )
    assert repr(custom(overrides={"head": None})).endswith("overrides=(('head', None),))")
    assert "accumulate=Accumulate(fprop='fast'" in repr(custom(accumulate=Accumulate()))
    other = pickle.loads(pickle.dumps(MIXED))
    assert other == MIXED
    assert hash(other) == hash(MIXED)
    assert other.linear == MIXED.linear
    assert MIXED.replaced(saved_input="high_precision").linear == MIXED.linear
    with pytest.raises(ValueError, match=r"CustomRecipe has no field 'format': that is a field of .*CurrentScaling"):
        MIXED.replaced(format=octavo.E5M2)


@pytest.mark.parametrize(
    "recipe", [MIXED, custom(fprop_weight=DELAYED, dgrad_weight=DELAYED)], ids=["mixed", "delayed"]
)
def test_compiled_code_has_the_bits_of_eager_code(recipe: Recipe) -> None:
    torch._dynamo.reset()
    layer = octavo.Linear(48, 32)
    expected = steps(copy.deepcopy(layer), recipe)
    assert_same(steps(layer, recipe, compiled=True), expected)


def test_checkpoints_and_what_is_kept_change_no_bit() -> None:
    layer = nn.Sequential(octavo.Linear(48, 32), nn.GELU(), octavo.Linear(32, 48))
    expected = steps(copy.deepcopy(layer), MIXED)

    class Checkpointed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return octavo.checkpoint(super().forward, x)

    assert_same(steps(Checkpointed(*copy.deepcopy(layer)), MIXED), expected)
    kept = MIXED.replaced(saved_input="high_precision", saved_weight="high_precision")
    assert_same(steps(copy.deepcopy(layer), kept), expected)


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_fused_layers_have_the_bits_of_separate_ones(activation: str) -> None:
    fused = octavo.LayerNormMLP(48, 64, activation=activation)
    expected = steps(copy.deepcopy(fused), MIXED)
    watched = copy.deepcopy(fused)
    # A watched layer runs every cast by itself.
    with octavo.inspection.watch(watched):
        assert_same(steps(watched, MIXED), expected)
    assert not torch.equal(expected[0], steps(copy.deepcopy(fused), None)[0])


def test_converted_models_take_it_and_overrides_win() -> None:
    model = nn.Sequential(nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 48))
    recipe = MIXED.replaced(overrides={"^2$": CurrentScaling()})
    octavo.convert(model, recipe=recipe, filter="all")
    with octavo.count_gemms() as count:
        model(torch.randn(8, 48, requires_grad=True)).sum().backward()
    assert count.fp8 == 6
    assert recipe.for_layer("0") is recipe
    assert recipe.for_layer("2") == CurrentScaling()


def test_products_that_stay_out_of_fp8_are_known_to_the_model_of_the_gain() -> None:
    from octavo.conversion.gain import method_of

    assert method_of(custom(dgrad_grad_output=None, dgrad_weight=None)).dgrad_fp8 is False


def test_a_cached_weight_is_made_anew_for_another_spec_of_dgrad() -> None:
    layer, x = octavo.Linear(32, 16), torch.randn(8, 32, requires_grad=True)
    gradients = []
    for recipe in (custom(), custom(dgrad_weight=spec(ROW)), custom(dgrad_weight=spec(ROW))):
        x.grad = None
        with octavo.autocast(recipe=recipe):
            layer(x, cached_weight="reuse").backward(torch.ones(8, 16))
        gradients.append(x.grad)
    assert not torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("second", [spec(ROW), spec(format="E5M2")], ids=str)
def test_a_weight_that_exists_in_fp8_alone_is_cast_for_dgrad_as_is_said(second: QuantizeSpec) -> None:
    recipe = custom(dgrad_weight=second)
    with octavo.quantized_init(recipe=recipe):
        layer = octavo.Linear(32, 16, bias=False)
    assert layer.weight.format is octavo.E4M3
    high = octavo.Linear(32, 16, bias=False)
    high.weight.data = layer.weight.dequantize()
    found = []
    for one in (layer, high):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with octavo.autocast(recipe=recipe):
            one(x).backward(torch.ones(8, 16))
        found.append(x.grad)
    # Its own codes where the format is theirs: one scale a tensor beside one a row is no error, and the next best.
    if second.format is octavo.E5M2:
        assert torch.equal(*found)
    assert (found[0] - found[1]).norm() < 0.05 * found[1].norm()


def test_the_pages_code_runs() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "recipes_custom.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["layer"].weight.grad.isfinite().all()
    assert names["recipe"].linear.grad_output.rounding == "stochastic"
