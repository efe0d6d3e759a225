"""PrecisionGuard: the layer that does not bear FP8 any more moves, no other does, and the training goes on."""

from __future__ import annotations

import gc
import math
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import octavo
from octavo.inspection import PrecisionBounds
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

WIDTH = 64


class Gains(nn.Module):
    """One channel of what goes through is made larger."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Gains(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 16))


class Run:
    """A channel of the second layer's input grows and its weights shrink: the model stays, the codes cannot follow."""

    def __init__(self, recipe: Recipe, compiles: bool = False, **options: Any) -> None:
        self.model = network()
        octavo.convert(self.model, recipe)
        self.counter = CompileCounterWithBackend("aot_eager")
        self.run = torch.compile(self.model, backend=self.counter, fullgraph=True) if compiles else self.model
        self.column = self.model[3].weight[:, 5].detach().clone()
        self.guard = octavo.PrecisionGuard(self.model, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 2e-3)
        self.losses: list[float] = []

    def step(self, outlier: float = 1.0) -> list[str]:
        torch.manual_seed(len(self.losses) % 4)
        x = torch.randn(64, WIDTH)
        gain, weight = self.model[2].gain, self.model[3].weight
        with torch.no_grad():
            weight[:, 5] = self.column / outlier
            gain[5] = outlier
        loss = (self.run(x) - x[:, :16]).square().mean()
        loss.backward()
        octavo.update_scales(self.model)
        weight.grad[:, 5] = 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return self.guard.step()


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=8), CurrentScaling()])
def test_the_layer_with_a_growing_outlier_moves_and_it_alone(recipe: Recipe, compiles: bool) -> None:
    torch._dynamo.reset()
    run = Run(recipe, compiles, every=5)
    moved_at = None
    for step in range(80):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            moving = run.step(1.15**step)
        if moving:
            assert moving == ["3"]
            assert moved_at is None
            moved_at = step + 1
            [message] = [str(one.message) for one in caught]
            # Layer, step, operand, statistic, value, bound, remedy.
            assert re.search(
                rf"PrecisionGuard: 3 runs in high precision from step {moved_at + 1} on: input: rest \(SQNR beside"
                r" its outliers\) -?\d+\.\d dB, below 10\. To keep it in FP8 all the same give"
                r" wider bounds=octavo\.inspection\.PrecisionBounds\(rest_sqnr_db=\.\.\.\); finer scales do not help"
                r" against outlier channels; guard\.release\('3'\) brings it back",
                message,
            ), message
            assert caught[0].filename == __file__
        else:
            assert not caught
    assert moved_at is not None
    assert moved_at % 5 == 0
    assert moved_at > 5, "it bore FP8 at first"
    assert list(run.guard.moved) == ["3"]
    with octavo.count_gemms() as counted:
        run.model(torch.randn(4, WIDTH)).sum().backward()
    assert {layer for layer, _, precision in counted.entries if precision.startswith("fp8")} == {"0", "4"}
    assert all(torch.tensor(run.losses).isfinite())
    assert run.losses[-1] < 0.8 * run.losses[moved_at - 6]
    if compiles:
        # Scales that are not known, those that are, and the layer moved.
        assert run.counter.frame_count <= 4


@pytest.mark.parametrize(
    ("bounds", "remedy"),
    [
        (
            PrecisionBounds(sqnr_db=100.0, rest_sqnr_db=-math.inf),
            r"To keep it in FP8 give wider bounds=octavo\.inspection\.PrecisionBounds\(\.\.\.\), or finer scales by an"
            r" override of the recipe \(RowwiseScaling, BlockScaling\); guard",
        ),
        (
            PrecisionBounds(sqnr_db=100.0, rest_sqnr_db=100.0),
            r"all the same give wider bounds=octavo\.inspection\.PrecisionBounds\(\.\.\.\); finer scales do not help",
        ),
    ],
    ids=["no outlier", "more than outliers"],
)
def test_finer_scales_are_advised_where_they_can_help(bounds: PrecisionBounds, remedy: str) -> None:
    run = Run(CurrentScaling(), every=1, bounds=bounds)
    with pytest.warns(UserWarning, match=remedy) as told:
        assert run.step() == ["0", "3", "4"]
    assert len(told) == 3


def test_a_run_that_bears_fp8_is_left_alone_to_the_bit() -> None:
    guarded, plain = Run(DelayedScaling(), every=3), Run(DelayedScaling(), every=10**6)
    for _ in range(12):
        assert guarded.step() == plain.step() == []
    assert guarded.losses == plain.losses
    assert guarded.guard.figures
    assert not plain.guard.figures


