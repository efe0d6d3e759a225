"""predict_weight_scales: the bound is never passed, whatever happens to a weight, and a cast reads the weight once."""

from __future__ import annotations

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
import octavo.optim.late_answer
import octavo.optim.step_bound
import octavo.tensor.quantizer
from octavo.recipes import (
    CurrentScaling,
    CustomRecipe,
    DelayedScaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)

RECIPES: dict[str, Recipe] = {
    "current": CurrentScaling(),
    "current, powers of two": CurrentScaling(power_of_two_scales=True),
    "delayed": DelayedScaling(amax_history_len=4),
    "cast again": CurrentScaling(saved_weight="high_precision", saved_input="high_precision"),
}


def network(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(dtype)


def bound_of(layer: Any) -> float:
    return layer.delayed_state.weight_bound.amax.item()


def assert_nothing_saturates(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, octavo.Linear) and layer.delayed_state.weight_bound is not None:
            assert layer.weight.detach().abs().max().item() <= bound_of(layer)


def constant(weight: Tensor, step: int) -> Tensor:
    return torch.ones_like(weight)


def spikes(weight: Tensor, step: int) -> Tensor:
    """Nothing for long, and then much: the worst case of Kingma and Ba."""
    return torch.full_like(weight, 0.0 if step % 13 else 1e3)


def growing(weight: Tensor, step: int) -> Tensor:
    """The worst case of all, see test_step_bound."""
    return torch.full_like(weight, -1e-6 * 1.11**step)


def sparse(weight: Tensor, step: int) -> Tensor:
    return torch.where(torch.rand_like(weight) < 0.02, torch.randn_like(weight) * 100, 0.0)


def away(weight: Tensor, step: int) -> Tensor:
    """Each element away from 0: decay and steps pull against one another."""
    return -weight.sign()


GRADIENTS = [constant, spikes, growing, sparse, away]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, 1e-2),
    "Adam, coupled decay": lambda p: torch.optim.Adam(p, 1e-2, weight_decay=0.3),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.5),
    "AdamW, large steps": lambda p: torch.optim.AdamW(p, 1.0, weight_decay=2.5),
    "AdamW, AMSGrad, maximize": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, maximize=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, 1e-2, foreach=False, betas=(0.8, 0.9)),
    "AdamW, a tensor for lr": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), foreach=False),
}


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_sequence_of_gradients_passes_the_bound(
    dtype: torch.dtype, optimizer: str, gradient: Callable[..., Any]
) -> None:
    model = network(dtype)
    octavo.convert(model, CurrentScaling())
    made = OPTIMIZERS[optimizer](model.parameters())
    octavo.predict_weight_scales(model, made, every=40)
    schedule = torch.optim.lr_scheduler.OneCycleLR(made, 0.05, total_steps=100, cycle_momentum=False)
    for step in range(90):
        for parameter in model.parameters():
            parameter.grad = gradient(parameter.detach(), step)
        made.step()
        schedule.step()
        assert_nothing_saturates(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_trains_like_a_measured_scale_and_measures_every_so_often(recipe: str) -> None:
    losses = {}
    for predicts in (False, True):
        model = network()
        octavo.convert(model, RECIPES[recipe])
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        predicted = octavo.predict_weight_scales(model, optimizer, every=10) if predicts else None
        losses[predicts] = []
        for step in range(60):
            torch.manual_seed(step % 8)
            x = torch.randn(64, 32)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            octavo.update_scales(model)
            optimizer.step()
            optimizer.zero_grad()
            losses[predicts].append(loss.item())
            if predicted is not None:
                slack = predicted.slack()
                assert list(slack) == ["0", "2"]
                assert all(0 <= bits < 1 for bits in slack.values())
                assert all((bits == 0) == (step % 10 == 9) for bits in slack.values())
    assert losses[True][0] == pytest.approx(losses[False][0], rel=1e-6)
    assert losses[True][-1] < 0.7 * losses[True][0]
    assert losses[True][-1] == pytest.approx(losses[False][-1], rel=0.03)


def test_the_weight_is_not_read_for_its_amax(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    measured: list[torch.Size] = []
    real = octavo.tensor.quantizer.partial_amax
    monkeypatch.setattr(octavo.tensor.quantizer, "partial_amax", lambda x: measured.append(x.shape) or real(x))
    model(torch.randn(7, 32)).sum().backward()
    weights = {layer.weight.shape for layer in model if isinstance(layer, nn.Linear)}
    assert measured
    assert not weights & set(measured)


def test_the_scale_is_that_of_the_bound() -> None:
    model = nn.Sequential(nn.Linear(32, 16))
    octavo.convert(model, CurrentScaling())
    octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    with octavo.inspection.watch(model) as seen:
        model(torch.randn(4, 32))
    # A reciprocal of a reciprocal: two roundings.
    assert seen.scales["0", "weight"] == pytest.approx(bound_of(model[0]) / 448, rel=2**-22)


def edited(layer: nn.Linear, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            layer.weight[0, 0] = 9.0
        elif how == "data":
            layer.weight.data = torch.full_like(layer.weight, 9.0)
        elif how == "replaced":
            layer.weight = nn.Parameter(torch.full_like(layer.weight, 9.0))
        elif how == "loaded":
            layer.load_state_dict({k: torch.full_like(v, 9.0) for k, v in nn.Linear(32, 48).state_dict().items()})
        elif how == "assigned":
            layer.load_state_dict(
                {k: torch.full_like(v, 9.0) for k, v in nn.Linear(32, 48).state_dict().items()}, assign=True
            )
        else:
            other = torch.optim.SGD([layer.weight], 9.0)
            layer.weight.grad = torch.ones_like(layer.weight)
            other.step()


@pytest.mark.parametrize("how", ["in place", "data", "replaced", "loaded", "assigned", "another optimizer"])
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_weight_that_changed_otherwise_is_measured(recipe: str, how: str) -> None:
    model = network()
    octavo.convert(model, RECIPES[recipe])
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    x = torch.randn(4, 32)
    model(x).sum().backward()
    optimizer.step()
    edited(model[0], how)
    model(x).sum().backward()
    assert_nothing_saturates(model)
    assert bound_of(model[0]) == pytest.approx(9.0, abs=0.5)
    optimizer.step()
    assert_nothing_saturates(model)


def test_an_edit_before_a_step_is_noticed_by_the_step() -> None:
    """As compiled code needs it, which does not look."""
    model = network()
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    edited(model[0], "in place")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert_nothing_saturates(model)


def test_a_frozen_weight_is_measured_once_and_its_bound_stays() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    predicted = octavo.predict_weight_scales(model, optimizer)
    assert sorted(predicted.layers) == ["0", "2"]
    before = bound_of(model[0])
    for _ in range(3):
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
    assert bound_of(model[0]) == before == model[0].weight.abs().max().item()
    assert bound_of(model[2]) > model[2].weight.abs().max().item()


def test_groups_take_their_own_learning_rates() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    groups = [{"params": model[2].parameters(), "lr": 1e-1}, {"params": model[0].parameters(), "lr": 1e-4}]
    optimizer = torch.optim.AdamW(groups)
    predicted = octavo.predict_weight_scales(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    slack = predicted.slack()
    assert slack["2"] > 1 > 0.05 > slack["0"]


def step_of_ones(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def appended(optimizer: torch.optim.Optimizer, weight: Any) -> None:
    weight.requires_grad_()
    optimizer.param_groups[0]["params"].append(weight)


def in_a_new_group(optimizer: torch.optim.Optimizer, weight: Any) -> None:
    weight.requires_grad_()
    optimizer.add_param_group({"params": [weight], "lr": 0.2})


def in_a_new_group_with_betas(optimizer: torch.optim.Optimizer, weight: Any) -> None:
    weight.requires_grad_()
    optimizer.add_param_group({"params": [weight], "lr": 0.2, "betas": (0.8, 0.99)})


@pytest.mark.parametrize("thaw", [appended, in_a_new_group, in_a_new_group_with_betas])
@pytest.mark.parametrize("in_a_hook", [False, True])
def test_a_frozen_weight_that_is_trained_later_is_followed(thaw: Callable[..., None], in_a_hook: bool) -> None:
    model = converted()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), 0.1)
    octavo.predict_weight_scales(model, optimizer, every=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of_ones(optimizer)
        if in_a_hook:
            model[0].weight.grad = torch.ones_like(model[0].weight)
            handle = optimizer.register_step_pre_hook(lambda *_: thaw(optimizer, model[0].weight))
            step_of_ones(optimizer)
            handle.remove()
            assert_nothing_saturates(model)
        else:
            thaw(optimizer, model[0].weight)
        for _ in range(5):
            step_of_ones(optimizer)
            assert_nothing_saturates(model)
    assert bound_of(model[0]) > 1.2 * model[0].weight.abs().max().item()


NO_BOUND: dict[str, tuple[dict[str, Any], str]] = {
    "betas": ({"betas": (0.97, 0.9)}, r"betas are \(0.97, 0.9\)"),
    "eps": ({"eps": 0.0}, "eps is 0.0"),
    "tensors": ({"betas": (torch.tensor(0.9), torch.tensor(0.999))}, "betas are tensors"),
}


@pytest.mark.parametrize("case", NO_BOUND)
@pytest.mark.parametrize("in_a_hook", [False, True])
def test_a_thawed_weight_in_a_group_without_a_bound_is_measured_after_each_step_and_said_once(
    case: str, in_a_hook: bool
) -> None:
    options, why = NO_BOUND[case]
    model = converted()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), 1e-3, foreach=False)
    predicted = octavo.predict_weight_scales(model, optimizer, every=1000)
    step_of_ones(optimizer)

    def thaw(*_: Any) -> None:
        optimizer.add_param_group({"params": [model[0].weight.requires_grad_()]} | options)
        model[0].weight.grad = torch.ones_like(model[0].weight)

    message = rf"weight of 0 was frozen, and is trained now in param group 1, of whose steps no bound is known: {why}"
    handle = optimizer.register_step_pre_hook(thaw) if in_a_hook else thaw()
    with pytest.warns(UserWarning, match=message) as caught:
        step_of_ones(optimizer)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    if handle is not None:
        handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            step_of_ones(optimizer)
            assert bound_of(model[0]) == model[0].weight.abs().max().item()
            assert bound_of(model[2]) > model[2].weight.abs().max().item()
    assert predicted.layers == ["2"]
    assert why.split(" ")[0] in predicted.left["0"]
    assert set(predicted.slack()) == {"0", "2"}
    model(torch.randn(4, 32)).sum().backward()


@pytest.mark.parametrize("case", NO_BOUND)
def test_a_group_that_is_put_right_after_its_first_step_ends_nothing(case: str) -> None:
    options, _ = NO_BOUND[case]
    model = converted()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), 1e-3, foreach=False)
    predicted = octavo.predict_weight_scales(model, optimizer, every=2)
    optimizer.add_param_group({"params": [model[0].weight.requires_grad_()]} | options)
    with pytest.warns(UserWarning, match=r"predicted too, remove\(\) the prediction, make the optimizer anew"):
        step_of_ones(optimizer)
    optimizer.param_groups[1].update(betas=(0.9, 0.999), eps=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            step_of_ones(optimizer)
            # Its moments are of both.
            assert bound_of(model[0]) == model[0].weight.abs().max().item()
            assert_nothing_saturates(model)
        assert bound_of(model[2]) > model[2].weight.abs().max().item()
        assert predicted.layers == ["2"]
        assert list(predicted.left) == ["0"]
        # What the warning says.
        predicted.remove()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        predicted = octavo.predict_weight_scales(model, optimizer)
        step_of_ones(optimizer)
    assert predicted.layers == ["0", "2"]
    assert bound_of(model[0]) > model[0].weight.abs().max().item()


def test_a_group_without_a_bound_is_refused_at_the_call() -> None:
    model = converted()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "betas": (0.97, 0.9)}]
    with pytest.raises(ValueError, match=r"steps of param group 1: betas are \(0.97, 0.9\): updates are bounded only"):
        octavo.predict_weight_scales(model, torch.optim.AdamW(groups))
    assert all(layer.delayed_state.weight_bound is None for layer in (model[0], model[2]))


