"""`octavo.make_graphed_callables`: what is noted, kept and refused, with a stand-in for CUDA; on a GPU, for real."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import cuda_graphs
from octavo.tensor import operand_state, quantizer

DELAYED = DelayedScaling(amax_history_len=4)
MEASURED = DelayedScaling(amax_history_len=4, initialise_from_first_batch=True)


class StandIn:
    """torch.cuda.make_graphed_callables without CUDA: a "replay" computes what the layers would and is counted.

    As a replay, it runs with the recipe in force at the "capture", and leaves no note in the layers of having run. Its
    warm-up gathers amaxes of garbage, as torch's does.
    """

    def __init__(self) -> None:
        self.replays = 0
        self.fails = False

    def __call__(self, callables: Any, sample_args: Any, num_warmup_iters: int, unused: bool, pool: Any) -> Any:
        several = isinstance(callables, tuple)
        for module, args in zip(
            callables if several else (callables,), sample_args if several else (sample_args,), strict=True
        ):
            for _ in range(num_warmup_iters):
                out = module(*args)
                wanted = [tensor for tensor in (*args, *module.parameters()) if tensor.requires_grad]
                torch.autograd.grad(out, wanted, torch.full_like(out, 1e4))
            if self.fails:
                raise RuntimeError("no capture today")
            module.forward = self._replayed(module, module.forward)
        return callables

    def _replayed(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def replay(*args: Tensor) -> Any:
            self.replays += 1
            states = [m.delayed_state for m in module.modules() if "delayed_state" in m.__dict__]
            notes = [(state.context, state.takes_part, state.stale_steps) for state in states]
            for state in states:
                state.stale_steps = -9  # a layer that runs notices by itself; a replay does not
            out = forward(*args)
            for state, (context, part, stale) in zip(states, notes, strict=True):
                state.context, state.takes_part, state.stale_steps = context, part, stale
            return out

        return replay


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", stand_in)
    monkeypatch.setattr(cuda_graphs, "_lies_on_cuda", lambda tensor: True)
    return stand_in


def model_with(recipe: Recipe | None, device: str = "cpu") -> nn.Sequential:
    layers = [octavo.Linear(32, 48, recipe=recipe), nn.GELU(), octavo.Linear(48, 32, recipe=recipe)]
    return nn.Sequential(*layers).to(device)


def sample(device: str = "cpu") -> Tensor:
    return torch.randn(16, 32, device=device, requires_grad=True)


def states_in(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if "scale" in name or "amax" in name}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train(model: nn.Module, recipe: Recipe | None, steps: int, update: bool, device: str = "cpu") -> Tensor:
    """Losses of some steps of gradient descent, inside octavo.autocast or with update_scales."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        x = torch.randn(16, 32, device=device) * (1 + step)
        context = octavo.autocast(recipe=recipe) if recipe is not None else warnings.catch_warnings()
        with context:
            y = model(x.requires_grad_())
        loss = (y - x.detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update:
            octavo.update_scales(model)
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("update", [False, True], ids=["autocast", "update_scales"])
def test_training_goes_on_as_without_graphs(graphs: StandIn, update: bool) -> None:
    """Context's exit and explicit update both find the layers of a replay."""
    plain = model_with(DELAYED if update else None)
    graphed = copy.deepcopy(plain)
    recipe = None if update else DELAYED
    for model in (plain, graphed):
        train(model, recipe, 2, update)
    with octavo.autocast(recipe=recipe) if recipe else warnings.catch_warnings():
        octavo.make_graphed_callables(graphed, (sample(),))
    assert same(states_in(plain), states_in(graphed)), "known scales and histories are as before the warm-up"
    losses = [train(model, recipe, 5, update) for model in (plain, graphed)]
    assert graphs.replays == 5
    assert torch.equal(*losses)
    assert same(states_in(plain), states_in(graphed))


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 32), torch.randn(1, 32), torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(2, 16, 32)],
    ids=["smaller", "one", "dtype", "dimensions"],
)
def test_an_input_unlike_the_sample_is_no_replay(graphs: StandIn, x: Tensor) -> None:
    model = model_with(CurrentScaling())
    plain = copy.deepcopy(model)
    octavo.make_graphed_callables(model, (sample(),))
    assert torch.equal(model(x), plain(x))
    assert graphs.replays == 0


def test_an_input_whose_gradient_the_graph_does_not_have_is_no_replay_and_is_said(graphs: StandIn) -> None:
    model = model_with(CurrentScaling())
    octavo.make_graphed_callables(model, (sample().detach(),))
    x = sample()
    with pytest.warns(UserWarning, match=r"Graph it with sample\.requires_grad_\(\)"):
        model(x).sum().backward()
    assert x.grad is not None
    model(x).sum().backward()  # said once
    assert graphs.replays == 0
    model(x.detach())
    assert graphs.replays == 1


