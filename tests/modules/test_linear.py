"""octavo.Linear: an nn.Linear first; then modes, frozen parts, dtypes, caches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.measures import relative_error
from torch import Tensor, nn

import octavo
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "block": BlockScaling(),
}


def high(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("bias", [True, False])
def test_it_is_an_nn_linear(bias: bool) -> None:
    torch.manual_seed(3)
    ours = octavo.Linear(32, 16, bias)
    torch.manual_seed(3)
    theirs = nn.Linear(32, 16, bias)
    assert isinstance(ours, nn.Linear)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    x = torch.randn(8, 32)
    assert torch.equal(ours(x), theirs(x)), "without a context it is one in every bit"
    assert repr(ours) == repr(theirs)


def test_outside_of_a_context_it_takes_any_dtype_that_nn_linear_takes() -> None:
    layer, x = octavo.Linear(32, 16).double(), torch.randn(8, 32).double()
    assert torch.equal(layer(x), high(layer, x))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(4, 32).double(), "dtype torch.float64: an FP8 layer takes float32, bfloat16 or float16"),
        (torch.ones(4, 32, dtype=torch.int64), "dtype torch.int64"),
        (torch.randn(4, 31), r"shape \(4, 31\): its last dimension must be in_features = 32"),
        (torch.randn(()), r"shape \(\): its last dimension must be in_features = 32"),
    ],
)
def test_wrong_inputs_are_named(x: Tensor, message: str) -> None:
    layer = octavo.Linear(32, 16, recipe=CurrentScaling())
    with pytest.raises(ValueError, match=message):
        layer(x)


def test_a_wrong_cached_weight_is_named() -> None:
    with pytest.raises(ValueError, match="cached_weight is True: expected None, 'refresh' or 'reuse'"):
        octavo.Linear(32, 16)(torch.randn(4, 32), cached_weight=True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_20_torch_autocast(recipe: str, dtype: torch.dtype) -> None:
    """Case 20: fp32 parameters under torch.autocast bf16, inputs fp32 and bf16: bf16 out, fp32 parameter gradients."""
    layer, x = octavo.Linear(64, 32), torch.randn(16, 64).to(dtype).requires_grad_()
    with octavo.autocast(recipe=RECIPES[recipe]), torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        loss = y.float().square().sum()
    loss.backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    assert x.grad.dtype == dtype
    assert relative_error(high(layer, x.detach().float()), y) < 0.05


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_autocast_rounds_the_output_once(recipe: str) -> None:
    """The bf16 output is the float32 one, rounded: emulation does not multiply in bf16 because autocast would.

    The input has the dtype of the context before it is cast, and so has the bias before it is added.
    """
    layer, x, dy = octavo.Linear(64, 32), torch.randn(16, 64), torch.randn(16, 32).bfloat16()
    plain, other = layer, copy.deepcopy(layer)
    plain.bias.data.copy_(plain.bias.bfloat16())
    with octavo.autocast(recipe=RECIPES[recipe]):
        expected = plain(x.bfloat16().float())
    with octavo.autocast(recipe=RECIPES[recipe]), torch.autocast("cpu", torch.bfloat16):
        y = other(x)
        y.backward(dy)
    expected.backward(dy.float())
    assert torch.equal(y, expected.bfloat16())
    assert torch.equal(other.weight.grad, plain.weight.grad), "nor the weight gradient, in a backward under autocast"


@pytest.mark.parametrize("recipe", RECIPES)
def test_under_torch_autocast_the_input_is_in_its_dtype_before_it_is_measured(recipe: str) -> None:
    """1 + 2^-9 is 1 in bf16: that is what is scaled, cast and gathered. (The weight is cast from its own dtype.)"""
    layer, x = octavo.Linear(16, 16), torch.full((4, 16), 1 + 2.0**-9)
    scales = {}

    def observer(operand, quantizer):
        def watched(values, rowwise, columnwise, column_sum=False):
            scales[operand, values.dtype] = quantizer(values, rowwise, columnwise, column_sum)
            return scales[operand, values.dtype]

        return watched

    layer.observer = observer
    with octavo.autocast(recipe=RECIPES[recipe], calibrating=recipe != "delayed"):
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        assert set(scales) == {("input", torch.bfloat16), ("weight", torch.float32)}
        if recipe == "delayed":
            assert layer.delayed_state.input.gathered.item() == 1.0
        else:
            power_of_two = RECIPES[recipe].linear.input.power_of_two
            one = octavo.quantize(torch.ones(1, 1), octavo.E4M3, power_of_two=power_of_two).scale
            assert bool((scales["input", torch.bfloat16].scale.reshape(-1)[:4] == one).all())
        layer(x)
        assert ("input", torch.float32) in scales, "without it the input stays as it is"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_bias_enters_in_the_dtype_of_the_output(recipe: str) -> None:
    """257 is 256 in bf16, and 1 + 2^-20 is 1 in fp16; float32 keeps both."""
    layer, x = octavo.Linear(16, 16), torch.zeros(4, 16)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([257.0, 1 + 2.0**-20] * 8))
    for dtype, values in (
        (torch.float32, [257.0, 1 + 2.0**-20]),
        (torch.bfloat16, [256.0, 1.0]),
        (torch.float16, [257.0, 1.0]),
    ):
        with octavo.autocast(recipe=RECIPES[recipe]):
            y = layer(x.to(dtype))
        assert y.dtype == dtype
        assert y[0, :2].tolist() == values
    # 1 + 256, half-way between bf16 neighbours, goes to the even one; with the float32 bias it would be 258.
    layer = octavo.Linear(16, 16)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[:, 0] = 1.0
        layer.bias.fill_(257.0)
    x[:, 0] = 1.0
    with octavo.autocast(recipe=RECIPES[recipe]):
        assert layer(x.bfloat16())[0, 0].item() == 256.0
        assert layer(x)[0, 0].item() == 258.0


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_under_a_grad_scaler_skips_the_step_of_an_overflow(recipe: str) -> None:
    layer = octavo.Linear(32, 16)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=1)
    taken = []
    for size in (1.0, 1e4, 1.0):
        before, x = layer.weight.detach().clone(), torch.randn(8, 32)
        with octavo.autocast(recipe=RECIPES[recipe]), torch.autocast("cpu", torch.float16):
            y = layer(x)
        assert y.dtype == torch.float16
        loss = (y * size).float().sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken.append(not torch.equal(layer.weight, before))
        assert bool(layer.weight.isfinite().all())
        assert all(bool(o.scale.isfinite()) for o in layer.delayed_state.operands)
    # 2^15 * 1e4 is beyond fp16's 65504: the gradient of y is inf.
    assert taken == [True, False, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_case_14_accumulation(recipe: str) -> None:
    """Case 14: one batch of 64 rows against 4 x 16; one layer used twice: dW is the sum."""
    x, dy = torch.randn(64, 32), torch.randn(64, 16)
    whole = octavo.Linear(32, 16)
    parts = copy.deepcopy(whole)
    with octavo.autocast(recipe=RECIPES[recipe]):
        whole(x).backward(dy)
    for xs, dys in zip(x.split(16), dy.split(16), strict=True):
        with octavo.autocast(recipe=RECIPES[recipe]):
            y = parts(xs)
        y.backward(dys)
    exact = dy.double().t() @ x.double()
    # Each is right within a product of E5M2 (or E4M3) and E4M3 data: 10 %.
    assert relative_error(exact, whole.weight.grad) < 0.10
    assert relative_error(exact, parts.weight.grad) < 0.10
    twice = copy.deepcopy(whole)
    twice.zero_grad()
    with octavo.autocast(recipe=RECIPES[recipe]):
        a, b = twice(x[:32]), twice(x[32:])
    (a * dy[:32]).sum().backward(retain_graph=True)
    first = twice.weight.grad.clone()
    twice.zero_grad()
    (b * dy[32:]).sum().backward(retain_graph=True)
    second = twice.weight.grad.clone()
    twice.zero_grad()
    ((a * dy[:32]).sum() + (b * dy[32:]).sum()).backward()
    assert torch.equal(twice.weight.grad, first + second)


class LoRA(nn.Module):
    """A frozen linear layer beside a trainable product of low rank, as PEFT writes it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = (
            nn.Linear(base.in_features, rank, bias=False),
            nn.Linear(rank, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_case_18_frozen_fp8_layer_with_lora(recipe: str) -> None:
    """Case 18: upstream gets its gradient, the frozen weight none and no wgrad product ran."""
    model = nn.Sequential(nn.Linear(16, 32), LoRA(octavo.Linear(32, 16, recipe=RECIPES[recipe])))
    model[1].base.layer_name = "frozen"
    with octavo.count_gemms() as counted:
        model(torch.randn(8, 16)).square().sum().backward()
    assert counted.by_layer() == {"frozen": {"fprop fp8 emulated": 1, "dgrad fp8 emulated": 1}}
    assert model[1].base.weight.grad is None
    assert all(bool((p.grad != 0).any()) for p in (model[0].weight, model[1].up.weight))


def test_case_19_a_frozen_first_layer_on_an_input_without_gradient() -> None:
    """Case 19: delayed, three steps: the gradient scale of layer 2 leaves its initial value; layer 1 has none."""
    model = nn.Sequential(octavo.Linear(16, 16), octavo.Linear(16, 16))
    model[0].requires_grad_(False)
    for _ in range(3):
        with octavo.autocast(recipe=DelayedScaling(amax_history_len=4)):
            y = model(torch.randn(8, 16))
        y.square().sum().backward()
    assert model[1].delayed_state.grad_output.scale.item() != 1.0
    assert model[0].delayed_state.grad_output.scale.item() == 1.0
    assert model[0].delayed_state.input.scale.item() != 1.0


def test_a_model_frozen_as_a_whole_trains_nothing_and_keeps_nothing() -> None:
    model = nn.Sequential(octavo.Linear(16, 16), octavo.Linear(16, 16))
    model.requires_grad_(False)
    with octavo.autocast(recipe=DelayedScaling()):
        y = model(torch.randn(8, 16))
    assert not y.requires_grad
    assert model[1].delayed_state.input.history[-1] > 0, "but its amaxes are gathered: gradients were not off"


def test_hooks_see_what_they_see_of_an_nn_linear() -> None:
    layer, seen = octavo.Linear(16, 16, recipe=CurrentScaling()), []
    layer.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    layer.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    layer.register_full_backward_hook(lambda m, into, out: seen.append((into[0].shape, out[0].shape)))
    layer.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    assert seen[:2] == ["pre", (4, 16)]
    assert sorted(map(str, seen[2:])) == sorted(
        map(str, [torch.Size([16, 16]), (torch.Size([4, 16]), torch.Size([4, 16]))])
    )


# --- cached weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_case_11_a_cached_weight_keeps_its_own_scale(recipe: str) -> None:
    """Case 11: one x, five micro-batches each in its own context: the error is the same in all five."""
    layer, x = octavo.Linear(768, 768), torch.randn(16, 768)
    with octavo.autocast(recipe=RECIPES[recipe]):
        layer(x)  # so that x has one scale, from here on
    errors = []
    for number in range(5):
        with octavo.autocast(recipe=RECIPES[recipe]):
            y = layer(x, cached_weight="reuse" if number else "refresh")
        errors.append(relative_error(high(layer, x), y))
    assert len(set(errors)) == 1
    assert errors[0] < 0.05


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recipe", RECIPES)
def test_case_12_first_without_gradients_then_with(recipe: str, mode: Callable) -> None:
    """Case 12: the second micro-batch equals an uncached forward, gradients included."""
    layer = octavo.Linear(32, 16)
    with octavo.autocast(recipe=RECIPES[recipe]):
        layer(torch.randn(8, 32)).sum().backward()
    other, x = copy.deepcopy(layer), torch.randn(8, 32)
    results = []
    for one, cached in ((layer, "reuse"), (other, None)):
        one.zero_grad()
        inputs = x.clone().requires_grad_()
        with octavo.autocast(recipe=RECIPES[recipe]):
            with mode():
                one(x, cached_weight="refresh" if cached else None)
            y = one(inputs, cached_weight=cached)
        y.sum().backward()
        results.append((y, inputs.grad, one.weight.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def stepped(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "optimizer.step": stepped,
    "load_state_dict": lambda layer: layer.load_state_dict(nn.Linear(32, 16).state_dict()),
    "in-place add_": lambda layer: layer.weight.detach().add_(0.5),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(16, 32))),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn(16, 32)),
    "another dtype and back": lambda layer: layer.half().float(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_case_13_a_stale_cache_is_noticed(recipe: str, change: str) -> None:
    """Case 13: change the weights: the next forward follows, in both layouts (the second one is dgrad's)."""
    layer, x = octavo.Linear(32, 16), torch.randn(8, 32)
    with octavo.autocast(recipe=RECIPES[recipe]):
        layer(x, cached_weight="refresh")
    CHANGES[change](layer)
    other = copy.deepcopy(layer)
    results = []
    for one, cached in ((layer, "reuse"), (other, None)):
        inputs = x.clone().requires_grad_()
        with octavo.autocast(recipe=RECIPES[recipe]):
            y = one(inputs, cached_weight=cached)
        y.sum().backward()
        results.append((y, inputs.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_stale_cache_of_an_fp8_weight_is_noticed_after_every_kind_of_step() -> None:
    for how in ({}, {"foreach": True}, {"fused": True}):
        with octavo.quantized_init():
            layer = octavo.Linear(32, 16)
        x = torch.randn(8, 32)
        with octavo.autocast():
            layer(x, cached_weight="refresh").sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.5, **how).step()
            assert torch.equal(layer(x, cached_weight="reuse"), layer(x)), how


def test_a_cache_of_another_parameter_at_the_same_address_is_not_used() -> None:
    """An id may be given again once its tensor is gone: the cache knows the tensor, not its id."""
    layer, x = octavo.Linear(32, 16, recipe=CurrentScaling()), torch.randn(8, 32)
    for _ in range(20):
        layer.weight = nn.Parameter(torch.randn(16, 32))
        assert torch.equal(layer(x, cached_weight="reuse"), layer(x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cached_weight_is_quantized_once(recipe: str) -> None:
    layer, x, casts = octavo.Linear(32, 16), torch.randn(8, 32), []

    def observer(operand, quantizer):
        def watched(*args):
            casts.append(operand)
            return quantizer(*args)

        return watched

    layer.observer = observer
    with octavo.autocast(recipe=RECIPES[recipe]):
        for cached in ("refresh", "reuse", "reuse", None, "reuse", "refresh"):
            layer(x, cached_weight=cached)
    assert casts.count("weight") == 3
    assert casts.count("input") == 6


@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=lambda recipe: type(recipe).__name__)
def test_on_meta_fp8_is_refused_with_a_remedy_and_shapes_run_without(recipe: Recipe) -> None:
    layer, x = octavo.Linear(32, 40, device="meta", recipe=recipe), torch.randn(4, 32, device="meta")
    with pytest.raises(ValueError, match=r"input of shape \(4, 32\) is on meta.*enabled=False.*to_empty"):
        layer(x)
    with octavo.autocast(enabled=False):
        assert layer(x).shape == (4, 40)