def test_a_weight_that_is_moved_between_groups_takes_the_rate_of_the_new_one() -> None:
    model = converted()
    groups = [{"params": model[0].parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups)
    octavo.predict_weight_scales(model, optimizer, every=1000)
    step_of_ones(optimizer)
    slow, fast = (group["params"] for group in optimizer.param_groups)
    index = next(place for place, parameter in enumerate(slow) if parameter is model[0].weight)
    slow[index], fast[index] = fast[index], slow[index]
    for _ in range(3):
        step_of_ones(optimizer)
        assert_nothing_saturates(model)


def test_a_rate_that_another_hook_lowers_after_the_step_is_not_that_of_the_step() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters(), 1.0)
    optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(lr=0.0))
    octavo.predict_weight_scales(model, optimizer, every=1000)
    step_of_ones(optimizer)
    assert_nothing_saturates(model)


@pytest.mark.parametrize("tensors", [False, True])
def test_of_two_rates_around_a_step_the_larger_counts(tensors: bool) -> None:
    model = converted()
    rate = [torch.tensor(1e-4), torch.tensor(0.5)] if tensors else [1e-4, 0.5]
    optimizer = torch.optim.AdamW(model.parameters(), rate[0], foreach=False)
    octavo.predict_weight_scales(model, optimizer, every=1000)
    optimizer.register_step_pre_hook(lambda *_: optimizer.param_groups[0].update(lr=rate[1]))
    step_of_ones(optimizer)
    assert_nothing_saturates(model)


