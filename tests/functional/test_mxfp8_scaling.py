"""Layers under MXFP8Scaling: products by hand, accuracy as derived, and every place that a recipe can stand in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.measures import sqnr_db
from tests.modules.compositions import MAKERS, Composition, assert_same_steps, jittered
from torch import Tensor, nn

import octavo
from octavo.functional.grouped_on_device import unsupported_reasons
from octavo.recipes import BlockScaling, CurrentScaling, MXFP8Scaling, Recipe
from octavo.runtime import layer_call, plan_linear
from octavo.scaling import MX
from octavo.tensor import BlockQuantizer, QuantizedTensor, QuantizeSpec, operand_of

SHAPES = [(32, 64, 32), (7, 133, 5), (1, 96, 64), (70, 33, 3), (3, 1, 1), (0, 40, 8)]
NOISE = 7.07e-4


def run(layer: nn.Module, x: Tensor, dy: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw of one call."""
    x = x.detach().requires_grad_()
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, layer.weight], dy)


def values(x: Tensor, recipe: MXFP8Scaling, operand: str = "input") -> Tensor:
    """Of a matrix whose blocks lie along its rows, in float64."""
    spec = recipe.spec("fprop" if operand == "input" else "dgrad", operand)  # type: ignore[arg-type]
    assert spec is not None
    return octavo.quantize(x, spec.format, "mx", scale_rounding=recipe.scale_rounding).dequantize(torch.float64)