def test_a_graph_finds_scales_where_they_were(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    octavo.make_graphed_callables(model, (sample(),))
    operands = [operand for layer in (model[0], model[2]) for operand in layer.delayed_state.operands]
    before = [(o.scale, o.gathered, o.history) for o in operands]
    values = [float(o.scale) for o in operands]
    train(model, None, 2, update=True)
    assert all(o.captured for o in operands)
    assert all(
        o.scale is s and o.gathered is g and o.history is h for o, (s, g, h) in zip(operands, before, strict=True)
    )
    assert all(float(o.scale) != value for o, value in zip(operands, values, strict=True))


def test_an_unknown_scale_is_measured_before_the_capture_and_no_amax_of_the_samples_stays(graphs: StandIn) -> None:
    model = model_with(MEASURED)
    x = sample()
    octavo.make_graphed_callables(model, (x,))
    for layer in (model[0], model[2]):
        for operand in layer.delayed_state.operands:
            assert not operand.from_data
            assert float(operand.scale) != 1.0
            assert float(operand.gathered) == 0.0
            assert operand.history.tolist() == [0.0] * 4
    assert float(model[0].delayed_state.input.scale) == float(x.detach().abs().max() / 448)


def test_no_gradient_of_a_parameter_is_left(graphs: StandIn) -> None:
    model = model_with(MEASURED)
    octavo.make_graphed_callables(model, (sample(),))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_samples_of_zeros_tell_no_scale(graphs: StandIn) -> None:
    model = model_with(MEASURED)
    with pytest.raises(ValueError, match="tell no scale"):
        octavo.make_graphed_callables(model, (torch.zeros(16, 32, requires_grad=True),))
    assert all(operand.from_data and not operand.captured for operand in model[0].delayed_state.operands)


def test_a_capture_that_fails_leaves_everything_as_it_was(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    train(model, None, 3, update=True)
    before, graphs.fails = states_in(model), True
    with pytest.raises(RuntimeError, match="no capture today"):
        octavo.make_graphed_callables(model, (sample(),))
    assert same(before, states_in(model))
    assert not any(operand.captured for operand in model[0].delayed_state.operands)
    assert type(model.forward).__name__ == "method"


class _Seen:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, operand: str, quantizer: Any) -> Any:
        self.calls += 1
        return quantizer


def test_where_the_layers_would_do_something_else_they_run_themselves(graphs: StandIn) -> None:
    model = model_with(CurrentScaling())
    octavo.make_graphed_callables(model, (sample(),))
    x = sample()
    model(x)
    assert graphs.replays == 1
    with torch.no_grad():
        model(x)
    with octavo.autocast(enabled=False):
        high = model(x)
    hidden = nn.functional.gelu(nn.functional.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(high, nn.functional.linear(hidden, model[2].weight, model[2].bias))
    with octavo.autocast(recipe=RowwiseScaling()):
        model(x)
    with octavo.autocast(recipe=CurrentScaling(), calibrating=True):
        model(x)
    with octavo.count_gemms() as count:
        model(x)
    assert count.fp8 == 2
    model[0].observer = seen = _Seen()
    model(x)
    assert seen.calls == 3
    model[0].observer = None
    model.eval()
    model(x)
    model.train()
    assert graphs.replays == 1
    with octavo.autocast(recipe=CurrentScaling()):
        model(x)
    assert graphs.replays == 2, "an equal recipe is the same"


def test_a_new_checkpoint_is_measured_by_the_layers_and_then_replayed(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    octavo.make_graphed_callables(model, (sample(),))
    plain = {name: tensor * 2 for name, tensor in model.state_dict().items() if name.endswith(("weight", "bias"))}
    model.load_state_dict(plain)
    assert model[0].delayed_state.weight.from_data
    train(model, None, 1, update=True)
    assert graphs.replays == 0
    train(model, None, 1, update=True)
    assert graphs.replays == 1


def test_an_update_between_forward_and_backward_changes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by themselves, captured layers take a copy of the scale, since the context's exit overwrites it.

    A GPU's casts give out the scale that they were given; the reference, which copies it, is made to do so too.
    """
    real = quantizer.cast_transpose

    def as_on_a_gpu(x: Tensor, format: Any, rowwise: Tensor | None, columnwise: Tensor | None, **options: Any) -> Any:
        out = real(x, format, rowwise, columnwise, **options)
        return out._replace(scale=rowwise, scale_t=columnwise)

    monkeypatch.setattr(quantizer, "cast_transpose", as_on_a_gpu)
    results = []
    for captured in (False, True):
        torch.manual_seed(3)
        layer, x = octavo.Linear(32, 32), sample()
        for _ in range(2):
            with octavo.autocast(recipe=DELAYED):
                layer(x)
        for operand in layer.delayed_state.operands:
            operand.captured = captured
        with octavo.autocast(recipe=DELAYED):
            y = layer(x * 7)
        results.append(torch.autograd.grad(y.square().sum(), [x, layer.weight]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_replayed_copy_takes_part_from_its_first_forward_on(graphs: StandIn) -> None:
    """With several ranks, the amaxes of a copy are agreed on once it trains."""
    model = copy.deepcopy(model_with(DELAYED))
    octavo.make_graphed_callables(model, (sample(),))
    assert not model[0].delayed_state.takes_part
    model(sample())
    assert graphs.replays == 1
    assert model[0].delayed_state.takes_part


def test_micro_batches_are_no_forgotten_updates(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    octavo.make_graphed_callables(model, (sample(),))
    for _ in range(6):  # a warning would be an error
        model(sample())
    assert graphs.replays == 6


def test_a_forgotten_update_is_noticed(graphs: StandIn) -> None:
    parts = model_with(DELAYED), model_with(DELAYED)
    octavo.make_graphed_callables(parts, ((sample(),), (sample(),)))
    with pytest.warns(UserWarning, match="Sequential: an optimizer stepped 2 times") as seen:
        train(nn.Sequential(*parts), None, 6, update=False)
    assert graphs.replays == 12
    assert len(seen) == 1, "the first to notice speaks for all"


def test_a_copy_has_no_graph(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    octavo.make_graphed_callables(model, (sample(),))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model[0].weight.zero_()
    x = sample()
    y = twin(x)
    assert graphs.replays == 0
    assert y.detach().abs().max() > 0.01, "the copy runs on its own weights"
    assert not twin[0].delayed_state.input.captured


def test_a_recompute_of_a_replay_is_refused(graphs: StandIn) -> None:
    model = model_with(DELAYED)
    octavo.make_graphed_callables(model, (sample(),))
    y = octavo.checkpoint(model, sample())
    with pytest.raises(RuntimeError, match="Put the checkpoint inside"):
        y.sum().backward()


def test_only_cuda_is_captured() -> None:
    with pytest.raises(ValueError, match="sample argument 0 lies on cpu: CUDA graphs need a CUDA device"):
        octavo.make_graphed_callables(model_with(DELAYED), (sample(),))


def test_what_could_not_be_captured_is_refused(graphs: StandIn) -> None:
    model, x = model_with(DELAYED), sample()
    with octavo.count_gemms(), pytest.raises(RuntimeError, match="replays run no Python to count"):
        octavo.make_graphed_callables(model, (x,))
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients are off"):
        octavo.make_graphed_callables(model, (x,))
    with octavo.autocast(enabled=False), pytest.raises(ValueError, match="FP8 is switched off here"):
        octavo.make_graphed_callables(model, (x,))
    with pytest.raises(ValueError, match="no recipe is in force for the 2 FP8 layers of Sequential"):
        octavo.make_graphed_callables(model_with(None), (x,))
    with pytest.raises(ValueError, match="1 modules and 2 tuples"):
        octavo.make_graphed_callables((model,), ((x,), (x,)))
    with pytest.raises(ValueError, match="is no module"):
        octavo.make_graphed_callables(torch.sin, (x,))
    with pytest.raises(ValueError, match="sample argument 0 is 3"):
        octavo.make_graphed_callables(model, (3,))
    model[2].observer = _Seen()
    with pytest.raises(ValueError, match="Linear has an observer"):
        octavo.make_graphed_callables(model, (x,))


def test_a_scale_measured_in_a_capture_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = octavo.Linear(32, 32, recipe=MEASURED)
    monkeypatch.setattr(operand_state, "is_captured", lambda x: True)
    with pytest.warns(UserWarning, match="every replay will measure it anew"):
        layer(sample())
    assert layer.delayed_state.input.captured


def test_an_update_in_a_capture_looks_at_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen layer's gradient is never cast: its scale stays unknown, and the host asks nothing of the device."""
    layer = octavo.Linear(32, 32, recipe=MEASURED)
    layer(torch.randn(16, 32))
    octavo.update_scales(layer)
    assert layer.delayed_state.grad_output.from_data
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    layer(torch.randn(16, 32) * 9)
    scale = layer.delayed_state.input.scale
    monkeypatch.setattr(Tensor, "tolist", lambda *args: pytest.fail("the host waits for the device"))
    octavo.update_scales(layer)
    assert layer.delayed_state.input.scale is scale
    assert layer.delayed_state.grad_output.from_data


def test_a_replay_follows_a_weight_whose_scale_is_predicted_and_ends_with_the_prediction(graphs: StandIn) -> None:
    model = model_with(CurrentScaling())
    predicted = octavo.predict_weight_scales(model, torch.optim.AdamW(model.parameters()))
    octavo.make_graphed_callables(model, (sample(),))
    bound = model[0].delayed_state.weight_bound
    with torch.no_grad():
        model[0].weight[0, 0] = 7.0
    model(sample())
    assert (graphs.replays, bound.amax.item()) == (1, 7.0)
    predicted.remove()
    model(sample())
    assert graphs.replays == 1


def test_a_layer_moved_by_a_guard_is_no_replay_and_a_watched_step_is_none(graphs: StandIn) -> None:
    model = model_with(CurrentScaling())
    octavo.make_graphed_callables(model, (sample(),))
    guard = octavo.PrecisionGuard(model, every=2)
    for replays in (1, 1, 2, 2):
        model(sample())
        assert graphs.replays == replays
        guard.step()
    guard.load_state_dict({"steps": 0, "moved": {"2": "by hand"}, "outside": {}})
    with octavo.count_gemms() as counted:
        model(sample())
    assert graphs.replays == 2
    assert counted.fp8 == 1
    guard.release()
    model(sample())
    assert graphs.replays == 3
    guard.remove()


@pytest.mark.gpu
def test_nothing_waits_for_the_device_while_weight_scales_are_predicted_and_replays_equal_the_layers() -> None:
    plain = model_with(CurrentScaling(), "cuda")
    graphed = copy.deepcopy(plain)
    losses = []
    batches = torch.randn(12, 16, 32, device="cuda")
    for model in (plain, graphed):
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        octavo.predict_weight_scales(model, optimizer, every=4)
        if model is graphed:
            octavo.make_graphed_callables(model, (sample("cuda"),))
        losses.append([])
        for step, x in enumerate(batches.clone()):
            torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
            loss = (model(x.requires_grad_()) - x.detach()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.detach())
        torch.cuda.set_sync_debug_mode("default")
        for layer in (model[0], model[2]):
            assert layer.weight.detach().abs().max() <= layer.delayed_state.weight_bound.amax
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [DELAYED, MEASURED, CurrentScaling(), RowwiseScaling()], ids=str)
@pytest.mark.parametrize("update", [False, True], ids=["autocast", "update_scales"])
def test_graphs_equal_the_layers_in_every_bit(recipe: Recipe, update: bool) -> None:
    plain = model_with(recipe if update else None, "cuda")
    graphed = copy.deepcopy(plain)
    own = None if update else recipe
    for model in (plain, graphed):
        train(model, own, 3, update, "cuda")
    with octavo.autocast(recipe=own) if own else warnings.catch_warnings():
        octavo.make_graphed_callables(graphed, (sample("cuda"),))
    assert same(states_in(plain), states_in(graphed))
    losses = [train(model, own, 10, update, "cuda") for model in (plain, graphed)]
    assert torch.equal(*losses)
    assert same(states_in(plain), states_in(graphed))
    for a, b in zip(plain.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("update", [False, True], ids=["autocast", "update_scales"])
def test_a_whole_step_is_captured_and_its_scales_advance(update: bool) -> None:
    plain = model_with(MEASURED if update else None, "cuda")
    own = None if update else MEASURED
    twin = copy.deepcopy(plain)
    data = torch.randn(12, 16, 32, device="cuda") * torch.arange(1, 13, device="cuda")[:, None, None]
    x = torch.zeros(16, 32, device="cuda")

    def step(model: nn.Module) -> None:
        with octavo.autocast(recipe=own) if own else warnings.catch_warnings():
            y = model(x)
        gradients = torch.autograd.grad((y - x).square().mean(), list(model.parameters()))
        if update:
            octavo.update_scales(model)
        with torch.no_grad():
            torch._foreach_add_(list(model.parameters()), gradients, alpha=-0.01)

    graph = torch.cuda.CUDAGraph()
    for number, batch in enumerate(data):
        x.copy_(batch)
        step(plain)
        if number < 3:
            step(twin)
            continue
        if number == 3:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step(twin)
        graph.replay()
        assert same(states_in(plain), states_in(twin)), number
    for a, b in zip(plain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