def test_an_edit_in_an_earlier_hook_after_the_step_is_noticed() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.no_grad()
    def grow(*arguments: Any) -> None:
        model[0].weight.mul_(100.0)

    optimizer.register_step_post_hook(grow)
    octavo.predict_weight_scales(model, optimizer, every=1000)
    step_of_ones(optimizer)
    model(torch.randn(4, 32))
    assert_nothing_saturates(model)


@pytest.mark.parametrize("fused", [False, True])
def test_another_optimizer_is_followed_when_the_first_is_gone(fused: bool) -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    del optimizer
    gc.collect()
    step_of_ones(torch.optim.AdamW(model.parameters(), 1.0, fused=fused))
    assert_nothing_saturates(model)


def test_weights_and_gradients_go_with_the_model_and_the_optimizer() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    held = [weakref.ref(p) for p in model.parameters()]
    held += [weakref.ref(p.grad) for p in model.parameters()]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in held] == [None] * len(held)


def test_parts_of_a_weight_in_several_groups_are_measured_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    other = nn.Parameter(torch.zeros_like(model[0].weight))
    octavo.predict_weight_scales(model, optimizer, every=1000)
    optimizer.add_param_group({"params": [other], "lr": 0.9})
    monkeypatch.setattr(model[0], "weight_parts", lambda: [model[0].weight, other])
    for _ in range(3):
        step_of_ones(optimizer)
        assert bound_of(model[0]) == max(part.abs().max().item() for part in model[0].weight_parts())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("update_first", [True, False])
