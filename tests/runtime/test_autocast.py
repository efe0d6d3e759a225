"""`octavo.autocast`: where FP8 is on, with which recipe, and what leaves the state alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime.autocast import current_frame

DELAYED = DelayedScaling(amax_history_len=4)


def high(layer: octavo.Linear, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight, layer.bias)


class Probe:
    """A layer and an input, whose output tells the recipe that it ran with."""

    def __init__(self, own: Recipe | None = None) -> None:
        self.layer, self.x = octavo.Linear(32, 16), torch.randn(8, 32)
        self.outputs = {"off": high(self.layer, self.x).detach()}
        for name, recipe in (("current", CurrentScaling()), ("row", RowwiseScaling())):
            with octavo.autocast(recipe=recipe):
                self.outputs[name] = self.layer(self.x).detach()
        self.layer.recipe = own

    def __call__(self) -> str:
        y = self.layer(self.x)
        return next(name for name, output in self.outputs.items() if torch.equal(y, output))


def snapshot(layer: octavo.Linear) -> list[float]:
    state = layer.delayed_state
    return [v for o in state.operands for v in (o.scale.item(), o.gathered.item(), *o.history.tolist())]


def test_contexts_nest_and_the_innermost_decides() -> None:
    runs_with = Probe()
    assert runs_with() == "off"
    with octavo.autocast(recipe=RowwiseScaling()):
        assert runs_with() == "row"
        with octavo.autocast():
            assert runs_with() == "current", "the default where nothing is said"
            with octavo.autocast(enabled=False):
                assert runs_with() == "off"
                with octavo.autocast(recipe=RowwiseScaling()):
                    assert runs_with() == "row"
                assert runs_with() == "off"
            assert runs_with() == "current"
        assert runs_with() == "row"
    assert runs_with() == "off"


def test_a_layers_own_recipe_is_on_without_a_context_and_yields_to_one() -> None:
    runs_with = Probe(RowwiseScaling())
    assert runs_with() == "row"
    with octavo.autocast():
        assert runs_with() == "row", "no recipe: converted layers keep theirs"
    with octavo.autocast(recipe=CurrentScaling()):
        assert runs_with() == "current"
    with octavo.autocast(enabled=False):
        assert runs_with() == "off"


def test_one_context_object_can_be_entered_again_and_within_itself() -> None:
    runs_with = Probe()
    context = octavo.autocast(recipe=CurrentScaling())
    for _ in range(2):
        with context:
            with context:
                assert runs_with() == "current"
            assert runs_with() == "current"
        assert runs_with() == "off"


def test_only_the_outermost_enabled_exit_ends_the_step() -> None:
    layer = octavo.Linear(16, 16)
    with octavo.autocast(enabled=False), octavo.autocast(recipe=DELAYED):
        with octavo.autocast(recipe=DELAYED):
            layer(torch.full((4, 16), 3.0))
        assert layer.delayed_state.input.gathered.item() == 3.0
        layer(torch.full((4, 16), 2.0))
    assert layer.delayed_state.input.history.tolist() == [0, 0, 0, 3.0]


def test_off_inside_an_enabled_context_gathers_nothing() -> None:
    layer = octavo.Linear(16, 16)
    with octavo.autocast(recipe=DELAYED):
        layer(torch.full((4, 16), 3.0))
        with octavo.autocast(enabled=False):
            layer(torch.full((4, 16), 50.0))
    assert layer.delayed_state.input.history.tolist() == [0, 0, 0, 3.0]


def evaluated(layer: octavo.Linear, how: str) -> None:
    x = torch.full((4, 16), 99.0)
    if how == "context inside no_grad":
        with torch.no_grad(), octavo.autocast(recipe=DELAYED):
            layer(x)
    elif how == "no_grad inside the context":
        with octavo.autocast(recipe=DELAYED), torch.no_grad():
            layer(x)
    elif how == "inference_mode":
        with torch.inference_mode(), octavo.autocast(recipe=DELAYED):
            layer(x)
    elif how == "own recipe":
        layer.recipe = DELAYED
        with torch.no_grad():
            layer(x)
        layer.recipe = None
    elif how == "octavo.checkpoint":
        with octavo.autocast(recipe=DELAYED), torch.no_grad():
            octavo.checkpoint(layer, x)
            # torch itself warns where no input needs a gradient.
            octavo.checkpoint(layer, x.requires_grad_(), use_reentrant=True)
    elif how == "compiled":
        with octavo.autocast(recipe=DELAYED), torch.no_grad():
            torch.compile(layer, backend="eager", fullgraph=True)(x)


@pytest.mark.parametrize(
    "how",
    [
        "context inside no_grad",
        "no_grad inside the context",
        "inference_mode",
        "own recipe",
        "octavo.checkpoint",
        "compiled",
    ],
)
def test_evaluation_changes_nothing(how: str) -> None:
    layer = octavo.Linear(16, 16)
    for _ in range(2):
        with octavo.autocast(recipe=DELAYED):
            y = layer(torch.randn(4, 16))
        y.sum().backward()
    before = snapshot(layer)
    evaluated(layer, how)
    assert snapshot(layer) == before, "not even the gradient's amax that waits for the next step"


def test_an_exception_updates_nothing() -> None:
    layer = octavo.Linear(16, 16)
    with octavo.autocast(recipe=DELAYED):
        layer(torch.randn(4, 16))
    before = layer.state_dict()

    def failing() -> None:
        with octavo.autocast(recipe=DELAYED):
            layer(torch.randn(4, 16))
            raise KeyError("of the user")

    with pytest.raises(KeyError):
        failing()
    after = layer.state_dict()
    for key in before:
        if key.endswith("history"):
            assert torch.equal(after[key][1:], before[key][1:]), key
        else:
            assert torch.equal(after[key], before[key]), key
    x = torch.randn(8, 16)
    assert torch.equal(layer(x), high(layer, x)), "and the context is left"


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_calibrating_gathers_in_any_mode(enabled: bool, grad: bool) -> None:
    layer = octavo.Linear(16, 16)
    x = torch.full((4, 16), 7.0)
    with torch.set_grad_enabled(grad), octavo.autocast(enabled=enabled, recipe=DELAYED, calibrating=True):
        y = layer(x)
    assert torch.equal(y, high(layer, x)) is not enabled
    state = layer.delayed_state
    assert state.input.history.tolist() == [0, 0, 0, 7.0]
    assert state.weight.history[-1] == layer.weight.abs().max()
    assert state.input.scale == torch.tensor(7.0) / torch.tensor(448.0)
    assert state.grad_output.history.tolist() == [0, 0, 0, 0]


def test_what_inference_mode_calibrated_can_train() -> None:
    layer = octavo.Linear(16, 16)
    with torch.inference_mode(), octavo.autocast(recipe=DELAYED, calibrating=True):
        layer(torch.full((4, 16), 7.0))
    assert not layer.delayed_state.input.scale.is_inference()
    with octavo.autocast(recipe=DELAYED):
        y = layer(torch.randn(4, 16))
    y.sum().backward()
    assert bool(layer.weight.grad.isfinite().all())


def test_calibrating_an_fp8_weight() -> None:
    with octavo.quantized_init():
        layer = octavo.Linear(16, 16)
    with torch.no_grad(), octavo.autocast(enabled=False, recipe=DELAYED, calibrating=True):
        layer(torch.full((4, 16), 7.0))
    assert layer.delayed_state.weight.history[-1] == layer.weight.dequantize().abs().max()


RECIPES: list[Recipe | None] = [
    DelayedScaling(amax_history_len=8),
    DelayedScaling(amax_history_len=3),
    CurrentScaling(),
    None,
    DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    RowwiseScaling(),
    DelayedScaling(amax_history_len=5),
]


def test_case_17_the_recipe_changes_mid_run() -> None:
    """Case 17: length 8 → 3, delayed → current, off and on, → rowwise → delayed: no error, the newest history kept."""
    layer = octavo.Linear(16, 16)
    sizes, delayed = iter(range(1, 100)), []
    for recipe in RECIPES:
        for _ in range(3):
            x = torch.full((4, 16), float(next(sizes)))
            with octavo.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x, cached_weight="refresh")
                again = layer(x, cached_weight="reuse")
                uncached = layer(x)
            assert torch.equal(y, again)
            assert torch.equal(y, uncached)
            y.sum().backward()
            if recipe is not None and recipe.delayed is not None:
                delayed.append(x[0, 0].item())
                length = recipe.delayed.amax_history_len
                kept = layer.delayed_state.input.history.tolist()
                # Shrunk once to 3, two of the past survive any growth after that.
                known = delayed[-(length - 1) :] if recipe is RECIPES[0] else kept[1:][-2:]
                assert kept[-len(known) :] == known
                assert kept[-1] == delayed[-1]
                assert len(kept) == length
    assert layer.delayed_state.input.history.tolist() == [0.0, *delayed[-4:]]


def test_another_format_keeps_providing_for_the_same_amax() -> None:
    """E5M2 → E4M3 in the forward: without a new scale, codes up to 57344 would be clipped at 448 for a step."""
    layer = octavo.Linear(16, 16)
    x = torch.randn(64, 16)
    for _ in range(2):
        with octavo.autocast(recipe=DelayedScaling(format=octavo.E5M2)):
            y = layer(x)
        y.sum().backward()
    with octavo.autocast(recipe=DelayedScaling(format=octavo.E4M3)):
        y = layer(x)
        assert layer.delayed_state.input.scale.item() == pytest.approx(x.abs().max().item() / 448)
    error = (y - high(layer, x)).norm() / high(layer, x).norm()
    assert error < 0.05
    y.sum().backward()


def test_a_recipe_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"recipe is 'delayed': expected one of octavo\.recipes"):
        octavo.autocast(recipe="delayed")
    with pytest.raises(ValueError, match=r"expected one of octavo\.recipes"):
        octavo.Linear(4, 4, recipe=DelayedScaling)


def test_a_context_is_of_its_thread() -> None:
    runs_with, seen = Probe(), []
    with octavo.autocast(recipe=CurrentScaling()):
        thread = threading.Thread(target=lambda: seen.append(runs_with()))
        thread.start()
        thread.join()
        assert runs_with() == "current"
    assert seen == ["off"]


@pytest.mark.parametrize("arguments", [(DelayedScaling(),), (True, None, None, DelayedScaling())])
def test_a_recipe_in_the_place_of_a_flag_raises(arguments: tuple[object, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"is DelayedScaling\(.*it must be True or False; a recipe is given as recipe="
    ):
        octavo.autocast(*arguments)


ROW = RowwiseScaling()


@torch._dynamo.disable
def not_compiled(y: Tensor) -> Tensor:
    return y


def broken_by_a_condition(layer: nn.Module, x: Tensor) -> Tensor:
    with octavo.autocast(recipe=ROW):
        loss = layer(x).sum()
        if loss > 0:
            loss = loss * 2
    return loss


def broken_by_a_number(layer: nn.Module, x: Tensor) -> Tensor:
    with octavo.autocast(recipe=ROW):
        loss = layer(x).sum()
        loss.item()
        return loss + layer(x).sum()


def broken_between_contexts(layer: nn.Module, x: Tensor) -> Tensor:
    with octavo.autocast(recipe=ROW):
        y = layer(x)
        with octavo.autocast(enabled=False):
            z = not_compiled(layer(x))
            z = z + layer(x)
        return y + not_compiled(z) + layer(x)


BROKEN = [broken_by_a_condition, broken_by_a_number, broken_between_contexts]


@pytest.mark.filterwarnings("ignore:octavo.autocast")
@pytest.mark.parametrize("kind", [octavo.Linear, nn.Linear])
@pytest.mark.parametrize("step", BROKEN, ids=lambda step: step.__name__)
def test_compiled_code_that_breaks_off_inside_of_a_context_goes_on_in_it(step: Any, kind: Any) -> None:
    layer, x = kind(32, 16), torch.randn(8, 32)
    with octavo.autocast(recipe=CurrentScaling()):
        expected = step(layer, x)
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="eager")
        assert torch.equal(compiled(layer, x), expected)
        assert torch.equal(compiled(layer, x), expected), "compiled already"
        after = current_frame()
    assert after is not None
    assert after.recipe == CurrentScaling()
    assert current_frame() is None