@pytest.mark.parametrize(
    "recipe",
    [MXFP8Scaling(), MXFP8Scaling(scale_rounding="floor"), MXFP8Scaling(format="HYBRID")],
    ids=["E4M3", "floor", "HYBRID"],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_product_is_that_of_its_own_blocks(recipe: MXFP8Scaling, shape: tuple[int, int, int]) -> None:
    """Blocks of all operands, the weight's too, lie along the K of the product that they enter.

    Values and their products are exact: within K sums in float32, the bias and the output, K + 2 roundings.
    """
    rows, inputs, outputs = shape
    layer, x, dy = octavo.Linear(inputs, outputs), torch.randn(rows, inputs), torch.randn(rows, outputs)
    w = layer.weight.detach()
    y, dx, dw = run(layer, x, dy, recipe)
    products = {
        "fprop": (values(x, recipe), values(w, recipe), y, layer.bias.detach().double()),
        "dgrad": (values(dy, recipe, "grad_output"), values(w.t(), recipe), dx, torch.zeros(())),
        "wgrad": (values(dy.t(), recipe, "grad_output"), values(x.t(), recipe), dw, torch.zeros(())),
    }
    for name, (a, b, out, bias) in products.items():
        limit = (a.abs() @ b.abs().t() + bias.abs()) * (a.shape[1] + 2) * 2.0**-24
        assert bool(((out.double() - a @ b.t() - bias).abs() <= limit).all()), name


def test_accuracy_on_normal_data_is_the_derived_one() -> None:
    """28.5 dB with E4M3, output and gradients alike.

    Scales are powers of two under which nothing saturates or becomes subnormal, so the noise is that of BlockScaling:
    7.07e-4 of the variance an operand, derived in test_block_scaling.py. With E5M2, of one digit less, gradients have
    four times that of dy, 24.5 dB. The standard's rounding of exponents lets what lies beyond M saturate: worse.
    """
    layer = octavo.Linear(768, 256, bias=False)
    nn.init.normal_(layer.weight)
    x, dy = torch.randn(256, 768), torch.randn(256, 256)
    w = layer.weight.detach().double()
    exact = (x.double() @ w.t(), dy.double() @ w, dy.double().t() @ x.double())
    found = {
        name: [sqnr_db(a, b) for a, b in zip(exact, run(layer, x, dy, recipe), strict=True)]
        for name, recipe in (
            ("up", MXFP8Scaling()),
            ("hybrid", MXFP8Scaling(format="HYBRID")),
            ("floor", MXFP8Scaling(scale_rounding="floor")),
        )
    }
    e4m3, e5m2 = -10 * math.log10(2 * NOISE), -10 * math.log10(5 * NOISE)
    assert e4m3 == pytest.approx(28.5, abs=0.01)
    assert found["up"] == pytest.approx([e4m3] * 3, abs=0.2)
    assert found["hybrid"] == pytest.approx([e4m3, e5m2, e5m2], abs=0.25)
    # Measured, as the page says.
    assert found["floor"] == pytest.approx([27.6] * 3, abs=0.2)


def test_an_outlier_costs_its_own_block_alone() -> None:
    layer = octavo.Linear(64, 16, bias=False)
    nn.init.ones_(layer.weight)
    x = torch.ones(4, 64)
    x[0, 0] = 2.0**20
    with octavo.autocast(recipe=MXFP8Scaling()):
        y = layer(x)
    assert bool((y[1:] == 64).all())
    # 2^20 is exact, 31 ones beside it are flushed, and the 32 of the other block are exact.
    assert bool((y[0] == 2.0**20 + 32).all())


def test_values_that_are_zero_or_not_finite() -> None:
    layer, x, dy = octavo.Linear(70, 20), torch.randn(8, 70), torch.randn(8, 20)
    x[0] = 0.0
    x[1, 2] = float("nan")
    dy[2, 3] = float("inf")
    y, dx, dw = run(layer, x, dy, MXFP8Scaling())
    assert torch.equal(y[0], layer.bias.detach())
    assert bool(y[1].isnan().all())
    assert bool(y[2:].isfinite().all())
    assert bool(dx[2].isnan().all())
    assert bool(dx[[0, 1, 3]].isfinite().all())
    assert bool(dw[3].isnan().all())
    # Where x was NaN a column of dw is, and no other.
    kept = torch.ones(70, dtype=torch.bool)
    kept[2] = False
    assert bool(dw[[0, 1, 2]][:, kept].isfinite().all())


def test_the_recipe_gives_every_operand_mx_blocks() -> None:
    specs = MXFP8Scaling(scale_rounding="floor").linear
    assert all(spec.granularity is MX and spec.rule.rounding == "floor" for spec in specs[:3])
    with pytest.raises(ValueError, match="scale_rounding is 'down': expected 'up' or 'floor'"):
        MXFP8Scaling(scale_rounding="down")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which MX scales alone have, found granularity row: leave it out"):
        QuantizeSpec(format="E4M3", granularity=octavo.scaling.ROW, scale_rounding="floor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"epsilon is 0\.5: MX scales have none"):
        QuantizeSpec(format="E4M3", granularity=MX, epsilon=0.5)  # type: ignore[arg-type]


def test_products_are_counted_as_emulated() -> None:
    layer = octavo.Linear(64, 32, recipe=MXFP8Scaling())
    with octavo.count_gemms() as gemms:
        layer(torch.randn(4, 64, requires_grad=True)).sum().backward()
    assert {gemm: how for _, gemm, how in gemms.entries} == dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8 emulated")


@pytest.mark.parametrize("kind", MAKERS)
def test_fused_layers_have_the_bits_of_their_parts(kind: str) -> None:
    fused = jittered(MAKERS[kind]())
    assert_same_steps(fused, Composition(fused), MXFP8Scaling(), [torch.randn(n, 33) for n in (40, 7)])


@pytest.mark.parametrize("format", ["E4M3", "HYBRID"])
def test_what_is_kept_or_cached_changes_no_bit(format: str) -> None:
    recipe = MXFP8Scaling(format=format)
    x, dy = torch.randn(37, 50), torch.randn(37, 40)
    layer = octavo.Linear(50, 40, recipe=recipe)

    def outcome(call: Callable[[Tensor], Tensor], given: Recipe = recipe) -> list[Tensor]:
        layer.recipe = given
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)]

    expected = outcome(layer)
    again = recipe.replaced(saved_input="high_precision", saved_weight="high_precision")
    found = [
        outcome(layer, again),
        outcome(lambda t: octavo.checkpoint(layer, t)),
        outcome(lambda t: layer(t, cached_weight="refresh")),
        outcome(lambda t: layer(t, cached_weight="reuse")),
    ]
    with octavo.cached_weights():
        found += [outcome(layer), outcome(layer)]
    for one in found:
        assert all(torch.equal(a, b) for a, b in zip(one, expected, strict=True))
    assert list(layer.state_dict()) == ["weight", "bias"]
    nn.Linear(50, 40).load_state_dict(layer.state_dict())


