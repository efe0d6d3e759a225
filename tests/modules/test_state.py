"""State of a layer: copies, state dicts, devices, dtypes, and a run that goes on in another process."""

from __future__ import annotations

import copy
import io
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe

DELAYED = DelayedScaling(amax_history_len=4)
OPERANDS = ("input", "weight", "grad_output")


def network(recipe: Recipe | None = None) -> nn.Sequential:
    return nn.Sequential(octavo.Linear(16, 32, recipe=recipe), nn.GELU(), octavo.Linear(32, 16, recipe=recipe))


def train(model: nn.Module, steps: int = 3, recipe: Recipe = DELAYED, start: int = 0) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        with octavo.autocast(recipe=recipe):
            loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for key in left:
        # NaN is a scale that is not known yet.
        assert torch.equal(left[key].nan_to_num(-1.0), right[key].nan_to_num(-1.0)), key


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "EMA": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)).module,
}


@pytest.mark.parametrize("copied", COPIES)
def test_case_23_copies_are_bit_equal_and_independent(copied: str) -> None:
    """Case 23: deepcopy, pickle, EMA after 3 delayed steps: they go on as the original does, and leave it alone."""
    model = network()
    train(model)
    before = copy.deepcopy(model.state_dict())
    other = COPIES[copied](model)
    assert_same_state(model, other)
    theirs = train(other, start=3)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} of the original changed"
    assert train(model, start=3) == theirs
    assert_same_state(model, other)


