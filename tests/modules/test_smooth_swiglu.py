"""`smooth_swiglu` of octavo.LayerNormMLP: what it gains, that it changes no function, and all else with it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.measures import relative_error, sqnr_db
from tests.modules.compositions import RECIPES, Composition, assert_same_steps, jittered, state_of, under
from torch import Tensor, nn

import octavo
from octavo.functional import smooth_linear, smoothing_of
from octavo.functional.products import in_high_precision
from octavo.functional.smoothing import channels_of, divided, unfolded
from octavo.modules.linear import Linear
from octavo.recipes import CurrentScaling, DelayedScaling, RowwiseScaling, StaticScaling
from octavo.runtime import layer_call

BF16 = torch.bfloat16
K, F, M, OUTLIER = 128, 192, 256, 7
# A static scale of fc2's operands is refused.
SMOOTHED = {name: recipe for name, recipe in RECIPES.items() if name not in ("static", "none") and recipe is not None}


def mlp(**options: Any) -> Any:
    return jittered(octavo.LayerNormMLP(33, 50, activation="swiglu", smooth_swiglu=True, **options))


def twin(layer: Any, **attributes: Any) -> Any:
    copied = copy.deepcopy(layer)
    for name, value in attributes.items():
        setattr(copied, name, value)
    return copied


def run(layer: nn.Module, recipe: Any, x: Tensor) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    with under(recipe):
        y = layer(leaf)
    y.float().square().sum().backward()
    outcome = [y.detach(), leaf.grad, *(p.grad for p in layer.parameters()), *state_of(layer)]
    layer.zero_grad()
    return outcome


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- what it gains


class Data:
    """An MLP whose channels are of very different size, as trainings make them, with columns of fc2 to match: each
    matters as much as any other. One may become 1000 times the largest of the others."""

    def __init__(self) -> None:
        self.layer = octavo.LayerNormMLP(K, F, activation="swiglu")
        sizes = torch.exp(1.5 * torch.randn(F))
        with torch.no_grad():
            self.layer.fc1_weight[F:].mul_(sizes[:, None])
            self.layer.fc1_bias[F:].mul_(sizes)
            self.layer.fc2_weight.div_(sizes)
        self.layer.layer_name = "mlp"
        self.x = torch.randn(M, K)

    def amaxes(self) -> Tensor:
        return self.activation().abs().amax(0)

    def activation(self) -> Tensor:
        layer = self.layer
        with torch.no_grad():
            z = nn.functional.linear(layer.normalised(self.x), layer.fc1_weight, layer.fc1_bias)
            return nn.functional.silu(z[:, :F]) * z[:, F:]

    def grow(self, times: float) -> None:
        """The channel OUTLIER becomes `times` the largest of the others, and its column of fc2 as much smaller."""
        amaxes = self.amaxes()
        own, others = amaxes[OUTLIER].item(), torch.cat([amaxes[:OUTLIER], amaxes[OUTLIER + 1 :]]).max().item()
        with torch.no_grad():
            self.layer.fc1_weight[F + OUTLIER] *= times * others / own
            self.layer.fc1_bias[F + OUTLIER] *= times * others / own
            self.layer.fc2_weight[:, OUTLIER] *= own / (times * others)

    def exact(self) -> Tensor:
        with octavo.autocast(enabled=False):
            result: Tensor = copy.deepcopy(self.layer).double()(self.x.double())
        return result.detach()

    def noise_of_one_scale(self) -> float:
        """What E4M3 codes of a under one scale do to y, as part of it in dB, by the spacing of the codes alone: uniform
        within half a step, or all of what lies below half the first code."""
        a = self.activation().double()
        codes = a.abs() * (448 / a.abs().amax())
        step = torch.exp2(torch.floor(torch.log2(codes.clamp(min=2.0**-6))) - 3)
        noise = torch.where(codes < 2.0**-10, codes.square(), step.square() / 12) * (a.abs().amax() / 448) ** 2
        power = noise @ self.layer.fc2_weight.detach().double().square().t()
        return float(10 * torch.log10(power.sum() / self.exact().square().sum()))


# fc1's weight has rows of very different size: by row that costs nothing, and is not what is looked at here.
PER_TENSOR = {
    "delayed": DelayedScaling(amax_history_len=4, overrides={"fc1": RowwiseScaling()}),
    "current": CurrentScaling(overrides={"fc1": RowwiseScaling()}),
    "current, powers of two": CurrentScaling(power_of_two_scales=True, overrides={"fc1": RowwiseScaling()}),
}


@pytest.mark.parametrize("name", PER_TENSOR)
def test_a_channel_a_thousand_times_larger_costs_nothing_when_smoothed(name: str) -> None:
    """Derived: without smoothing, one scale a tensor has its steps set by the outlier, and y is at most as close as
    they leave it. With it, as close as before there was an outlier."""
    data = Data()
    smooth = twin(data.layer, smooth_swiglu=True)

    def closeness(layer: Any) -> float:
        layer.load_state_dict(octavo.state_dict(data.layer), strict=True)
        for _ in range(2):  # delayed: the first step tells the second's scales
            with under(PER_TENSOR[name]):
                y = layer(data.x)
        return sqnr_db(data.exact(), y)

    before = closeness(smooth)
    data.grow(1000.0)
    assert data.amaxes().topk(2).values.div(data.amaxes().max()).tolist()[1] < 1 / 999
    at_most = -data.noise_of_one_scale() + 0.5
    plain, smoothed = closeness(copy.deepcopy(data.layer)), closeness(smooth)
    assert plain <= at_most
    assert smoothed >= before - 0.5
    assert smoothed - plain > before - at_most - 0.5 > 5


def test_an_outlier_that_comes_at_once_does_not_saturate() -> None:
    """Delayed scaling provides for what has been. A channel that is 1000 times as large in the next step, and its
    column of fc2 as it was, makes nearly all of y, and saturates at what the history knows: twice the largest of the
    others at most, of which y then keeps 2 in 1000. With smoothing nothing of a or w2 is taken from the past."""
    recipe = DelayedScaling(amax_history_len=4, overrides={"fc1": RowwiseScaling()})
    results = {}
    data = Data()
    layers = {smooth: twin(data.layer, smooth_swiglu=smooth) for smooth in (False, True)}
    for layer in layers.values():
        for _ in range(3):
            with under(recipe):
                layer(data.x)
    with torch.no_grad():
        largest = data.amaxes().max() / data.amaxes()[OUTLIER]
        data.layer.fc1_weight[F + OUTLIER] *= 1000 * largest
        data.layer.fc1_bias[F + OUTLIER] *= 1000 * largest
    for smooth, layer in layers.items():
        with torch.no_grad():
            for mine, new in zip(layer.parameters(), data.layer.parameters(), strict=True):
                mine.copy_(new)
        with under(recipe):
            results[smooth] = sqnr_db(data.exact(), layer(data.x))
    # 20 log10 of 1 / (1 - 2 / 1000), and what single tokens are below the amax.
    assert results[False] < 3
    # That channel makes y, so that a scale measured now serves it as well as one of its own does, but for where its
    # few values lie between powers of two: the error of a column of 128 weights varies by 1 dB, that of a by as much.
    with under(PER_TENSOR["current"]):
        measured = sqnr_db(data.exact(), data.layer(data.x))
    assert results[True] > measured - 2 > 17


# --- it changes no function


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
def test_powers_of_two_change_nothing_in_exact_arithmetic(dtype: torch.dtype) -> None:
    a = (torch.randn(64, 40) * torch.exp2(torch.randint(-12, 13, (40,)).float())).to(dtype)
    a[:, 3] = 0
    weight, dw = torch.randn(16, 40), torch.randn(16, 40)
    channels = channels_of(a.abs().amax(0).float())
    assert torch.equal(channels.scale * channels.inverse, torch.ones(40))
    assert torch.equal(torch.frexp(channels.scale).mantissa, torch.full((40,), 0.5))
    smoothed = divided(a, channels)
    others = torch.arange(40) != 3
    assert ((smoothed.abs().amax(0) >= 1) & (smoothed.abs().amax(0) < 2))[others].all()
    assert not smoothed[:, 3].any()
    # float16 has 2^-24 of 1 left, which E4M3 has not.
    back = (smoothed.float() * channels.scale).to(dtype)
    assert torch.equal(back, a) if dtype != torch.float16 else relative_error(a, back) < 2.0**-12
    folded_weight = weight * channels.scale
    assert torch.equal(folded_weight * channels.inverse, weight)
    exact = (smoothed.double() @ folded_weight.double().t(), a.double() @ weight.double().t())
    assert relative_error(*exact) < (2.0**-11 if dtype == torch.float16 else 2.0**-50)
    assert torch.equal(unfolded(dw, channels.scale) * channels.inverse, dw)


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1.0, 3e38])
def test_scales_of_channels_are_usable_whatever_their_amax(value: float) -> None:
    channels = channels_of(torch.tensor([value]))
    assert torch.equal(channels.scale * channels.inverse, torch.ones(1))
    assert 2.0**-96 <= channels.scale <= 2.0**96
    assert channels_of(torch.tensor([1e-9, 3.0]), least=1e-3).scale.tolist() == [2.0**-10, 2.0]


@pytest.mark.parametrize("name", ["rowwise", "current", "delayed"])
def test_a_channel_that_grows_by_a_power_of_two_changes_no_bit(name: str) -> None:
    """Its column of fc2 shrinks as much: the function is the same, and now its digits are."""
    recipe = SMOOTHED[name].replaced(overrides={"fc1": RowwiseScaling()})
    layer = mlp()
    layer.layer_name = "mlp"
    grown = copy.deepcopy(layer)
    with torch.no_grad():
        grown.fc1_weight[50 + OUTLIER] *= 2.0**10
        grown.fc1_bias[50 + OUTLIER] *= 2.0**10
        grown.fc2_weight[:, OUTLIER] *= 2.0**-10
    x = torch.randn(40, 33)
    plain, other = run(layer, recipe, x), run(grown, recipe, x)
    assert torch.equal(plain[0], other[0])
    dw2, dw2_grown = (outcome[2 + [n for n, _ in layer.named_parameters()].index("fc2_weight")] for outcome in
                      (plain, other))  # fmt: skip
    dw2[:, OUTLIER] *= 2.0**10
    # y is the same, and so is dy.
    assert torch.equal(dw2, dw2_grown)


def test_the_second_part_is_what_its_formula_says() -> None:
    """By `octavo.quantize` and `octavo.scaled_mm`: a / s and w2 s in the forward, w2 itself in da, s behind dw2."""
    a, dy = (torch.randn(48, 64) * torch.exp(torch.randn(64))).requires_grad_(), torch.randn(48, 32)
    layer = Linear(64, 32, recipe=CurrentScaling())
    y = smoothed(layer, a)
    y.backward(dy)
    s = torch.exp2(torch.floor(torch.log2(a.detach().abs().amax(0))))
    smooth_a = octavo.quantize(a.detach() / s, octavo.E4M3, scale=2.0**-7)
    smooth_w = octavo.quantize(layer.weight.detach() * s, octavo.E4M3)
    expected = octavo.scaled_mm(smooth_a, smooth_w.t(), bias=layer.bias.detach(), out_dtype=torch.float32)
    assert torch.equal(y, expected)
    q_dy, q_w = octavo.quantize(dy, octavo.E5M2), octavo.quantize(layer.weight.detach(), octavo.E4M3)
    da = octavo.scaled_mm(q_dy, q_w, out_dtype=torch.float32, accumulate="precise")
    dw = octavo.scaled_mm(q_dy.t(), smooth_a, out_dtype=torch.float32, accumulate="precise")
    assert torch.equal(a.grad, da)
    assert torch.equal(layer.weight.grad, dw * s)
    assert torch.equal(layer.bias.grad, dy.sum(0))
    assert isinstance(in_high_precision(layer.weight, torch.float32), Tensor)


def smoothed(layer: Linear, a: Tensor) -> Tensor:
    """`smooth_linear` with the parameters and the state of a Linear."""
    call = layer_call(layer.delayed_state, layer.recipe, layer.layer_name)
    if call.recipe is None:
        return layer(a)
    plan = layer.planned(call, layer.weight)
    state = layer.delayed_state.input if call.gather and call.recipe.delayed is not None else None
    smoothing = smoothing_of(call.recipe, plan, None, state)
    return smooth_linear(a, layer.weight, layer.bias, plan, smoothing, a.dtype)


class SmoothLinear(Linear):
    def forward(self, input: Tensor, *, cached_weight: Any = None) -> Tensor:
        return smoothed(self, input)


def composition(layer: Any) -> Composition:
    composed = Composition(layer)
    composed.fc2.__class__ = SmoothLinear
    return composed


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SMOOTHED)
def test_the_bits_of_the_separate_layers(name: str, dtype: torch.dtype) -> None:
    layer = mlp(dtype=dtype)
    inputs = [(torch.randn(9, 33) * 2.0**step).to(dtype) for step in range(3)]
    assert_same_steps(layer, composition(layer), SMOOTHED[name], inputs)


@pytest.mark.parametrize(
    "frozen", [("fc2_weight",), ("fc1_weight", "fc1_bias", "layer_norm_weight", "layer_norm_bias")]
)
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
def test_gradients_that_nobody_wants_are_not_there(name: str, frozen: tuple[str, ...]) -> None:
    layer = mlp()
    for parameter in frozen:
        getattr(layer, parameter).requires_grad_(False)
    assert_same_steps(layer, composition(layer), SMOOTHED[name], [torch.randn(9, 33) for _ in range(2)])


def test_where_fp8_is_off_it_changes_nothing() -> None:
    layer = mlp()
    x = torch.randn(9, 33)
    assert same(run(layer, None, x), run(twin(layer, smooth_swiglu=False), None, x))
    layer.layer_name = "mlp"
    without_fc2 = CurrentScaling(overrides={"fc2": None})
    assert same(run(layer, without_fc2, x), run(twin(layer, smooth_swiglu=False), without_fc2, x))


def test_without_gradients_and_without_tokens() -> None:
    layer, x = mlp(recipe=CurrentScaling()), torch.randn(9, 33)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.requires_grad_()))
        assert layer(x[:0]).shape == (0, 33)
    layer(x[:0]).sum().backward()
    assert not layer.fc2_weight.grad.any()


# --- state


def test_keys_of_a_state_dict_are_those_without_it_and_its_amaxes_those_of_the_activation_itself() -> None:
    """So that smoothing may begin and end in a training: what delayed scaling knows is of a and w2."""
    smooth = mlp()
    plain = twin(smooth, smooth_swiglu=False)
    for step in range(3):
        x = torch.randn(9, 33) * 2.0**step
        run(smooth, SMOOTHED["delayed, measured first"], x)
        run(plain, SMOOTHED["delayed, measured first"], x)
    saved, expected = smooth.state_dict(), plain.state_dict()
    assert set(saved) == set(expected)
    for name in ("fc2_input_amax_history", "fc2_weight_amax_history", "fc2_input_scale", "fc2_weight_scale"):
        assert torch.equal(saved[name], expected[name])
    fresh = octavo.LayerNormMLP(33, 50, activation="swiglu", smooth_swiglu=True)
    fresh.load_state_dict(saved, strict=True)
    x = torch.randn(9, 33)
    assert same(run(smooth, SMOOTHED["delayed"], x), run(fresh, SMOOTHED["delayed"], x))
    copied = pickle.loads(pickle.dumps(fresh))
    assert copied.smooth_swiglu
    assert same(run(fresh, SMOOTHED["delayed"], x), run(copied, SMOOTHED["delayed"], x))
    assert "smooth_swiglu=True" in repr(fresh)


# --- with all else


@pytest.mark.parametrize("name", ["delayed", "delayed, input kept", "current", "block"])
def test_recomputing_the_mlp_is_invisible(name: str) -> None:
    plain = mlp()
    other, around = twin(plain, checkpoint=True), copy.deepcopy(plain)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = around

        def forward(self, x: Tensor) -> Tensor:
            return octavo.checkpoint(self.inner, x)

    for step in range(3):
        x = torch.randn(9, 33) * 1.7**step
        expected = run(plain, SMOOTHED[name], x)
        assert same(expected, run(other, SMOOTHED[name], x))
        assert same(expected, run(Around(), SMOOTHED[name], x))


@pytest.mark.parametrize("off", ["fc1", "fc2"])
def test_one_linear_part_in_high_precision_and_recomputed(off: str) -> None:
    recipe = SMOOTHED["delayed"].replaced(overrides={rf"{off}$": None})
    plain = mlp()
    plain.layer_name = "mlp"
    other = twin(plain, checkpoint=True)
    for step in range(3):
        x = torch.randn(9, 33) * 1.7**step
        assert same(run(plain, recipe, x), run(other, recipe, x))


@pytest.mark.parametrize(("name", "checkpoint"), [("delayed", True), ("current", False)])
def test_compiled_code_gives_the_same_bits_in_one_graph(name: str, checkpoint: bool) -> None:
    torch._dynamo.reset()
    eager = mlp(checkpoint=checkpoint)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = torch.randn(9, 33) * 1.7**step
        outcomes = []
        for model, layer in ((eager, eager), (compiled, other)):
            leaf = x.clone().requires_grad_()
            with under(SMOOTHED[name]):
                y = model(leaf)
            y.square().sum().backward()
            outcomes.append([y.detach(), leaf.grad, *(p.grad for p in layer.parameters()), *state_of(layer)])
            layer.zero_grad()
        assert same(*outcomes)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_micro_batches_may_keep_the_weights_codes(name: str) -> None:
    layer = mlp()
    other = copy.deepcopy(layer)
    outcomes = []
    for one, modes in ((layer, [None] * 3), (other, ["refresh", "reuse", "reuse"])):
        torch.manual_seed(4)
        leaves = [(torch.randn(9, 33) * 2.0**step).requires_grad_() for step in range(3)]
        with under(SMOOTHED[name]):
            outputs = [one(leaf, cached_weight=mode) for leaf, mode in zip(leaves, modes, strict=True)]
        torch.stack(outputs).sum().backward()
        outcomes.append([*outputs, *(leaf.grad for leaf in leaves), *(p.grad for p in one.parameters())])
    assert same(*outcomes)


def test_an_observer_sees_what_is_cast() -> None:
    layer = mlp(recipe=DelayedScaling(amax_history_len=4))
    x = torch.randn(40, 33)
    with torch.no_grad():
        layer.fc1_weight[50 + OUTLIER] *= 1000
    with octavo.inspection.watch(layer) as seen:
        layer(x).sum().backward()
    assert seen.statistics["fc2", "input"].amax < 2
    assert seen.scales["fc2", "input"] == 2.0**-7
    assert seen.statistics["fc2", "input"].saturation == 0


def test_what_is_kept_for_the_backward_is_a_number_a_channel_more() -> None:
    sizes = []
    for smooth in (False, True):
        layer = octavo.LayerNormMLP(64, 96, activation="swiglu", dtype=BF16, smooth_swiglu=smooth)
        x = torch.randn(64, 64, dtype=BF16, requires_grad=True)
        kept: dict[int, Tensor] = {}
        with under(CurrentScaling()):
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, k=kept: k.setdefault(t.data_ptr(), t), lambda t: t
            )
            with hooks:
                layer(x)
        sizes.append(sum(t.numel() * t.element_size() for t in kept.values() if t.numel() > 1))
    assert sizes[1] - sizes[0] == 4 * 96


def test_what_does_not_go_with_it_is_named() -> None:
    with pytest.raises(
        ValueError, match="smooth_swiglu=True and activation is 'gelu': it smooths the channels of 'swig"
    ):
        octavo.LayerNormMLP(32, 64, smooth_swiglu=True)
    with pytest.raises(ValueError, match="smooth_swiglu is 1: expected True or False"):
        octavo.LayerNormMLP(32, 64, activation="swiglu", smooth_swiglu=1)  # type: ignore[arg-type]
    with octavo.quantized_init(), pytest.raises(ValueError, match="only codes of it: build the layer outside"):
        octavo.LayerNormMLP(32, 64, activation="swiglu", smooth_swiglu=True)
    with octavo.quantized_init():
        codes = octavo.LayerNormMLP(32, 64, activation="swiglu", recipe=CurrentScaling())
    codes.smooth_swiglu = True
    with pytest.raises(ValueError, match="only codes of it"):
        codes(torch.randn(4, 32))
    layer = mlp()
    for given in ({"input_scale": 0.1}, {"weight_scale": 0.1}):
        operand = next(iter(given)).removesuffix("_scale")
        with (
            under(StaticScaling(**given)),
            pytest.raises(ValueError, match=f"static scale of its {operand}: give fc2 another recipe by an override"),
        ):
            layer(torch.randn(4, 33))
    other = octavo.LayerNormMLP(32, 64, recipe=CurrentScaling())
    other.smooth_swiglu = True
    with pytest.raises(ValueError, match="activation is 'gelu'"):
        other(torch.randn(4, 32))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_on_a_gpu_inside_a_cuda_graph(name: str) -> None:
    layer = octavo.LayerNormMLP(256, 384, activation="swiglu", smooth_swiglu=True, dtype=BF16, recipe=RECIPES[name])
    eager = layer.cuda()
    graphed = octavo.make_graphed_callables(copy.deepcopy(eager), (torch.randn(64, 256, device="cuda").to(BF16),))
    for step in range(3):
        x = (torch.randn(64, 256, device="cuda") * 2.0**step).to(BF16)
        outcomes = []
        for model in (eager, graphed):
            y = model(x)
            y.float().square().sum().backward()
            octavo.update_scales(model)
            outcomes.append([y.detach().clone(), *(p.grad.clone() for p in model.parameters())])
            model.zero_grad()
        assert same(*outcomes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
def test_on_a_gpu_nothing_waits_for_the_device(name: str) -> None:
    layer = octavo.LayerNormMLP(256, 384, activation="swiglu", smooth_swiglu=True, dtype=BF16, recipe=RECIPES[name])
    layer, x = layer.cuda(), torch.randn(64, 256, device="cuda").to(BF16)
    for step in range(2):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            layer(x).float().square().sum().backward()
            octavo.update_scales(layer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert layer.fc2_weight.grad.isfinite().all()


@pytest.mark.gpu
def test_on_a_gpu_the_twins_are_as_close_as_the_references() -> None:
    data = Data()
    data.grow(1000.0)
    layer = twin(data.layer, smooth_swiglu=True)
    with under(PER_TENSOR["current"]):
        here = sqnr_db(data.exact(), layer(data.x))
        there = sqnr_db(data.exact(), layer.cuda()(data.x.cuda()))
    assert there > here - 0.5