@pytest.mark.parametrize("where", ["own", "context"])
def test_moved_layers_stay_under_every_recipe_and_context(where: str) -> None:
    run = Run(CurrentScaling(), every=1, bounds=PrecisionBounds(rest_sqnr_db=10.0))
    with pytest.warns(UserWarning, match="PrecisionGuard: 3 runs in high precision"):
        run.step(1e4)
    x = torch.randn(4, WIDTH)
    exact = nn.functional.linear(x, run.model[3].weight, run.model[3].bias)
    for recipe in (CurrentScaling(), DelayedScaling(), RowwiseScaling(), BlockScaling()):
        if where == "own":
            octavo.set_recipe(run.model, recipe)
            assert torch.equal(run.model[3](x), exact)
        else:
            with octavo.autocast(recipe=recipe):
                assert torch.equal(run.model[3](x), exact)
                assert not torch.equal(run.model[0](x), nn.functional.linear(x, run.model[0].weight))
    run.guard.release("3")
    assert not torch.equal(run.model[3](x), exact)
    assert run.guard.moved == {}


def test_converting_again_brings_a_layer_back() -> None:
    run = Run(CurrentScaling(), every=1)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        run.step(1e4)
    run.guard.remove()
    octavo.convert(run.model, CurrentScaling())
    with octavo.count_gemms() as counted:
        run.model(torch.randn(4, WIDTH))
    assert counted.fp8 == 3


@pytest.mark.parametrize("back_first", [False, True])
def test_a_layer_converted_again_is_guarded_again(back_first: bool) -> None:
    run = Run(CurrentScaling(), every=2)
    run.step(1e4)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        assert run.step(1e4) == ["3"]
    if back_first:
        octavo.unconvert(run.model)
    octavo.convert(run.model, CurrentScaling())
    assert run.guard.state_dict()["moved"] == {}
    assert run.step() == []
    assert run.guard.moved == {}
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        assert run.step(1e4) == ["3"]
    with octavo.count_gemms() as counted:
        run.model(torch.randn(4, WIDTH))
    assert counted.fp8 == 2


def test_a_step_takes_a_layer_that_was_converted_again_out_of_those_moved() -> None:
    run = Run(CurrentScaling(), every=1)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        run.step(1e4)
    octavo.convert(run.model, CurrentScaling())
    assert run.step() == []
    assert run.guard.moved == {}


def test_two_guards_of_one_model_move_a_layer_once() -> None:
    run = Run(CurrentScaling(), every=1)
    other = octavo.PrecisionGuard(run.model, every=1)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        assert run.step(1e4) == ["3"]
    assert other.step() == []
    assert other.moved == {}


def test_a_layer_converted_back_within_its_watched_step_does_not_move() -> None:
    run = Run(CurrentScaling(), every=1)
    run.model[2].gain[5] = 1e4
    run.model(torch.randn(64, WIDTH))
    octavo.unconvert(run.model)
    assert run.guard.step() == []


@pytest.mark.parametrize("context", [False, True])
def test_a_layer_is_released_after_the_guard_has_ended(context: bool) -> None:
    run = Run(DelayedScaling(), every=1)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        run.step(1e4)
    if context:
        with run.guard:
            pass
    else:
        run.guard.remove()
    run.guard.remove()
    assert list(run.guard.state_dict()["moved"]) == ["3"], "it stays until it is released"
    with pytest.raises(ValueError, match="'0' was not moved; moved are: '3'"):
        run.guard.release("3", "0")
    assert list(run.guard.moved) == ["3"]
    run.guard.release("3", "3")
    assert run.guard.moved == {}
    assert run.step() == []
    assert run.model[3].observer is None
    with octavo.count_gemms() as counted:
        run.model(torch.randn(4, WIDTH))
    assert counted.fp8 == 3


@pytest.mark.parametrize("ended", [False, True])
def test_what_was_converted_back_is_released_as_it_is(ended: bool) -> None:
    run = Run(CurrentScaling(), every=1)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        run.step(1e4)
    if ended:
        run.guard.remove()
    octavo.unconvert(run.model)
    run.guard.release()
    assert run.guard.moved == {}
    assert type(run.model[3]) is nn.Linear


def test_a_state_is_no_use_to_a_model_converted_back() -> None:
    run = Run(CurrentScaling(), every=1)
    octavo.unconvert(run.model)
    with pytest.raises(ValueError, match="the state moves '3', which is no FP8 layer"):
        run.guard.load_state_dict({"steps": 1, "moved": {"3": "why"}, "outside": {}})


