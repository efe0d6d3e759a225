"""Linear's three products: against float64 models of the codes, against high precision, and what autograd keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling

# Measured from the first batch, so that one step shows what the scaling does; without that, step 1 has scale 1.
RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(initialise_from_first_batch=True),
    "delayed E4M3": DelayedScaling(format=octavo.E4M3, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "current E4M3": CurrentScaling(format=octavo.E4M3),
    "rowwise": RowwiseScaling(),
}
ALL = {
    **RECIPES,
    "block": BlockScaling(),
    "static": StaticScaling(input_scale=0.01, weight_scale=0.001, grad_output_scale=0.01),
    "high precision backward": CurrentScaling(backward="high_precision"),
    "high precision wgrad": RowwiseScaling(high_precision_wgrad=True),
}


def run(layer: nn.Module, x: Tensor, recipe: Recipe, dy: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw of one call."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    with octavo.autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return y.detach(), x.grad, layer.weight.grad.clone()


def reference(layer: nn.Linear, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64."""
    x64, w64, dy64 = x.double(), layer.weight.detach().double(), dy.double()
    y = x64 @ w64.t() + (0 if layer.bias is None else layer.bias.detach().double())
    return y, dy64 @ w64, dy64.flatten(0, -2).t() @ x64.flatten(0, -2)


