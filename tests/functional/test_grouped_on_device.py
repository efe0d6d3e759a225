"""Groups whose sizes only the device knows: to the bit what sizes in a list give, on a CPU, eager and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.utils.checkpoint
from tests.modules.compositions import RECIPES, under
from torch import Tensor

import octavo
from octavo.functional.grouped_on_device import unsupported_reasons
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, RowwiseScaling
from octavo.runtime import LinearPlan, layer_call, plan_linear

K, N = 40, 24
FEATURES = K, N
STEPS = ([0, 7, 33, 3], [40, 0, 0, 3], [10, 10, 10, 13], [0, 0, 43, 0])
# By block there is no grouped product.
KEPT = {
    "rowwise, input kept": RowwiseScaling(saved_input="high_precision"),
    "current, input kept, any scale": CurrentScaling(saved_input="high_precision"),
    "measured first, input kept": DelayedScaling(saved_input="high_precision", initialise_from_first_batch=True),
}
GROUPED = [*(name for name in RECIPES if name != "block"), *KEPT]


def recipe_of(name: str) -> octavo.recipes.Recipe | None:
    return KEPT[name] if name in KEPT else RECIPES[name]


def same_step(
    one: octavo.GroupedLinear, other: octavo.GroupedLinear, splits: list[int], recipe: str, compiled: bool, scale: float
) -> None:
    """A step with sizes in a list, and one with sizes on the device: all results and all states."""
    run = torch.compile(other, fullgraph=True, backend="aot_eager") if compiled else OnDevice(other)
    x, dy = torch.randn(sum(splits), K) * scale, torch.randn(sum(splits), N)
    outs = []
    for module, forward, sizes in ((one, one, splits), (other, run, torch.tensor(splits, dtype=torch.int32))):
        xx = x.clone().requires_grad_()
        with under(recipe_of(recipe)):
            y = forward(xx, sizes)
        outs.append([y, *torch.autograd.grad(y, [xx, *module.parameters()], dy)])
    for number, (a, b) in enumerate(zip(*outs, strict=True)):
        assert a.dtype == b.dtype, number
        assert torch.equal(a, b), number
    for a, b in zip(one.parts, other.parts, strict=True):
        for left, right in zip(a.delayed_state.operands, b.delayed_state.operands, strict=True):
            assert torch.equal(left.scale, right.scale)
            assert torch.equal(left.history, right.history)
            assert left.from_data == right.from_data


class OnDevice:
    """A layer that takes sizes as it does on a GPU, where nothing looks at them."""

    def __init__(self, layer: octavo.GroupedLinear) -> None:
        self.layer = layer

    def __call__(self, x: Tensor, sizes: Tensor) -> Tensor:
        return self.layer._on_device(x, sizes, None)


@pytest.mark.parametrize("recipe", GROUPED)
def test_the_bits_of_sizes_in_a_list(recipe: str) -> None:
    layer = octavo.GroupedLinear(4, K, N)
    twin = copy.deepcopy(layer)
    for number, splits in enumerate(STEPS):
        same_step(layer, twin, splits, recipe, False, 1.0 + number)


@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "none"])
def test_compiles_whole(recipe: str) -> None:
    torch._dynamo.reset()
    layer = octavo.GroupedLinear(4, K, N)
    twin = copy.deepcopy(layer)
    for number, splits in enumerate(STEPS):
        same_step(layer, twin, splits, recipe, True, 1.0 + number)


@pytest.mark.parametrize("features", [(33, 17), (16, 16)])
@pytest.mark.parametrize("bias", [True, False])
def test_other_features_in_bfloat16(features: tuple[int, int], bias: bool) -> None:
    layer = octavo.GroupedLinear(2, *features, bias, dtype=torch.bfloat16, recipe=CurrentScaling())
    x = torch.randn(features[0], 26, dtype=torch.bfloat16).t()[::2].requires_grad_()
    dy = torch.randn(features[1], 13, dtype=torch.bfloat16).t()
    outs = []
    for y in (layer(x, [13, 0]), OnDevice(layer)(x, torch.tensor([13, 0]))):
        outs.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], dy)])
    for a, b in zip(*outs, strict=True):
        assert torch.equal(a, b)


def test_no_grad_and_torch_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=RowwiseScaling())
    x, sizes = torch.randn(9, K), torch.tensor([4, 5])
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, [4, 5])
        with torch.no_grad(), monkeypatch.context() as patched:
            # What only a backward needs is not made.
            patched.setattr("octavo.functional.grouped_quantize.column_amax", None)
            found = OnDevice(layer)(x, sizes)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recipe", ["delayed", "rowwise"])
def test_a_checkpoint_changes_nothing(recipe: str) -> None:
    layer = octavo.GroupedLinear(2, K, N)
    twin = copy.deepcopy(layer)
    for step in range(3):
        x, sizes = torch.randn(9, K) * (step + 1), torch.tensor([4, 5])
        outs = []
        for module, checkpointed in ((layer, False), (twin, True)):
            xx, run = x.clone().requires_grad_(), OnDevice(module)
            with under(RECIPES[recipe]):
                y = octavo.checkpoint(run, xx, sizes) if checkpointed else run(xx, sizes)
            y.square().sum().backward()
            outs.append([y, xx.grad, *(p.grad for p in module.parameters())])
        for a, b in zip(*outs, strict=True):
            assert torch.equal(a, b)


def test_no_token_and_one() -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=CurrentScaling())
    for splits in ([0, 0], [0, 1]):
        x = torch.randn(sum(splits), K, requires_grad=True)
        y = OnDevice(layer)(x, torch.tensor(splits))
        grads = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
        expected = layer(x, splits)
        for a, b in zip(
            grads, torch.autograd.grad(expected, [x, *layer.parameters()], torch.ones_like(y)), strict=True
        ):
            assert torch.equal(a, b)


def test_frozen_parts() -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=CurrentScaling())
    layer.weight0.requires_grad_(False)
    layer.bias1.requires_grad_(False)
    OnDevice(layer)(torch.randn(9, K), torch.tensor([4, 5])).sum().backward()
    assert layer.weight0.grad is None
    assert layer.bias1.grad is None
    assert layer.weight1.grad is not None
    assert layer.bias0.grad is not None


def test_gradients_accumulate_apart() -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=CurrentScaling())
    twin = copy.deepcopy(layer)
    for _ in range(3):
        x = torch.randn(9, K)
        OnDevice(layer)(x, torch.tensor([4, 5])).sum().backward()
        twin(x, [4, 5]).sum().backward()
        layer.weight0.grad.mul_(0.5)
        twin.weight0.grad.mul_(0.5)
    for one, other in zip(layer.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    "recipe",
    [CurrentScaling(), CurrentScaling(backward="high_precision"), RowwiseScaling(high_precision_wgrad=True), None],
    ids=["fp8", "backward high", "wgrad high", "none"],
)
def test_products_are_counted_as_of_sizes_in_a_list(recipe: octavo.recipes.Recipe | None) -> None:
    layer = octavo.GroupedLinear(3, K, N, recipe=recipe)
    counts = []
    for run, sizes in ((layer, [4, 0, 5]), (OnDevice(layer), torch.tensor([4, 0, 5]))):
        with octavo.count_gemms() as counted:
            run(torch.randn(9, K, requires_grad=True), sizes).sum().backward()
        counts.append(counted.by_layer())
    assert counts[0] == counts[1]
    assert sum(map(len, counts[1].values())) == (0 if recipe is None else 9)


def plan(recipe: octavo.recipes.Recipe) -> LinearPlan:
    part = octavo.GroupedLinear(1, K, N, recipe=recipe).parts[0]
    return plan_linear(layer_call(part.delayed_state, recipe, None), part.delayed_state, "")


def test_what_has_no_grouped_product_says_so() -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    assert unsupported_reasons(cpu, torch.float32, plan(CurrentScaling()), FEATURES) == []
    assert "scales by 1x128" in unsupported_reasons(cpu, bf16, plan(BlockScaling()), FEATURES)[0]
    # Whatever this machine has, these hold of every CUDA device.
    cuda = torch.device("cuda", 0)
    assert any(
        "scales by 1x128" in reason for reason in unsupported_reasons(cuda, bf16, plan(BlockScaling()), FEATURES)
    )
    assert "torch.float32 in high precision" in unsupported_reasons(cuda, torch.float32, None, FEATURES)[0]
    assert unsupported_reasons(cuda, bf16, None, FEATURES) == []
    assert "multiples of 8" in unsupported_reasons(cuda, bf16, None, (K, 17))[0]
    high = plan(RowwiseScaling(high_precision_wgrad=True))
    assert any("multiples of 8" in reason for reason in unsupported_reasons(cuda, bf16, high, (K, 17)))
    watched = plan(CurrentScaling())._replace(input=lambda *_: None)
    assert "watched" in unsupported_reasons(cpu, bf16, watched, FEATURES)[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_has_no_products() -> None:
    reasons = unsupported_reasons(torch.device("cuda", 0), torch.bfloat16, plan(DelayedScaling()), FEATURES)
    assert reasons == ["no CUDA device is available"]


def test_mistakes_are_refused_with_the_remedy() -> None:
    layer = octavo.GroupedLinear(2, K, N, recipe=BlockScaling())
    run, x = OnDevice(layer), torch.randn(9, K)
    with pytest.raises(ValueError, match=r"no grouped product for scales by 1x128.*Give m_splits as a list"):
        run(x, torch.tensor([4, 5]))
    layer.recipe = CurrentScaling()
    with pytest.raises(ValueError, match="3 entries for 2 experts"):
        run(x, torch.tensor([4, 3, 2]))
    with pytest.raises(ValueError, match="sum to the number of tokens, 9"):
        run(x, torch.tensor([4, 6]))
    layer.parts[1].recipe = None
    with pytest.raises(ValueError, match="recipe differs between experts"):
        run(x, torch.tensor([4, 5]))