def test_compiled_code_follows_without_another_graph(recipe: str, update_first: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    outcomes = []
    for compiles in (False, True):
        model = network()
        octavo.convert(model, RECIPES[recipe])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        octavo.predict_weight_scales(model, optimizer, every=3)
        run = torch.compile(model, backend=counter, fullgraph=True) if compiles else model
        for step in range(8):
            torch.manual_seed(step)
            run(torch.randn(16, 32)).square().sum().backward()
            if update_first:
                octavo.update_scales(model)
            optimizer.step()
            if not update_first:
                octavo.update_scales(model)
            optimizer.zero_grad()
        outcomes.append([p.detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    assert counter.frame_count <= 2


def test_checkpoints_recompute_the_same_bits() -> None:
    gradients = []
    for checkpoints in (False, True):
        model = network()
        octavo.convert(model, RECIPES["delayed"])
        octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
        x = torch.ones(4, 32, requires_grad=True)
        (octavo.checkpoint(model, x) if checkpoints else model(x)).sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_with_a_loss_scaler_skipped_steps_do_not_raise_the_bound() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.AdamW(model.parameters())
    predicted = octavo.predict_weight_scales(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", torch.float16):
        y = model(torch.randn(4, 32))
    scaler.scale(y.float().sum() * float("inf")).backward()
    scaler.step(optimizer)
    assert set(predicted.slack().values()) == {0.0}


@pytest.mark.parametrize("steps_before", [0, 1])
def test_delayed_scaling_has_no_history_of_the_weight_meanwhile_and_begins_anew_after(steps_before: int) -> None:
    model = network()
    octavo.convert(model, RECIPES["delayed"])
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(4, 32)).sum().backward()
        octavo.update_scales(model)
        optimizer.step()

    for _ in range(steps_before):
        step()
    predicted = octavo.predict_weight_scales(model, optimizer)
    for _ in range(3):
        step()
    saved = model.state_dict()
    assert saved["0.weight_scale"].isnan()
    assert not saved["0.weight_amax_history"].any()
    assert saved["0.input_amax_history"].any()
    predicted.remove()
    step()
    step()
    step()
    saved = model.state_dict()
    assert saved["0.weight_amax_history"].max().item() == pytest.approx(model[0].weight.abs().max().item(), rel=0.05)
    assert saved["0.weight_scale"].isfinite()
    assert not model[0].delayed_state.weight.from_data
    assert model[0].delayed_state.weight_bound is None


def test_copies_measure_and_a_model_goes_when_nobody_holds_it() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    other = copy.deepcopy(model)
    assert other[0].delayed_state.weight_bound is None
    other(torch.randn(4, 32)).sum().backward()
    states = [weakref.ref(layer.delayed_state) for layer in (model[0], model[2])]
    del model
    gc.disable()
    try:
        assert [state() for state in states] == [None, None]
    finally:
        gc.enable()


def test_octavos_own_layers_and_smoothed_channels() -> None:
    model: Any = nn.Sequential(
        octavo.LayerNormMLP(32, 64, activation="swiglu", smooth_swiglu=True), octavo.TransformerLayer(32, 64, 2)
    )
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    predicted = octavo.predict_weight_scales(model, optimizer)
    assert {"0.fc1", "0.fc2", "1.self_attention.proj"} <= set(predicted.layers)
    with torch.no_grad():
        model[0].layer_norm_weight.mul_(1000.0)
    for _ in range(3):
        with octavo.inspection.watch(model) as seen:
            model(torch.randn(5, 2, 32)).sum().backward()
        optimizer.step()
        assert all(figures.saturation == 0 for figures in seen.statistics.values())
        assert len(seen.statistics) >= 15


def test_another_recipe_goes_its_own_way() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 32)
    plain = copy.deepcopy(model)
    for recipe in (RowwiseScaling(), StaticScaling(weight_scale=0.001)):
        with octavo.autocast(recipe=recipe):
            assert torch.equal(model(x), plain(x))


def test_a_given_bound_for_another_optimizer() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    # Signs of gradients: no step is longer than lr.
    octavo.predict_weight_scales(model, optimizer, step_bound=lambda group: group["lr"])
    for _ in range(30):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert_nothing_saturates(model)
    assert bound_of(model[0]) < model[0].weight.abs().max().item() + 31e-2


@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float16, 3e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)], ids=str
)
def test_a_bound_ends_at_the_largest_number_of_the_weights(dtype: torch.dtype, bound: float, tensors: bool) -> None:
    """Beyond it there is infinity, whose scale leaves nothing but zeros of a weight that is as large as can be."""
    model = network(dtype)
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    given = torch.tensor(bound) if tensors else bound
    predicted = octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=lambda group: given)
    for _ in range(3):
        step_of_ones(optimizer)
    largest = torch.finfo(dtype).max
    assert bound_of(model[0]) == model[0].delayed_state.weight_bound.exact.item() == largest
    assert math.isfinite(predicted.slack()["0"])
    with torch.no_grad():
        model[0].weight.data.fill_(largest)  # (unseen by the version counter)
        y = model[0](torch.eye(32, dtype=dtype)[:4] / 4)
    torch.testing.assert_close(y, torch.full_like(y, largest / 4), rtol=0.01, atol=0)