class NormalData(NamedTuple):
    """N(0, 1) data of (M, K, N) = (512, 1024, 2048), and its three products in float64."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    exact: tuple[Tensor, Tensor, Tensor]


@pytest.fixture(scope="module")
def normal() -> NormalData:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        # bf16's values are float32's and, but for the tiniest, fp16's: one reference serves all three.
        return torch.randn(shape, generator=generator).bfloat16().float()

    layer, x, dy = nn.Linear(1024, 2048), draw(4, 128, 1024), draw(4, 128, 2048)
    with torch.no_grad():
        layer.weight.copy_(draw(2048, 1024))
        layer.bias.copy_(draw(2048))
    return NormalData(x, layer.weight.detach(), layer.bias.detach(), dy, reference(layer, x, dy))


CASES = [(recipe, torch.float32) for recipe in RECIPES]
CASES += [(recipe, dtype) for recipe in ("delayed", "rowwise") for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("recipe", "dtype"), CASES)
def test_accuracy_on_normal_data(recipe: str, dtype: torch.dtype, normal: NormalData) -> None:
    """Output and E4M3 gradients of 28 dB, E5M2 gradients of 24; 3-D inputs, with bias."""
    layer = octavo.Linear(1024, 2048).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(normal.weight)
        layer.bias.copy_(normal.bias)
    y, dx, dw = run(layer, normal.x.to(dtype), RECIPES[recipe], normal.dy.to(dtype))
    assert (y.dtype, dx.dtype, dw.dtype) == (dtype, dtype, dtype)
    gradients = 24 if RECIPES[recipe].linear.grad_output.format is octavo.E5M2 else 28
    assert sqnr_db(normal.exact[0], y) >= 28
    assert sqnr_db(normal.exact[1], dx) >= gradients
    assert sqnr_db(normal.exact[2], dw) >= gradients
    # And FP8 was on: nothing of this is nearer than eight bits can be.
    assert sqnr_db(normal.exact[0], y) < 33


def decoded(x: Tensor, format: octavo.Format, granularity: str, power_of_two: bool) -> Tensor:
    return octavo.quantize(x, format, granularity, power_of_two=power_of_two).dequantize(torch.float64)


@pytest.mark.parametrize("recipe", ["current", "current E4M3", "rowwise"])
@pytest.mark.parametrize("shape", [(16, 32, 48), (7, 133, 5), (1, 256, 64), (50, 100, 3)])
def test_each_product_is_that_of_the_decoded_codes(recipe: str, shape: tuple[int, int, int]) -> None:
    """Within float32 accumulation: K additions of 2^-24 each of the magnitudes, and the scale and output roundings."""
    rows, inputs, outputs = shape
    chosen = RECIPES[recipe]
    layer, x, dy = octavo.Linear(inputs, outputs), torch.randn(rows, inputs), torch.randn(rows, outputs)
    y, dx, dw = run(layer, x, chosen, dy)
    granularity = chosen.linear.input.granularity.name
    forward, backward = chosen.linear.input.format, chosen.linear.grad_output.format
    power = chosen.linear.input.power_of_two
    w = layer.weight.detach()

    def by_rows(t: Tensor, format: octavo.Format) -> Tensor:
        return decoded(t, format, granularity, power)

    def by_columns(t: Tensor, format: octavo.Format) -> Tensor:
        return decoded(t.t(), format, granularity, power).t()

    products = {
        "fprop": (by_rows(x, forward), by_rows(w, forward).t(), y, layer.bias.detach().double()),
        "dgrad": (by_rows(dy, backward), by_columns(w, forward), dx, 0.0),
        "wgrad": (by_columns(dy, backward).t(), by_columns(x, forward), dw, 0.0),
    }
    for name, (a, b, out, bias) in products.items():
        limit = (a.abs() @ b.abs() + abs(bias)) * (a.shape[1] + 4) * 2.0**-24
        assert bool(((out.double() - a @ b - bias).abs() <= limit).all()), name


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("shape", [(1,), (7,), (13,), (50,), (3, 5), ()])
def test_case_6_any_number_of_rows(recipe: str, shape: tuple[int, ...]) -> None:
    """Case 6: Linear(256, 512) on M in {1, 7, 13, 50}, on (3, 5, 256), and on a vector, forward and backward."""
    layer = octavo.Linear(256, 512)
    x, dy = torch.randn(*shape, 256), torch.randn(*shape, 512) * 0.1
    y, dx, dw = run(layer, x, ALL[recipe], dy)
    two_d = reference(layer, x.reshape(-1, 256), dy.reshape(-1, 512))
    assert y.shape == (*shape, 512)
    assert dx.shape == (*shape, 256)
    # A GEMM of N(0, 1) data in E4M3 is right below 5 %; E5M2 gradients have twice the step: 10 %.
    assert relative_error(two_d[0].reshape(y.shape), y) < 0.05
    assert relative_error(two_d[1].reshape(dx.shape), dx) < 0.10
    assert relative_error(two_d[2], dw) < 0.10


@pytest.mark.parametrize("recipe", ALL)
def test_case_1_zeros(recipe: str) -> None:
    """Case 1: zeros through Linear(128, 64), forward and backward: exact, no NaN, other rows as before."""
    layer = octavo.Linear(128, 64, bias=False)
    x = torch.randn(32, 128)
    for zeroed in (slice(0, 32), slice(3, 4)):
        z = x.clone()
        z[zeroed] = 0.0
        y, dx, dw = run(layer, z, ALL[recipe], torch.randn(32, 64))
        assert bool((y[zeroed] == 0).all())
        assert not any(bool(t.isnan().any()) for t in (y, dx, dw))
    y, dx, dw = run(layer, x, ALL[recipe], torch.zeros(32, 64))
    assert bool((dx == 0).all() & (dw == 0).all())
    rows = [i for i in range(32) if i != 3]
    z = x.clone()
    z[3] = 0.0
    if z.abs().amax() == x.abs().amax():
        assert torch.equal(run(layer, z, ALL[recipe])[0][rows], run(layer, x, ALL[recipe])[0][rows])


STRIDED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.randn(64, 48).t(),
    "every other column": lambda: torch.randn(48, 128)[:, ::2],
    "sequence and batch exchanged": lambda: torch.randn(4, 12, 64).transpose(0, 1),
    "offset 1": lambda: torch.randn(48 * 64 + 1)[1:].view(48, 64),
    "expanded": lambda: torch.randn(1, 64).expand(48, 64),
}


@pytest.mark.parametrize("recipe", ALL)
@pytest.mark.parametrize("strided", STRIDED)
def test_case_8_strides_change_no_bit(recipe: str, strided: str) -> None:
    """Case 8: bit-equal to the contiguous copy, forward and backward."""
    layer, x = octavo.Linear(64, 32), STRIDED[strided]()
    dy = torch.randn(*x.shape[:-1], 32)
    other = copy.deepcopy(layer)
    for a, b in zip(run(layer, x, ALL[recipe], dy), run(other, x.contiguous(), ALL[recipe], dy), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ALL)
def test_case_9_a_stride_0_gradient(recipe: str) -> None:
    """Case 9: out.sum().backward() equals an explicit tensor of ones."""
    plain, results = octavo.Linear(64, 32), []
    for explicit in (True, False):
        layer = copy.deepcopy(plain)
        x = torch.ones(24, 64).mul(0.7).requires_grad_()
        with octavo.autocast(recipe=ALL[recipe]):
            y = layer(x)
        if explicit:
            y.backward(torch.ones(24, 32))
        else:
            y.sum().backward()
        results.append((x.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ALL)
def test_case_10_zero_tokens(recipe: str) -> None:
    """Case 10: out (0, 512), dW zeros of the right shape, histories untouched."""
    chosen, layer = ALL[recipe], octavo.Linear(256, 512)
    run(layer, torch.randn(8, 256), chosen)
    run(layer, torch.randn(8, 256), chosen)
    before = [o.history.clone() for o in layer.delayed_state.operands]
    y, dx, dw = run(layer, torch.randn(0, 256), chosen)
    assert y.shape == (0, 512)
    assert dx.shape == (0, 256)
    assert torch.equal(dw, torch.zeros(512, 256))
    assert torch.equal(layer.bias.grad, torch.zeros(512))
    run(layer, torch.randn(0, 256), chosen)
    after = layer.delayed_state.input.history
    if chosen.delayed is not None:
        assert torch.equal(after, before[0]), "the input's; the weight was cast all the same"


@pytest.mark.parametrize("recipe", ALL)
def test_kept_for_the_backward_are_codes_and_scales_alone(recipe: str) -> None:
    """One byte an element of x and of w; where a product runs in high precision, its operand instead."""
    chosen = ALL[recipe]
    layer, x = octavo.Linear(64, 32), torch.randn(48, 64, requires_grad=True)
    kept: list[Tensor] = []
    with (
        octavo.autocast(recipe=chosen),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        layer(x)
    codes = [t for t in kept if t.element_size() == 1]
    high = [t for t in kept if t.element_size() > 1 and t.numel() > 64]
    scales = [t for t in kept if t.element_size() == 4 and t.numel() <= 64]
    # Scales by block want whole blocks along the product's K.
    tokens, features = (128, 128) if recipe == "block" else (48, 32)
    expected_codes = chosen.linear.wgrad_fp8 * tokens * 64 + chosen.linear.dgrad_fp8 * 64 * features
    assert sum(t.numel() for t in codes) == expected_codes
    assert all(t.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) for t in codes)
    assert len(high) == (not chosen.linear.wgrad_fp8) + (not chosen.linear.dgrad_fp8)
    assert len(scales) == chosen.linear.wgrad_fp8 + chosen.linear.dgrad_fp8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", [name for name, one in ALL.items() if one.linear.wgrad_fp8])
def test_an_input_that_is_kept_is_cast_again_to_the_same_codes(recipe: str, dtype: torch.dtype) -> None:
    """Also where scales have moved on by then: the update comes before the backward."""
    codes, high = ALL[recipe], ALL[recipe].replaced(saved_input="high_precision")
    layer = octavo.Linear(40, 24, dtype=dtype)
    twin = copy.deepcopy(layer)
    for size in (1.0, 30.0, 3.0):
        x, dy = torch.randn(3, 7, 40, dtype=dtype) * size, torch.randn(3, 7, 24, dtype=dtype)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            found = run(twin, x, high, dy)
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x, codes, dy), found, strict=True))
        assert [t.shape for t in kept if t.dtype is dtype and t.dim() == 3] == [x.shape]
        assert sum(t.element_size() == 1 for t in kept) == 1, "the weight's codes, and no others"


@pytest.mark.parametrize("recipe", [name for name, one in ALL.items() if one.linear.dgrad_fp8])
def test_a_weight_is_cast_again_to_the_same_codes(recipe: str) -> None:
    """Also where scales have moved on by then: the update comes before the backward."""
    codes, high = ALL[recipe], ALL[recipe].replaced(saved_weight="high_precision")
    layer = octavo.Linear(40, 24)
    twin = copy.deepcopy(layer)
    for size in (1.0, 30.0, 3.0):
        with torch.no_grad():
            for one in (layer, twin):
                one.weight.mul_(size)
        x, dy = torch.randn(3, 7, 40), torch.randn(3, 7, 24)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            found = run(twin, x, high, dy)
        assert all(torch.equal(a, b) for a, b in zip(run(layer, x, codes, dy), found, strict=True))
        assert sum(t.element_size() == 1 for t in kept) == codes.linear.wgrad_fp8, "the input's, if any"


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise"])
def test_a_weight_is_cast_again_for_an_empty_batch_in_compiled_code(recipe: str) -> None:
    torch._dynamo.reset()
    layer = octavo.Linear(32, 48, recipe=ALL[recipe].replaced(saved_weight="high_precision"))
    x = torch.randn(0, 32, requires_grad=True)
    torch.compile(layer, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == (0, 32)
    assert layer.weight.grad is not None
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("frozen", [False, True])
def test_of_a_weight_that_is_computed_codes_are_kept(frozen: bool) -> None:
    layer = octavo.Linear(32, 48, bias=False, recipe=ALL["current"].replaced(saved_weight="high_precision"))
    torch.nn.utils.parametrizations.weight_norm(layer)
    layer.requires_grad_(not frozen)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(torch.randn(8, 32, requires_grad=True))
    assert any(t.shape == (32, 48) and t.itemsize == 1 for t in kept)


@pytest.mark.parametrize(("x_grad", "w_grad"), [(False, True), (True, False), (False, False)])
def test_nothing_is_kept_that_nobody_needs(x_grad: bool, w_grad: bool) -> None:
    layer, x = octavo.Linear(64, 32), torch.randn(48, 64, requires_grad=x_grad)
    layer.weight.requires_grad_(w_grad)
    kept: list[Tensor] = []
    with (
        octavo.autocast(recipe=CurrentScaling()),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t),
    ):
        layer(x)
    assert sum(t.numel() for t in kept if t.element_size() == 1) == x_grad * 64 * 32 + w_grad * 48 * 64


def test_double_backward_raises() -> None:
    layer, x = octavo.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    with octavo.autocast(recipe=CurrentScaling()):
        quadratic, linear = layer(x).square().sum(), layer(x).sum()
    # Of the linear one dx depends on the weight alone, so that nothing but this error would tell.
    for y in (quadratic, linear):
        with pytest.raises(RuntimeError, match=r"create_graph=True.*octavo.autocast\(enabled=False\)"):
            torch.autograd.grad(y, x, create_graph=True)


def test_function_transforms_raise_and_name_the_cause() -> None:
    layer, x = octavo.Linear(16, 16), torch.randn(4, 8, 16)
    with octavo.autocast(recipe=CurrentScaling()):
        for transform in (
            lambda: torch.vmap(layer)(x),
            lambda: torch.func.grad(lambda t: layer(t).sum())(x),
            lambda: torch.func.jvp(layer, (x,), (x,)),
        ):
            with pytest.raises(RuntimeError, match=r"a transform of torch.func .* octavo.autocast\(enabled=False\)"):
                transform()


def test_a_retained_graph_gives_the_same_gradient_twice() -> None:
    layer, x = octavo.Linear(16, 32), torch.randn(8, 16, requires_grad=True)
    with octavo.autocast(recipe=CurrentScaling()):
        y = layer(x)
    first = torch.autograd.grad(y.sum(), (x, layer.weight), retain_graph=True)
    second = torch.autograd.grad(y.sum(), (x, layer.weight))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(16, 16), (2, 3, 16), (16,), (5, 16)])
def test_the_output_can_be_changed_in_place(shape: tuple[int, ...]) -> None:
    layer, x = octavo.Linear(16, 10), torch.randn(shape, requires_grad=True)
    with octavo.autocast(recipe=CurrentScaling()):
        y = layer(x)
    untouched = y.detach().clone()
    y.mul_(2).relu_()
    y.sum().backward()
    assert torch.equal(y, (untouched * 2).relu())
    assert x.grad is not None


@pytest.mark.parametrize("recipe", ["current", "rowwise", "delayed"])
def test_representable_data_is_multiplied_without_loss(recipe: str) -> None:
    """The codes are the values, so all that is left is float32 accumulation: K + 3 roundings of 2^-24."""
    layer = octavo.Linear(64, 32, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-8, 9, (32, 64)).float())
        layer.weight[:, 0], layer.weight[0, :] = 448.0, 448.0
    x = torch.randint(-8, 9, (16, 64)).float()
    x[:, 0], x[0, :] = 448.0, 448.0
    with octavo.autocast(recipe=RECIPES[recipe]):
        y = layer(x)
    exact = x.double() @ layer.weight.detach().double().t()
    assert bool(
        ((y.double() - exact).abs() <= x.double().abs() @ layer.weight.double().abs().t() * 67 * 2.0**-24).all()
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_in_a_gradient_arrives_as_nan(value: float) -> None:
    layer, x = octavo.Linear(16, 16), torch.randn(8, 16)
    dy = torch.randn(8, 16)
    dy[2, 3] = value
    _, dx, dw = run(layer, x, CurrentScaling(), dy)
    assert bool(dx[2].isnan().all())
    assert bool(dw[3].isnan().all())
    assert bool(dx[[0, 1, 3]].isfinite().all())
    assert bool(dw[[0, 1, 2]].isfinite().all())


def test_an_infinite_input_saturates() -> None:
    layer, x = octavo.Linear(16, 16), torch.ones(8, 16)
    x[0, 0] = float("inf")
    y = run(layer, x, CurrentScaling())[0]
    capped = x.clone()
    capped[0, 0] = 1.0  # amax is that of the finite values, and beyond it nothing can be said
    assert torch.equal(y, run(layer, capped, CurrentScaling())[0])
