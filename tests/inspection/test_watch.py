"""`octavo.inspection.watch`: every cast of a model while it runs, and nothing left behind."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.inspection import statistics, watch
from octavo.modules import FP8LinearMixin
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling
from octavo.tensor import CurrentQuantizer

OPERANDS = ("input", "weight", "grad_output")
ROWWISE = RowwiseScaling(power_of_two_scales=False)
RECIPES = [CurrentScaling(), DelayedScaling(), ROWWISE, StaticScaling(input_scale=0.01)]


def converted(recipe: Recipe, bias: bool = True) -> nn.Sequential:
    """Odd sizes: codes are padded, figures are of what is real."""
    model = nn.Sequential(nn.Linear(48, 35, bias), nn.GELU(), nn.Linear(35, 19, bias))
    octavo.convert(model, recipe, filter="all")
    return model


def observers(model: nn.Module) -> list[object]:
    return [layer.observer for layer in model.modules() if isinstance(layer, FP8LinearMixin)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_forward_and_backward_are_seen_and_not_changed(recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = converted(recipe)
    torch.manual_seed(0)
    unwatched = converted(recipe)
    x = torch.randn(13, 48)
    with watch(model) as seen:
        y = model(x)
        y.sum().backward()
    expected = unwatched(x)
    expected.sum().backward()
    assert torch.equal(y, expected)
    for one, other in zip(model.parameters(), unwatched.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert set(seen.statistics) == {(name, operand) for name in ("0", "2") for operand in OPERANDS}
    assert seen.statistics.keys() == seen.scales.keys()
    assert seen.statistics["0", "input"].amax == x.abs().max()
    assert seen.statistics["2", "weight"].amax == model[2].weight.abs().max()
    assert seen.statistics["2", "grad_output"].amax == 1.0


def test_figures_are_those_of_the_cast() -> None:
    model, x = converted(CurrentScaling()), torch.randn(13, 48)
    with watch(model) as seen:
        model(x)
    q = octavo.quantize(x, octavo.E4M3)
    assert seen.statistics["0", "input"] == statistics(x, q)
    assert seen.scales["0", "input"] == q.scale.item()


def test_row_wise_figures_are_by_row_and_the_scale_is_the_largest() -> None:
    model = converted(ROWWISE)
    x = torch.randn(13, 48) * torch.logspace(-4, 2, 13).unsqueeze(1)
    with watch(model) as seen:
        model(x)
    q = octavo.quantize(x, octavo.E4M3, "row")
    assert seen.statistics["0", "input"] == statistics(x, q)
    assert seen.scales["0", "input"] == q.scale.max().item()


def test_figures_by_block_are_those_of_the_blocks() -> None:
    model = nn.Sequential(nn.Linear(300, 35))
    octavo.convert(model, BlockScaling(power_of_two_scales=False), filter="all")
    x = torch.randn(13, 300) * torch.logspace(-4, 2, 300)
    with watch(model) as seen:
        model(x)
    for operand, matrix, blocks in (("input", x, (1, 128)), ("weight", model[0].weight.detach(), (128, 128))):
        q = octavo.quantize(matrix, octavo.E4M3, blocks)
        assert seen.statistics["0", operand] == statistics(matrix, q)
        assert seen.scales["0", operand] == q.scale.max().item()


def test_an_operand_cast_for_the_transposed_layout_alone_is_seen() -> None:
    """The first layer's input needs no gradient: of dy only the codes of wgrad are made."""
    for recipe in (CurrentScaling(), RowwiseScaling(), BlockScaling()):
        model = nn.Sequential(nn.Linear(48, 35))
        octavo.convert(model, recipe, filter="all")
        with watch(model) as seen:
            y = model(torch.randn(13, 48))
            weights = torch.randn_like(y)
            (y * weights).sum().backward()
        figures = seen.statistics["0", "grad_output"]
        assert figures.amax == weights.abs().max()
        assert figures.sqnr_db > 20


def test_saturation_of_a_stale_delayed_scale() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    octavo.convert(model, DelayedScaling(), filter="all")
    with watch(model) as seen:
        model(torch.ones(4, 16))
        octavo.update_scales(model)
        x = torch.ones(4, 16)
        x[0, :8] = 2.0
        model(x)
    assert seen.statistics["0", "input"].saturation == 8 / 64
    assert seen.scales["0", "input"] == pytest.approx(1 / 448)
    with watch(model) as later:
        octavo.update_scales(model)
        model(x)
    assert later.statistics["0", "input"].saturation == 0
    assert later.scales["0", "input"] == pytest.approx(2 / 448)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_no_tokens_are_no_figures(recipe: Recipe) -> None:
    model = converted(recipe)
    with watch(model) as seen:
        model(torch.zeros(0, 48)).sum().backward()
    assert set(seen.statistics) == {("0", "weight"), ("2", "weight")}


def test_infinities_of_gradients_are_counted() -> None:
    model = converted(CurrentScaling())
    with watch(model) as seen:
        y = model(torch.randn(5, 48))
        gradient = torch.ones_like(y)
        gradient[0, 0] = math.inf
        y.backward(gradient)
    assert seen.statistics["2", "grad_output"].nonfinite == 1