def test_an_ema_follows_the_weights() -> None:
    model = network()
    train(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    start = model[0].weight.detach().clone()
    train(model, start=3)
    average.update_parameters(model)
    assert torch.allclose(average.module[0].weight, (start + model[0].weight) / 2, atol=1e-7)


def test_the_documented_keys_and_nothing_else() -> None:
    model = network()
    parameters = list(model.state_dict())
    train(model)
    state = {f"{o}_{part}" for o in OPERANDS for part in ("scale", "amax_history")}
    assert set(model.state_dict()) == {*parameters, *(f"{i}.{key}" for i in (0, 2) for key in state)}
    entries = model.state_dict()
    for operand, largest in (("input", 448), ("weight", 448), ("grad_output", 57344)):
        scale, history = entries[f"0.{operand}_scale"], entries[f"0.{operand}_amax_history"]
        assert (scale.shape, history.shape) == ((), (4,))
        assert scale.dtype == history.dtype == torch.float32
        assert scale == history[1:].max() / torch.tensor(float(largest))
    assert set(octavo.state_dict(model)) == set(parameters)
    assert set(octavo.state_dict(model, plain=False)) == set(model.state_dict())


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def plain_network(factor: float = 1.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def test_case_24_a_plain_checkpoint_loads_strictly_and_back() -> None:
    """Case 24: plain → FP8 strict, FP8 → plain, by way of torch.save and weights_only=True."""
    plain, model = plain_network(), network()
    train(model)
    model.load_state_dict(saved_and_loaded(plain.state_dict()), strict=True)
    x = torch.randn(8, 16)
    assert torch.equal(model(x), plain(x))
    train(model)
    plain.load_state_dict(saved_and_loaded(octavo.state_dict(model)), strict=True)
    assert torch.equal(model(x), plain(x))


def test_case_24_saved_before_the_first_forward() -> None:
    """Case 24: of a converted model, whose scales are not known yet: they still come from the first batch."""
    model = plain_network(50.0)
    octavo.convert(model, DELAYED)
    other = plain_network()
    octavo.convert(other, DELAYED)
    other.load_state_dict(saved_and_loaded(model.state_dict()), strict=True)
    x = torch.randn(8, 16)
    y = other(x)
    assert torch.equal(y, model(x))
    exact = nn.functional.linear(
        nn.functional.gelu(nn.functional.linear(x, model[0].weight, model[0].bias)), model[2].weight, model[2].bias
    )
    # Two layers with GELU between: 5 % each.
    assert (y - exact).norm() / exact.norm() < 0.10


@pytest.mark.parametrize("trained", [True, False])
def test_case_24_weights_50_times_larger_than_at_init(trained: bool) -> None:
    """Case 24: the first forward uses scales of the new weights."""
    model = network()
    if trained:
        train(model)
    plain = plain_network(50.0)
    model.load_state_dict(plain.state_dict())
    x = torch.randn(64, 16)
    with torch.no_grad(), octavo.autocast(recipe=DELAYED):
        y = model(x)
    assert (y - plain(x)).norm() / plain(x).norm() < 0.10


def test_each_entry_of_the_state_is_optional() -> None:
    model, x = network(), torch.randn(8, 16)
    train(model)
    state = model.state_dict()
    for missing in ("0.input_scale", "0.weight_amax_history", "2.grad_output_scale"):
        other = network()
        other.load_state_dict({k: v for k, v in state.items() if k != missing}, strict=True)
        with torch.no_grad(), octavo.autocast(recipe=DELAYED):
            y, expected = other(x), model(x)
        if missing.endswith("history") or "grad" in missing:
            assert torch.equal(y, expected)
        assert (y - expected).norm() / expected.norm() < 0.1
    assert network().load_state_dict(state, strict=True).unexpected_keys == []


def test_unknown_keys_and_wrong_values_are_still_refused() -> None:
    model = network()
    train(model)
    state = model.state_dict()
    with pytest.raises(RuntimeError, match="Unexpected key"):
        network().load_state_dict({**state, "0.output_scale": torch.ones(())}, strict=True)
    with pytest.raises(ValueError, match="one positive finite number"):
        network().load_state_dict({**state, "0.input_scale": torch.zeros(())})
    with pytest.raises(ValueError, match=r"found shape \(64, 1\): a frozen checkpoint\?\. Leave them out"):
        network().load_state_dict({**state, "0.weight_scale": torch.ones(64, 1)})


@pytest.mark.parametrize("recipe", [DELAYED, DelayedScaling(initialise_from_first_batch=True, amax_history_len=1)])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_resumed_run_is_bit_equal(recipe: Recipe, steps: int) -> None:
    model, other = network(), network()
    train(model, steps, recipe)
    other.load_state_dict(saved_and_loaded(model.state_dict()))
    assert_same_state(model, other)
    assert train(model, 4, recipe, start=steps) == train(other, 4, recipe, start=steps)
    assert_same_state(model, other)


SCRIPT = """
import json, sys, torch, octavo
from octavo.recipes import DelayedScaling
torch.set_num_threads(1)
first, last, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
octavo.convert(model, DelayedScaling(amax_history_len=4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if first:
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
losses = []
for step in range(first, last):
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    loss = model(x).square().mean()
    loss.backward()
    octavo.update_scales(model)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
print(json.dumps(losses))
"""


def test_case_25_resume_in_a_new_process(tmp_path: Path) -> None:
    """Case 25: 10 delayed steps against 5 + save + new process + 5: losses bit-equal."""

    def run(first: int, last: int, name: str) -> list[float]:
        command = [sys.executable, "-W", "error", "-c", SCRIPT, str(first), str(last), str(tmp_path / name)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment())
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    whole = run(0, 10, "whole.pt")
    assert run(0, 5, "half.pt") + run(5, 10, "half.pt") == whole
    a, b = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("whole.pt", "half.pt"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert whole[-1] < whole[0]


def environment() -> dict[str, str]:
    source = str(Path(octavo.__file__).parent.parent)
    return {"PYTHONPATH": source, "PATH": "", "HOME": str(Path.home())}


def test_state_stays_float32_and_follows_the_dtype_of_nothing() -> None:
    model = network()
    train(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for convert in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()):
        convert(model)
        for key, value in model.state_dict().items():
            if key.endswith(("_scale", "_amax_history")):
                assert value.dtype == torch.float32
                assert torch.equal(value, before[key])


@pytest.mark.parametrize("how", ["to_empty", "assign"])
def test_built_on_meta(how: str) -> None:
    with torch.device("meta"):
        model = network(DELAYED)
    assert model[0].delayed_state.input.scale.device.type == "meta"
    source = plain_network()
    if how == "to_empty":
        model.to_empty(device="cpu")
        model.load_state_dict(source.state_dict())
    else:
        model.load_state_dict(source.state_dict(), assign=True)
    for _ in range(2):
        model(torch.randn(8, 16)).sum().backward()
        octavo.update_scales(model)
    assert model[0].delayed_state.input.history.device.type == "cpu"
    assert model[0].delayed_state.input.scale.item() != 1.0


def test_a_model_built_under_inference_mode_serves() -> None:
    with torch.inference_mode():
        model = network(CurrentScaling())
        y = model(torch.randn(4, 16))
        again = model[0](torch.randn(4, 16), cached_weight="reuse")
    assert bool(y.isfinite().all() & again.isfinite().all())


def test_threads_evaluate_one_model_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    model = network(DELAYED)
    train(model)
    inputs = [torch.randn(8, 16) for _ in range(16)]

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    expected = [evaluate(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        for a, b in zip(pool.map(evaluate, inputs), expected, strict=True):
            assert torch.equal(a, b)


def test_a_loaded_scale_is_for_the_format_that_runs_next() -> None:
    """Whatever format the layer ran in before: the first backward already is that of a layer that never did."""
    hybrid = DelayedScaling(amax_history_len=4)
    ran, other, fresh = (octavo.Linear(64, 64, recipe=hybrid) for _ in range(3))
    other.recipe = hybrid.replaced(format=octavo.E4M3)
    x = torch.randn(32, 64)

    def step(layer: octavo.Linear) -> torch.Tensor:
        layer.zero_grad()
        layer(x).square().sum().backward()
        octavo.update_scales(layer)
        return layer.weight.grad.clone()

    for _ in range(4):
        step(ran)
        step(other)
    other.recipe = hybrid
    for layer in (other, fresh):
        layer.load_state_dict(ran.state_dict())
    gradients = [step(layer) for layer in (ran, other, fresh)]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_a_norm_s_weight_alone_does_not_make_the_matrix_new() -> None:
    layer = octavo.LayerNormLinear(64, 64)
    recipe = DelayedScaling(amax_history_len=4)
    for _ in range(3):
        with octavo.autocast(recipe=recipe):
            y = layer(torch.randn(16, 64))
        y.sum().backward()
    before = layer.delayed_state.weight.history.clone()
    layer.load_state_dict({"layer_norm_weight": torch.ones(64)}, strict=False)
    assert not layer.delayed_state.weight.from_data
    assert torch.equal(layer.delayed_state.weight.history, before)


def test_an_entry_that_is_no_scale_is_named() -> None:
    layer = octavo.Linear(16, 16)
    with pytest.raises(ValueError, match=r"weight_scale and weight_amax_history .*found -1\.0.*Leave them out"):
        layer.load_state_dict({"weight_scale": torch.tensor(-1.0)}, strict=False)