def test_experts_have_the_bits_of_linears_or_are_refused_by_name() -> None:
    experts = octavo.GroupedLinear(2, 40, 24, recipe=MXFP8Scaling())
    x = torch.randn(39, 40, requires_grad=True)
    y = experts(x, [7, 32])
    y.square().sum().backward()
    for i, rows in enumerate((slice(0, 7), slice(7, 39))):
        linear = octavo.Linear(40, 24, recipe=MXFP8Scaling())
        linear.weight, linear.bias = (copy.deepcopy(getattr(experts, f"{name}{i}")) for name in ("weight", "bias"))
        linear.zero_grad()
        leaf = x.detach()[rows].requires_grad_()
        out = linear(leaf)
        out.square().sum().backward()
        assert torch.equal(out, y[rows])
        assert x.grad is not None
        assert torch.equal(leaf.grad, x.grad[rows])
        assert torch.equal(linear.weight.grad, getattr(experts, f"weight{i}").grad)
    assert torch.equal(experts(x, torch.tensor([7, 32])), y)  # on the CPU sizes can be read
    part = experts.parts[0]
    plan = plan_linear(layer_call(part.delayed_state, part.recipe, None), part.delayed_state, "")
    reasons = unsupported_reasons(torch.device("cuda", 0), torch.bfloat16, plan, (40, 24))
    assert reasons[0] == "scales by mx: there are grouped products with one scale a group or a row only"


def test_a_model_is_converted_with_overrides_and_the_report_says_emulated() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48), nn.Linear(48, 5))
    x = torch.randn(20, 48)
    exact = model(x)
    report = octavo.convert(model, MXFP8Scaling(overrides={"^3$": None, "^2$": CurrentScaling()}), fuse=False)
    assert [layer.recipe for layer in report.layers] == ["MXFP8Scaling", "CurrentScaling", ""]
    assert math.isnan(report.layers[0].expected_gain)
    assert "emulated" in str(report).splitlines()[2]
    assert sqnr_db(exact, model(x)) > 20
    octavo.unconvert(model)
    assert torch.equal(model(x), exact)


def test_a_transformer_layer_runs_and_is_watched() -> None:
    layer = octavo.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(10, 2, 64)
    exact = layer(x)
    with octavo.autocast(recipe=MXFP8Scaling()), octavo.inspection.watch(layer) as seen:
        y = layer(x)
    y.sum().backward()
    assert sqnr_db(exact, y) > 25
    assert seen.statistics
    # Nothing saturates, and an E4M3 operand has about 31.5 dB.
    for figures in seen.statistics.values():
        assert figures.saturation == 0
        assert figures.sqnr_db > 29


def test_an_fp8_weight_is_multiplied_as_it_is() -> None:
    """Its own codes serve the forward; those of dgrad lie across, and are quantized from its values."""
    recipe = MXFP8Scaling()
    with octavo.quantized_init(recipe=MXFP8Scaling(scale_rounding="floor")):
        layer = octavo.Linear(50, 40)
    assert isinstance(layer.weight, QuantizedTensor)
    assert layer.weight.granularity is MX
    plain = octavo.Linear(50, 40)
    with torch.no_grad():
        plain.weight.copy_(layer.weight.dequantize())
        plain.bias.copy_(layer.bias)
    spec = recipe.weight_spec
    assert spec is not None
    operand = operand_of(layer.weight.detach(), BlockQuantizer(spec), True, True, MX)
    assert operand.codes is not None
    assert operand.codes_t is not None
    assert torch.equal(operand.codes[:40, :50].float(), layer.weight.detach().codes.float())
    fresh = BlockQuantizer(spec)(plain.weight.detach(), False, True)
    assert fresh.codes_t is not None
    assert torch.equal(operand.codes_t.float(), fresh.codes_t.float())
    x = torch.randn(6, 50)
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    w = layer.weight.detach().dequantize(torch.float64)
    a = values(x, recipe)
    limit = (a.abs() @ w.abs().t() + layer.bias.abs()) * 52 * 2.0**-24
    assert bool(((y.double() - a @ w.t() - layer.bias.double()).abs() <= limit).all())
    for other in (BlockScaling(), CurrentScaling()):
        with octavo.autocast(recipe=other):
            assert sqnr_db(y, layer(x)) > 20


def test_compiled_code_gives_the_bits_of_eager_code() -> None:
    layer = nn.Sequential(octavo.Linear(40, 33, recipe=MXFP8Scaling(scale_rounding="floor")), nn.ReLU())

    def outcome(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Any]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for tokens in (7, 33):
        x = torch.randn(tokens, 40)
        for a, b in zip(outcome(layer, x), outcome(compiled, x), strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_compiled_code_on_a_gpu_emulates_with_the_bits_of_eager_code() -> None:
    layer = octavo.Linear(64, 96, recipe=MXFP8Scaling(), device="cuda", dtype=torch.bfloat16)
    x = torch.randn(48, 64, device="cuda", dtype=torch.bfloat16)
    with octavo.count_gemms() as gemms:
        y = layer(x)
    assert [how for _, _, how in gemms.entries] == ["fp8 emulated"]
    assert torch.equal(torch.compile(layer, fullgraph=True)(x), y)