def twice_the_rate(group: Any) -> Any:
    """More than a step of ones can be, so that a bound which was raised is not the amax; or what the group says."""
    return group.get("bound", 2 * group["lr"])


def test_a_thawed_weight_of_whose_group_step_bound_knows_no_bound_is_measured() -> None:
    model = converted()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 1e-2)
    predicted = octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=twice_the_rate)
    optimizer.add_param_group({"params": [model[0].weight.requires_grad_()], "bound": None})
    message = r"weight of 0 was frozen, and is trained now in param group 1, .*: step_bound returned None .*give it a"
    with pytest.warns(UserWarning, match=message) as caught:
        step_of_ones(optimizer)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step_of_ones(optimizer)
            assert bound_of(model[0]) == model[0].weight.abs().max().item()
            assert bound_of(model[2]) > model[2].weight.abs().max().item()
        # One that comes later is taken by a new call.
        optimizer.param_groups[1]["bound"] = 2e-2
        step_of_ones(optimizer)
        assert predicted.layers == ["2"]
        assert list(predicted.left) == ["0"]
        predicted.remove()
        predicted = octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=twice_the_rate)
        step_of_ones(optimizer)
    assert sorted(predicted.layers) == ["0", "2"]
    assert bound_of(model[0]) > model[0].weight.abs().max().item()