def test_patience_waits_for_watched_steps_in_a_row() -> None:
    run = Run(CurrentScaling(), every=1, patience=3)
    assert [run.step(size) for size in (1e4, 1e4, 1.0, 1e4, 1e4)] == [[]] * 5
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        assert run.step(1e4) == ["3"]


def test_only_the_steps_whose_turn_it_is_are_watched() -> None:
    run = Run(CurrentScaling(), every=4)
    seen = []
    for _ in range(9):
        before = run.guard.figures
        seen.append([layer.observer is not None for layer in (run.model[0], run.model[3])])
        run.step()
        assert before is run.guard.figures or len(seen) % 4 == 3
    assert [all(one) for one in seen] == [False, False, False, True, False, False, False, True, False]
    assert {name for name, _ in run.guard.figures} == {"0", "3", "4"}


def test_an_overflow_of_the_loss_scaler_moves_nothing() -> None:
    run = Run(CurrentScaling(), every=1)
    y = run.model(torch.randn(4, WIDTH))
    (y.sum() * float("inf")).backward()
    assert run.guard.step() == []


def test_watch_inside_and_a_layer_converted_back() -> None:
    run = Run(CurrentScaling(), every=1)
    with octavo.inspection.watch(run.model) as seen:
        run.model(torch.randn(4, WIDTH)).sum().backward()
    assert len(seen.statistics) == 9
    assert len(run.guard.figures) == 9
    octavo.unconvert(run.model)
    run.guard.step()
    run.guard.remove()
    assert type(run.model[0]) is nn.Linear


def test_the_state_resumes() -> None:
    run = Run(CurrentScaling(), every=2)
    run.step(1e4)
    with pytest.warns(UserWarning, match="PrecisionGuard: 3"):
        run.step(1e4)
    saved = run.guard.state_dict()
    resumed = Run(CurrentScaling(), every=2)
    resumed.guard.load_state_dict(saved)
    assert resumed.guard.moved == run.guard.moved
    assert resumed.guard.state_dict() == saved
    with octavo.count_gemms() as counted:
        resumed.model(torch.randn(4, WIDTH))
    assert counted.fp8 == 2
    with pytest.raises(ValueError, match="the state moves '9', which is no FP8 layer"):
        resumed.guard.load_state_dict({**saved, "moved": {"9": "why"}})


def test_experts_of_one_layer_move_together() -> None:
    model: Any = nn.Sequential(octavo.GroupedLinear(2, WIDTH, 16))
    octavo.convert(model, CurrentScaling())
    guard = octavo.PrecisionGuard(model, every=1)
    x = torch.randn(32, WIDTH)
    x[:16, 3] = 1e7
    model[0](x, [16, 16]).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert guard.step() == ["0.expert0", "0.expert1"]
    assert "underflow" in str(caught[0].message)
    assert "0.expert1 runs in high precision from step 2 on: it goes with an expert" in str(caught[1].message)
    guard.remove()


def test_fused_models_of_transformers_go_on() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    octavo.convert(model, DelayedScaling(), filter="all")
    guard = octavo.PrecisionGuard(model, every=2, bounds=PrecisionBounds(rest_sqnr_db=-1000.0, sqnr_db=-1000.0))
    ids = torch.randint(0, 96, (2, 16))
    name = "model.layers.0.self_attn.q_proj"
    for step in range(5):
        if step == 2:
            guard.load_state_dict({"steps": 2, "moved": {name: "by hand"}, "outside": {}})
        with octavo.count_gemms() as counted:
            model(ids, labels=ids).loss.backward()
        octavo.update_scales(model)
        guard.step()
    assert not any(layer == name for layer, _, precision in counted.entries if "fp8" in precision)
    assert any(layer.endswith("0.self_attn.k_proj") for layer, _, precision in counted.entries if "fp8" in precision)


def test_a_step_in_which_nothing_was_seen_is_told_once() -> None:
    run = Run(CurrentScaling(), every=1)
    with pytest.warns(UserWarning, match=r"no FP8 layer has cast anything.*CUDA graph captured by hand"):
        run.guard.step()
    run.guard.step()


def test_compiled_functions_run_compiled_again_after_a_watched_step_and_after_the_context() -> None:
    torch._dynamo.reset()
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: calls.append(1) or graph(*arguments)

    function = torch.compile(lambda x: x + 1, backend=backend)
    model = network()
    octavo.convert(model)
    with octavo.PrecisionGuard(model, every=2) as guard:
        for _ in range(3):
            function(torch.ones(2))
            model(torch.randn(2, WIDTH))
            guard.step()
        assert len(calls) == 2
    function(torch.ones(2))
    assert len(calls) == 3


