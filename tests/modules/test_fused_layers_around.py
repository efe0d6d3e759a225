"""Fused layers and what is around them: checkpoints, state dicts, copies, micro-batches, observers, recipes, errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from tests.modules.compositions import (
    BF16,
    FEW,
    MAKERS,
    RECIPES,
    Composition,
    assert_same_steps,
    every_layer,
    jittered,
    state_of,
    steps,
    under,
)
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe
from octavo.tensor import QuantizedTensor


@every_layer
def test_recipes_may_change_between_steps(kind: str) -> None:
    layer = MAKERS[kind]()
    composed = Composition(layer)
    for name in ("delayed", "current", "delayed", "none", "block", "delayed, measured first", "static", "delayed"):
        assert_same_steps(layer, composed, RECIPES[name], steps(9, 33, number=2))
    fp16_like = DelayedScaling(format=octavo.E5M2, amax_history_len=2)
    assert_same_steps(layer, composed, fp16_like, steps(9, 33, number=2))


@every_layer
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_activation_checkpointing_is_invisible(recipe: str, reentrant: bool, kind: str) -> None:
    plain = jittered(MAKERS[kind]())
    others = [copy.deepcopy(plain) for _ in range(2)]

    def twice(layer: nn.Module, x: Tensor) -> Tensor:
        return octavo.checkpoint(lambda y: octavo.checkpoint(layer, y, use_reentrant=reentrant), x)

    runs = [
        plain,
        lambda x: octavo.checkpoint(others[0], x, use_reentrant=reentrant),
        lambda x: twice(others[1], x),
    ]
    for x in steps(9, 33):
        outcomes = []
        for run, layer in zip(runs, [plain, *others], strict=True):
            leaf = x.clone().requires_grad_()
            with under(RECIPES[recipe]):
                y = run(leaf)
            y.square().sum().backward()
            outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters()), *state_of(layer)])
            layer.zero_grad()
        for other in outcomes[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outcomes[0], other, strict=True))


@every_layer
@pytest.mark.parametrize("recipe", FEW)
def test_torchs_own_checkpoint(recipe: str, kind: str) -> None:
    plain = jittered(MAKERS[kind]())
    other = copy.deepcopy(plain)
    for x in steps(9, 33):
        outcomes = []
        for layer in (plain, other):
            leaf = x.clone().requires_grad_()
            with under(RECIPES[recipe]):
                if layer is plain:
                    y = layer(leaf)
                else:
                    y = torch.utils.checkpoint.checkpoint(layer, leaf, use_reentrant=False)
            y.square().sum().backward()
            outcomes.append([y, leaf.grad, *(p.grad for p in layer.parameters()), *state_of(layer)])
            layer.zero_grad()
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@every_layer
@pytest.mark.parametrize("recipe", ["delayed", "delayed, measured first"])
def test_a_saved_layer_goes_on_where_it_was(recipe: str, kind: str) -> None:
    layer = jittered(MAKERS[kind]())
    inputs = steps(9, 33, number=4)

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        with under(RECIPES[recipe]):
            y = layer(x)
        y.square().sum().backward()
        return [y.detach(), *state_of(layer)]

    for x in inputs[:2]:
        run(layer, x)
    buffer = io.BytesIO()
    torch.save({"model": nn.ModuleDict({"inner": layer}).state_dict()}, buffer)
    buffer.seek(0)
    other = MAKERS[kind]()
    entries = torch.load(buffer, weights_only=True)["model"]
    nn.ModuleDict({"inner": other}).load_state_dict(entries)
    # An update before what is gathered by the backward is saved would differ: position 0 of the history holds it.
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other]
    for x in inputs[2:]:
        expected = run(layer, x)
        for each in copies:
            assert all(torch.equal(a, b) for a, b in zip(expected, run(each, x), strict=True))


STATE_KEYS = {
    "linear": ["input", "weight", "grad_output"],
    "mlp": [f"{part}_{operand}" for part in ("fc1", "fc2") for operand in ("input", "weight", "grad_output")],
}


@every_layer
def test_keys_of_the_state(kind: str) -> None:
    layer = MAKERS[kind]()
    parameters = [name for name, _ in layer.named_parameters()]
    assert list(layer.state_dict()) == parameters
    with under(RECIPES["delayed"]):
        layer(torch.randn(4, 33)).sum().backward()
    expected = [f"{name}_{part}" for name in STATE_KEYS[kind] for part in ("scale", "amax_history")]
    assert set(layer.state_dict()) == {*parameters, *expected}
    assert set(octavo.state_dict(nn.ModuleDict({"inner": layer}))) == {f"inner.{name}" for name in parameters}
    plain = {name: value for name, value in layer.state_dict().items() if name in parameters}
    layer.load_state_dict(plain)  # strict
    assert all(o.from_data for s in _states(layer) for o in s.operands), "new weights: scales come from new data"
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({**plain, "fc3_input_scale": torch.ones(())})


def _states(layer: nn.Module) -> list[Any]:
    return [module.delayed_state for module in layer.modules() if hasattr(module, "delayed_state")]


@every_layer
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_cached_weights_serve_micro_batches(recipe: str, kind: str) -> None:
    layer = MAKERS[kind]()
    other = copy.deepcopy(layer)
    for number in range(3):
        x = torch.randn(9, 33)
        for each, mode in ((layer, "reuse" if number else "refresh"), (other, None)):
            with under(RECIPES[recipe].replaced(amax_history_len=1) if recipe == "delayed" else RECIPES[recipe]):
                y = each(x, cached_weight=mode)
            y.sum().backward()
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        if recipe != "delayed":  # there a cached weight keeps its own scale
            assert torch.equal(a.grad, b.grad)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.5)
    fresh = copy.deepcopy(layer)
    with octavo.autocast(recipe=CurrentScaling()):
        assert torch.equal(layer(x, cached_weight="reuse"), fresh(x)), "a weight that changed is cast anew"


@every_layer
def test_a_watched_layer_gives_the_same_bits(kind: str) -> None:
    layer = jittered(MAKERS[kind]())
    other = copy.deepcopy(layer)
    for x in steps(9, 33):
        outcomes = []
        for each in (layer, other):
            leaf = x.clone().requires_grad_()
            with octavo.autocast(recipe=RECIPES["delayed"]):
                if each is layer:
                    with octavo.inspection.watch(nn.ModuleDict({"inner": layer})) as seen:
                        y = each(leaf)
                else:
                    y = each(leaf)
            y.square().sum().backward()
            outcomes.append([y, leaf.grad, *state_of(each)])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    names = {"linear": ["inner"], "mlp": ["inner.fc1", "inner.fc2"]}[kind]
    assert set(seen.statistics) == {(name, o) for name in names for o in ("input", "weight", "grad_output")}


@every_layer
def test_weights_in_fp8_alone(kind: str) -> None:
    with octavo.quantized_init(recipe=CurrentScaling()):
        layer = MAKERS[kind]()
    weights = [p for name, p in layer.named_parameters() if name.endswith("weight") and "norm" not in name]
    assert all(isinstance(weight, QuantizedTensor) for weight in weights)
    assert_same_steps(layer, Composition(layer), CurrentScaling(), steps(9, 33))
    assert layer(torch.randn(4, 33)).isfinite().all(), "and without FP8 products"


@every_layer
def test_a_recipe_of_its_own_and_calibration(kind: str) -> None:
    layer = MAKERS[kind](recipe=DelayedScaling(amax_history_len=2))
    composed = Composition(layer)
    for _ in range(3):
        x = torch.randn(9, 33)
        for each in (layer, composed):
            out = each(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            octavo.update_scales(each)
    assert all(torch.equal(a, b) for a, b in zip(state_of(layer), state_of(composed), strict=True))
    layer, x = MAKERS[kind](), torch.randn(9, 33)
    composed = Composition(layer)
    for each in (layer, composed):
        with torch.no_grad(), octavo.autocast(enabled=False, recipe=DelayedScaling(), calibrating=True):
            each(x)
    assert all(torch.equal(a, b) for a, b in zip(state_of(layer), state_of(composed), strict=True))
    assert state_of(layer)[0] != 1.0


@every_layer
def test_gradients_of_gradients_are_refused_in_fp8_and_exist_without(kind: str) -> None:
    layer, x = MAKERS[kind](dtype=torch.float64), torch.randn(4, 33, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert bool((x.grad != 0).any())
    layer, x = MAKERS[kind](), torch.randn(4, 33, requires_grad=True)
    with octavo.autocast():
        y = layer(x)
    with pytest.raises(RuntimeError, match="create_graph=True asks for the gradient of a gradient"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@every_layer
def test_meta_tensors_and_moves(kind: str) -> None:
    layer = MAKERS[kind](device="meta").to_empty(device="cpu")
    layer.reset_parameters()
    assert_same_steps(layer, Composition(layer), RECIPES["delayed"], steps(9, 33))
    with under(RECIPES["delayed"]):
        layer(torch.randn(4, 33)).sum().backward()
    layer.to(BF16)
    assert all(value.dtype == torch.float32 for value in state_of(layer))


@every_layer
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(4, 32), r"shape \(4, 32\): its last dimension must be in_features = 33"),
        (torch.randn(()), r"shape \(\): its last dimension must be in_features = 33"),
        (torch.randn(4, 33).double(), "dtype torch.float64: an FP8 layer takes float32, bfloat16 or float16"),
    ],
)
def test_wrong_inputs_are_named(x: Tensor, message: str, kind: str) -> None:
    layer = MAKERS[kind](recipe=CurrentScaling())
    with pytest.raises(ValueError, match=message):
        layer(x)
    with pytest.raises(ValueError, match="cached_weight is True: expected None, 'refresh' or 'reuse'"):
        layer(torch.randn(4, 33), cached_weight=True)


@every_layer
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "BatchNorm"}, "normalization is 'BatchNorm': expected 'LayerNorm' or 'RMSNorm'"),
        ({"eps": -1.0}, "eps is -1.0: it must be a number, 0 or positive"),
        ({"eps": None}, "eps is None: it must be a number"),
        ({"recipe": "delayed"}, "recipe is 'delayed': expected one of octavo.recipes"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], message: str, kind: str) -> None:
    with pytest.raises(ValueError, match=message):
        MAKERS[kind](**options)


def test_overrides_by_name_reach_each_linear_part() -> None:
    recipe: Recipe = CurrentScaling(overrides={r"mlp\.fc2$": None})
    layer = octavo.LayerNormMLP(32, 48)
    with octavo.autocast(recipe=recipe), pytest.raises(ValueError, match="overrides by name, and this layer has none"):
        layer(torch.randn(4, 32))
    layer.layer_name = "mlp"
    with octavo.count_gemms() as counted, octavo.autocast(recipe=recipe):
        layer(torch.randn(4, 32))
    assert counted.by_layer() == {"mlp.fc1": {"fprop fp8 emulated": 1}}
    assert layer.layer_name == "mlp"