def test_a_weight_of_whose_group_step_bound_knows_no_bound_any_more_was_not_frozen() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=twice_the_rate)
    step_of_ones(optimizer)
    optimizer.param_groups[0]["bound"] = None
    with pytest.warns(UserWarning, match="the weight of [02] is trained in param group 0, of whose steps no bound is"):
        step_of_ones(optimizer)
    for layer in (model[0], model[2]):
        assert bound_of(layer) == layer.weight.abs().max().item()


@pytest.mark.parametrize("bound", [-1.0, True, float("nan"), torch.ones(2)], ids=repr)
def test_what_step_bound_gives_for_a_thawed_group_is_checked_before_the_step(bound: Any) -> None:
    model = converted()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), 1e-2)
    octavo.predict_weight_scales(model, optimizer, step_bound=twice_the_rate)
    optimizer.add_param_group({"params": [model[0].weight.requires_grad_()], "bound": bound})
    before = model[2].weight.detach().clone()
    with pytest.raises(ValueError, match=r"step_bound returned .* for param group 1: expected the largest change"):
        step_of_ones(optimizer)
    assert torch.equal(model[2].weight, before)
    optimizer.param_groups[1]["bound"] = 1e-2
    step_of_ones(optimizer)
    assert_nothing_saturates(model)