@pytest.mark.parametrize("first_out", [0, 1])
@pytest.mark.parametrize("shared", [False, True], ids=["two models", "one model"])
def test_two_guards_of_the_same_steps_leave_nothing_behind_in_any_order(shared: bool, first_out: int) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    function = torch.compile(lambda x: x + 1, backend=counter)
    models = [network()] * 2 if shared else [network(), network()]
    for model in models[: 1 if shared else 2]:
        octavo.convert(model, CurrentScaling())
    guards = [octavo.PrecisionGuard(model, every=1) for model in models]
    for _ in range(2):
        for model in models:
            model(torch.randn(4, WIDTH))
        for guard in (guards[first_out], guards[1 - first_out]):
            assert guard.step() == []
            assert {name for name, _ in guard.figures} == set()
    for model in models:
        model(torch.randn(4, WIDTH))
    assert [len(guard.figures) for guard in guards] == [6, 6]
    guards[first_out].remove()
    function(torch.ones(2))
    assert counter.frame_count == 0, "the other one still watches"
    seen = guards[first_out].figures.copy()
    for model in models:
        model(torch.randn(4, WIDTH) * 100)
    assert guards[first_out].figures == seen, "it records no more, in plans that were made before either"
    guards[1 - first_out].remove()
    function(torch.ones(2))
    assert counter.frame_count == 1
    assert all(layer.observer is None for model in models for layer in (model[0], model[3], model[4]))


def test_a_guard_and_watch_come_and_go_in_any_order() -> None:
    run = Run(CurrentScaling(), every=1)
    x = torch.randn(4, WIDTH)

    def mine(operand: Any, quantizer: Any) -> Any:
        return quantizer

    run.guard.remove()
    run.model[0].observer = mine
    guard = octavo.PrecisionGuard(run.model, every=1)
    with octavo.inspection.watch(run.model) as seen:
        run.model(x)
        guard.remove()
        seen.statistics.clear()
        run.model(x)
        assert len(seen.statistics) == 6
    assert run.model[0].observer is mine
    assert run.model[3].observer is None


def test_a_guard_that_is_gone_for_good_does_not_hold_the_stance() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    function = torch.compile(lambda x: x + 1, backend=counter)
    model = network()
    octavo.convert(model)
    gone = octavo.PrecisionGuard(model, every=1)
    del gone, model
    gc.collect()
    run = Run(CurrentScaling(), every=1)
    run.guard.remove()
    function(torch.ones(2))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0"),
        ({"patience": 1.5}, "patience is 1.5"),
        ({"bounds": 3}, "bounds is 3: expected an octavo.inspection.PrecisionBounds"),
    ],
)
def test_bad_options_are_refused(options: Any, message: str) -> None:
    model = network()
    octavo.convert(model)
    with pytest.raises(ValueError, match=message):
        octavo.PrecisionGuard(model, **options)


def test_what_cannot_be_guarded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no FP8 layer to guard: octavo.convert"):
        octavo.PrecisionGuard(network())
    with pytest.raises(TypeError, match=r"octavo.PrecisionGuard: model is a list"):
        octavo.PrecisionGuard([network()])  # type: ignore[arg-type]
    run = Run(CurrentScaling(), every=1)
    with pytest.raises(ValueError, match="'0' was not moved: no layer was"):
        run.guard.release("0")
    run.guard.remove()


@pytest.fixture(autouse=True)
def no_stance_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    made, build = [], octavo.PrecisionGuard.__init__

    def built(guard: Any, *args: Any, **options: Any) -> None:
        build(guard, *args, **options)
        made.append(weakref.ref(guard))

    monkeypatch.setattr(octavo.PrecisionGuard, "__init__", built)
    yield
    for guard in made:
        if guard() is not None:
            guard().remove()


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()])
def test_a_model_that_was_guarded_goes_without_a_garbage_collection(recipe: Recipe) -> None:
    """Its layers would go on being agreed on across ranks until then."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    octavo.convert(model, recipe, filter="all")
    gc.disable()
    try:
        with octavo.PrecisionGuard(model, every=1, bounds=PrecisionBounds(sqnr_db=100.0)) as guard:
            model(torch.randn(8, 32)).square().sum().backward()
            with pytest.warns(UserWarning, match="runs in high precision"):
                guard.step()
        assert list(guard.moved) == ["0", "1"]
        state = weakref.ref(model[0].delayed_state)
        del model, guard
        assert state() is None
    finally:
        gc.enable()