def test_several_passes_leave_the_last_ones_figures() -> None:
    model = converted(CurrentScaling())
    with watch(model) as seen:
        for factor in (100.0, 1.0):
            model(torch.full((4, 48), factor)).sum().backward()
    assert seen.statistics["0", "input"].amax == 1.0


def test_a_gradient_is_seen_wherever_its_backward_runs() -> None:
    model = converted(CurrentScaling())
    with watch(model) as seen:
        y = model(torch.randn(4, 48))
    assert ("0", "grad_output") not in seen.statistics
    y.sum().backward()
    assert seen.statistics["2", "grad_output"].amax == 1.0
    count = len(seen.statistics)
    model(torch.full((4, 48), 1e3)).sum().backward()
    assert len(seen.statistics) == count
    assert seen.statistics["0", "input"].amax < 1e3, "what runs after the context is not seen"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model = converted(CurrentScaling())
    with pytest.raises(ValueError, match="in_features") if fails else nullcontext(), watch(model):
        model(torch.randn(4, 47 if fails else 48))
    assert observers(model) == [None, None]


def test_outside_no_quantizer_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cost: the plan holds the quantizers themselves."""
    from octavo.modules import linear as module

    kinds: list[type] = []
    real = module.plan_linear

    def record(*args: object) -> object:
        plan = real(*args)
        kinds.extend(type(quantizer) for quantizer in plan[:3])
        return plan

    monkeypatch.setattr(module, "plan_linear", record)
    model = converted(CurrentScaling())
    with watch(model):
        model(torch.randn(4, 48))
    assert CurrentQuantizer not in kinds
    kinds.clear()
    model(torch.randn(4, 48))
    assert kinds == [CurrentQuantizer] * 6


def test_watches_nest() -> None:
    model = converted(CurrentScaling())
    with watch(model) as outer:
        with watch(model[2]) as inner:
            model(torch.randn(4, 48))
        assert set(outer.statistics) == {(name, operand) for name in ("0", "2") for operand in ("input", "weight")}
        assert outer.statistics["2", "input"] == inner.statistics["(root)", "input"]
        middle = observers(model)
        model(torch.full((4, 48), 9.0))
    assert set(inner.statistics) == {("(root)", "input"), ("(root)", "weight")}
    assert None not in middle, "the inner one's end is not the outer one's"
    assert outer.statistics["0", "input"].amax == 9.0
    assert observers(model) == [None, None]


def test_one_watch_is_entered_again() -> None:
    model = converted(CurrentScaling())
    seen = watch(model)
    for factor in (1.0, 3.0):
        with seen:
            model(torch.full((4, 48), factor))
    assert seen.statistics["0", "input"].amax == 3.0
    with seen, seen:
        pass
    assert observers(model) == [None, None]


def test_a_model_converted_back_meanwhile() -> None:
    model = converted(CurrentScaling())
    with watch(model):
        octavo.unconvert(model)
    assert "observer" not in model[0].__dict__


def test_a_cached_weight_is_not_cast() -> None:
    layer = octavo.Linear(16, 16, recipe=CurrentScaling())
    layer(torch.randn(2, 16), cached_weight="refresh")
    with watch(layer) as seen:
        layer(torch.randn(2, 16), cached_weight="reuse")
    assert set(seen.statistics) == {("(root)", "input")}


def test_the_table_names_layers_and_figures() -> None:
    model = converted(CurrentScaling())
    with watch(model) as seen:
        model(torch.full((4, 48), 2.0))
    head, first, *_ = str(seen).splitlines()
    assert head.split() == ["layer", "operand", "amax", "scale", "underflow", "saturated", "SQNR"]
    assert first.split() == ["0", "input", "2", "0.00446", "0.00%", "0.00%", "inf", "dB"]
    assert len(str(seen).splitlines()) == 5


def test_a_model_without_fp8_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no FP8 layer to watch: octavo\.convert\(model\) makes some"):
        watch(nn.Sequential(nn.Linear(4, 4))).__enter__()


def test_compiled_models_are_refused() -> None:
    model = converted(CurrentScaling())
    for compiled in (torch.compile(model, backend="eager"), nn.Sequential(torch.compile(model, backend="eager"))):
        with pytest.raises(ValueError, match=r"is compiled: .* watch and run the model uncompiled"):
            watch(compiled).__enter__()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"is compiled: .* watch and run the model uncompiled"):
        watch(model).__enter__()
    assert observers(model) == [None, None]


def test_code_compiled_around_a_watched_model_raises_and_recovers() -> None:
    model = converted(CurrentScaling())

    def run(x: Tensor) -> Tensor:
        return model(x)

    compiled, x = torch.compile(run, backend="eager", fullgraph=True), torch.randn(4, 48)
    before = compiled(x)
    with watch(model), pytest.raises(torch._dynamo.exc.Unsupported, match="watch and run the model uncompiled"):
        compiled(x)
    assert torch.equal(compiled(x), before)