@pytest.fixture
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that step_bound gives is not looked at, but at the call, though it lies on the CPU."""
    looked_at = octavo.optim.step_bound._checked

    def checked(given: Any, device: torch.device, waits: bool) -> Any:
        return given.reshape(()).abs() if isinstance(given, Tensor) and not waits else looked_at(given, device, waits)

    monkeypatch.setattr(octavo.optim.step_bound, "_checked", checked)


@pytest.mark.usefixtures("_as_on_a_gpu")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("unbounded", [float("nan"), float("inf")], ids=str)
def test_a_bound_that_is_not_finite_on_the_device_is_told_at_the_next_step(unbounded: float, recipe: str) -> None:
    model = converted(RECIPES[recipe])
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    optimizer.param_groups[0]["bound"] = torch.tensor(2e-2)
    octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=twice_the_rate)
    step_of_ones(optimizer)
    assert_nothing_saturates(model)
    before = bound_of(model[0])
    optimizer.param_groups[0]["bound"] = torch.tensor(unbounded)
    step_of_ones(optimizer)
    assert bound_of(model[0]) == before, "the best that is known"
    y = model(torch.randn(4, 32))
    assert y.isfinite().all()
    assert y.any()
    optimizer.param_groups[0]["bound"] = torch.tensor(2e-2)
    largest = [layer.weight.detach().abs().max().item() for layer in (model[0], model[2])]
    with pytest.warns(UserWarning, match=r"a tensor that is NaN or inf for param group 0, .* measured again") as caught:
        step_of_ones(optimizer)
    assert caught[0].filename == __file__
    assert len(caught) == 1
    assert [bound_of(layer) for layer in (model[0], model[2])] == pytest.approx([amax + 2e-2 for amax in largest])
    step_of_ones(optimizer)
    assert_nothing_saturates(model)


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_an_answer_that_has_not_come_is_not_waited_for_and_other_groups_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted()
    groups = [{"params": layer.parameters(), "bound": torch.tensor(2e-2)} for layer in (model[0], model[2])]
    optimizer = torch.optim.SGD(groups, 1e-2)
    predicted = octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=twice_the_rate)
    optimizer.param_groups[1]["bound"] = torch.tensor(float("nan"))
    step_of_ones(optimizer)
    optimizer.param_groups[1]["bound"] = torch.tensor(2e-2)
    with monkeypatch.context() as patched:
        patched.setattr(octavo.optim.late_answer.LateAnswer, "has_come", lambda self: False)
        step_of_ones(optimizer)
    with pytest.warns(UserWarning, match="for param group 1"):
        step_of_ones(optimizer)
    assert_nothing_saturates(model)
    slack = predicted.slack()
    assert slack["0"] > slack["2"], "that of the other group was not measured"
    step_of_ones(optimizer)
    assert not predicted.left


@pytest.mark.usefixtures("_as_on_a_gpu")
def test_a_bound_that_is_not_finite_at_the_call_is_refused() -> None:
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with pytest.raises(ValueError, match=r"step_bound returned tensor\(nan\) for param group 0: expected the largest"):
        octavo.predict_weight_scales(model, optimizer, step_bound=lambda group: torch.tensor(float("nan")))


@pytest.mark.gpu
def test_a_bound_on_a_gpu_is_not_waited_for_and_told_all_the_same() -> None:
    model = converted().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    given = {"bound": torch.tensor(2e-2, device="cuda")}
    bad = torch.tensor(float("nan"), device="cuda")
    with pytest.raises(ValueError, match=r"step_bound returned tensor\(nan.* for param group 0: expected the largest"):
        octavo.predict_weight_scales(model, optimizer, step_bound=lambda group: bad)
    octavo.predict_weight_scales(model, optimizer, every=1000, step_bound=lambda group: given["bound"])
    step_of_ones(optimizer)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for bound in (given["bound"], bad):
            given["bound"] = bound
            step_of_ones(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    given["bound"] = torch.tensor(2e-2, device="cuda")
    torch.cuda.synchronize()
    with pytest.warns(UserWarning, match="a tensor that is NaN or inf for param group 0"):
        step_of_ones(optimizer)
    assert_nothing_saturates(model)


def test_betas_that_change_end_it_with_a_warning() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match=r"betas and eps changed from .* measured from now on") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    assert model[0].delayed_state.weight_bound is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_the_same_betas_as_a_list_change_nothing() -> None:
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters())
    octavo.predict_weight_scales(model, optimizer)
    optimizer.param_groups[0]["betas"] = list(optimizer.param_groups[0]["betas"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of_ones(optimizer)
    assert bound_of(model[0]) > model[0].weight.abs().max().item()


def test_a_model_that_is_cast_after_is_refused_with_the_remedy() -> None:
    model = network()
    octavo.convert(model, CurrentScaling())
    octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"bfloat16 on cpu, and its scale was predicted for torch.float32 .*remove"):
        model(torch.randn(4, 32, dtype=torch.bfloat16))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "SGD": (lambda: octavo.predict_weight_scales(m := converted(), torch.optim.SGD(m.parameters())), ValueError, "SGD"),
    "no optimizer": (lambda: octavo.predict_weight_scales(converted(), None), TypeError, "optimizer is a NoneType"),  # type: ignore[arg-type]
    "every 0": (lambda: predicted(converted(), every=0), ValueError, "every is 0"),
    "None": (
        lambda: predicted(converted(), step_bound=lambda group: None),
        ValueError,
        "steps of param group 0: step_bound returned None",
    ),
    "no function": (lambda: predicted(converted(), step_bound=0.1), ValueError, "step_bound is 0.1"),
    "row": (
        lambda: predicted(converted(RowwiseScaling())),
        ValueError,
        r"RowwiseScaling measures no scale of the .*\): octavo\.convert\(model, CurrentScaling\(\)\) or .* first$",
    ),
    "plain": (
        lambda: predicted(network()),
        ValueError,
        r"no layer of this Sequential can be predicted: octavo\.convert\(.*first$",
    ),
    "not its weights, and by row": (
        lambda: octavo.predict_weight_scales(
            converted(CurrentScaling(overrides={"^0$": RowwiseScaling()})), torch.optim.Adam(network().parameters())
        ),
        ValueError,
        r"\): octavo\.convert\(model, .* first; give the optimizer that trains these weights$",
    ),
    "twice": (
        lambda: (predicted(m := converted()), predicted(m)),
        ValueError,
        r"can be predicted \(0: it is predicted already: remove\(\) that first; 2: .* remove\(\) that first\)$",
    ),
    "not its weights": (
        lambda: octavo.predict_weight_scales(converted(), torch.optim.Adam(network().parameters())),
        ValueError,
        r"trained, and not by this optimizer\): give the optimizer that trains these weights$",
    ),
    "half": (lambda: predicted(converted().to(torch.float16)), ValueError, "float16, in which the second moment"),
}


def converted(recipe: Recipe | None = None) -> Any:
    model = network()
    octavo.convert(model, recipe or CurrentScaling())
    return model


def predicted(model: Any, **options: Any) -> Any:
    return octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()), **options)


def test_it_shows_what_it_predicts() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    octavo.convert(model, CurrentScaling(overrides={"^2$": RowwiseScaling()}))
    found = predicted(model)
    assert repr(found) == "PredictedWeightScales(2 layers predicted, measured every 100 steps, 1 left)"
    found.remove()
    assert repr(found) == "PredictedWeightScales(ended)"
    assert repr(predicted(model[:1], every=1)).endswith("(1 layer predicted, measured every step, 0 left)")


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


CURRENT, GRADIENT = QuantizeSpec(format="E4M3"), QuantizeSpec(format="E5M2")


def with_weight(forward: QuantizeSpec, backward: QuantizeSpec) -> Recipe:
    return CustomRecipe(
        fprop_input=CURRENT,
        fprop_weight=forward,
        dgrad_grad_output=GRADIENT,
        dgrad_weight=backward,
        wgrad_grad_output=GRADIENT,
        wgrad_input=CURRENT,
        **({"amax_history_len": 4} if forward.scaling == "delayed" else {}),
    )


DRAWN = QuantizeSpec(format="E4M3", scaling="delayed", rounding="stochastic")
BY_CHANCE, IN_TWO_WAYS = with_weight(DRAWN, DRAWN), with_weight(CURRENT, QuantizeSpec(format="E4M3", granularity="row"))


@pytest.mark.parametrize("recipe", [BY_CHANCE, IN_TWO_WAYS], ids=["by chance", "in two ways"])
def test_what_the_casts_do_not_take_is_left_and_said(recipe: Recipe) -> None:
    model = nn.Sequential(octavo.Linear(32, 32, recipe=recipe), octavo.Linear(32, 32, recipe=CurrentScaling()))
    found = predicted(model)
    assert found.layers == ["1"]
    assert found.left == {"0": "CustomRecipe rounds the weight by chance, or casts it in two ways"}


def test_under_a_recipe_that_takes_no_bound_the_weight_has_its_history() -> None:
    model = nn.Sequential(octavo.Linear(32, 32, recipe=DelayedScaling(amax_history_len=4)))
    predicted(model)
    octavo.set_recipe(model, BY_CHANCE)
    for _ in range(2):
        model(torch.randn(8, 32)).sum().backward()
        octavo.update_scales(model)
    assert not model[0].delayed_state.weight.from_data
    assert model.state_dict()["0.weight_scale"].isfinite()


def test_fp8_weights_are_left_and_said() -> None:
    with octavo.quantized_init():
        held = octavo.Linear(32, 32, recipe=CurrentScaling())
    model = nn.Sequential(held, octavo.Linear(32, 32, recipe=CurrentScaling()))
    left = octavo.predict_weight_scales(model, torch.optim.AdamW(model[1].parameters())).left
    assert left == {"0": "its weight exists in FP8 alone"}
