"""Layers on one input quantize it once, and what they compute stays the same to the bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import octavo
from octavo.functional import shared_input
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.tensor import block_quantizer, quantizer

RECIPES = [DelayedScaling(amax_history_len=4), CurrentScaling(), RowwiseScaling(), BlockScaling()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of all casts."""
    shapes: list[tuple[int, ...]] = []

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counting(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            shapes.append(tuple(x.shape))
            return real(x, *args, **kwargs)

        monkeypatch.setattr(module, name, counting)

    count(quantizer, "cast_transpose")
    count(block_quantizer, "block_cast")
    return shapes


def converted(recipe: Recipe) -> Attention:
    torch.manual_seed(0)
    model = Attention()
    octavo.convert(model, recipe=recipe, filter="all")
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_query_key_and_value_cast_their_input_once(
    recipe: Recipe, dtype: torch.dtype | None, casts: list[tuple[int, ...]]
) -> None:
    together, apart = converted(recipe), converted(recipe)
    for step in range(3):
        x = torch.randn(8, 4, 32) * (step + 1)
        outs = []
        for model, separate in ((together, False), (apart, True)):
            casts.clear()
            inner = x.clone().requires_grad_()
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                if separate:
                    parts = (model.q_proj(inner), model.k_proj(inner * 1), model.v_proj(inner * 1))
                    y = torch.cat(parts, -1)
                else:
                    y = model(inner)
            assert casts.count((32, 32)) - 1 == (3 if separate else 1)  # less the weight of q_proj, of the same shape
            y.float().square().sum().backward()
            if recipe.delayed is not None:
                octavo.update_scales(model)
            outs.append([y.detach(), *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
        for a, b in zip(*outs, strict=True):
            assert torch.equal(a, b)


def activation() -> Tensor:
    """[8, 32] that autograd made."""
    return torch.randn(8, 32, requires_grad=True) * 1


def two_layers(recipe: Recipe, grouped: bool = False) -> tuple[octavo.Linear, octavo.Linear]:
    """Layers that would make the same codes; `grouped`: found by `convert` to run on one input."""
    a, b = octavo.Linear(32, 16, recipe=recipe), octavo.Linear(32, 16, recipe=recipe)
    if grouped:
        b.delayed_state.share_input(a.delayed_state)
    return a, b


def test_a_layer_that_runs_again_on_the_same_tensor_quantizes_it_again(casts: list[tuple[int, ...]]) -> None:
    layer, x = octavo.Linear(32, 16, recipe=CurrentScaling()), activation()
    first = layer(x)
    x.data.mul_(100)  # no version counter tells of it
    second = layer(x)
    assert casts.count((8, 32)) == 2
    assert (second - layer.bias).norm() > 50 * (first - layer.bias).norm()


@pytest.mark.parametrize("grouped", [False, True])
def test_an_input_that_was_written_to_in_between_is_quantized_again(
    grouped: bool, casts: list[tuple[int, ...]]
) -> None:
    a, b = two_layers(CurrentScaling(), grouped)
    x = activation()
    a(x)
    x.mul_(2)
    b(x)
    assert casts.count((8, 32)) == 2


@pytest.mark.parametrize("recipe", [DelayedScaling(), CurrentScaling()], ids=lambda recipe: type(recipe).__name__)
def test_layers_with_another_spec_or_state_share_nothing(recipe: Recipe, casts: list[tuple[int, ...]]) -> None:
    other = recipe if recipe.delayed is not None else CurrentScaling(power_of_two_scales=True)
    a, b = octavo.Linear(32, 16, recipe=recipe), octavo.Linear(32, 16, recipe=other)
    x = activation()
    a(x)
    b(x)
    assert casts.count((8, 32)) == 2


@pytest.mark.parametrize("grouped", [False, True])
def test_an_evaluation_before_a_training_has_codes_in_one_layout_only(
    grouped: bool, casts: list[tuple[int, ...]]
) -> None:
    a, b = two_layers(CurrentScaling(), grouped)
    x = activation()
    with torch.no_grad():
        a(x)
    b(x).sum().backward()
    assert casts.count((8, 32)) == 2


# Who is sure that an input is what it was.


def test_layers_of_no_group_share_what_autograd_made_and_nothing_else(casts: list[tuple[int, ...]]) -> None:
    a, b = two_layers(CurrentScaling())
    leaf = torch.randn(8, 32, requires_grad=True)
    with torch.no_grad():
        made_without = leaf * 1
    for x, times in ((activation(), 1), (leaf, 2), (torch.randn(8, 32), 2), (made_without, 2)):
        casts.clear()
        a(x)
        b(x)
        assert casts.count((8, 32)) == times


def test_layers_of_one_group_share_whatever_they_run_on(casts: list[tuple[int, ...]]) -> None:
    a, b = two_layers(CurrentScaling(), grouped=True)
    for x in (activation(), torch.randn(8, 32, requires_grad=True), torch.randn(8, 32)):
        for enabled in (True, False):
            with torch.set_grad_enabled(enabled):
                casts.clear()
                a(x)
                b(x)
                assert casts.count((8, 32)) == 1


def test_a_group_lets_nobody_else_have_the_codes_of_a_buffer(casts: list[tuple[int, ...]]) -> None:
    (a, b), (other, _) = two_layers(recipe := CurrentScaling(), grouped=True), two_layers(recipe, grouped=True)
    x = torch.randn(8, 32)
    a(x)
    other(x)
    b(x)  # what was made last is the other group's
    assert casts.count((8, 32)) == 3


def test_a_buffer_that_is_refilled_without_a_trace_is_quantized_again() -> None:
    a, b = two_layers(CurrentScaling())
    buffer = np.ones((8, 32), dtype=np.float32)
    x = torch.from_numpy(buffer)
    a(x)
    version = x._version
    buffer[:] = -3.0
    assert x._version == version
    assert torch.equal(b(x), b(x.clone()))


@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_is_taken_on_another_stream(
    grouped: bool, casts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = two_layers(CurrentScaling(), grouped)
    x = activation()
    a(x)
    with monkeypatch.context() as patch:
        patch.setattr(shared_input, "_stream_of", lambda x: 7)
        b(x)
        assert casts.count((8, 32)) == 2
        a(x)
    assert casts.count((8, 32)) == 2


def test_a_captured_cast_is_taken_within_a_group_and_its_capture_alone(
    casts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = False
    monkeypatch.setattr(shared_input, "_is_captured", lambda x: captured)
    recipe = CurrentScaling()
    for grouped in (False, True):
        for first, second in ((True, True), (True, False), (False, True)):
            (a, b), x = two_layers(recipe, grouped), activation()
            casts.clear()
            captured = first
            a(x)
            captured = second
            b(x)
            assert casts.count((8, 32)) == (1 if grouped and first and second else 2)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_parameter_that_was_an_input_can_be_swapped(grouped: bool) -> None:
    a, _ = two_layers(CurrentScaling(), grouped)
    x, other = nn.Parameter(torch.randn(8, 32)), nn.Parameter(torch.randn(8, 32))
    with torch.no_grad():
        a(x)
    torch.utils.swap_tensors(x, other)  # raises for one with weak references


def test_the_codes_go_with_the_input() -> None:
    layer, _ = two_layers(CurrentScaling(), grouped=True)
    x = torch.randn(8, 32)
    with torch.no_grad():
        layer(x)
    assert shared_input._LAST.made is not None
    del x
    gc.collect()
    assert shared_input._LAST.made is None


# On a GPU.


@pytest.mark.gpu
def test_on_a_gpu_graphs_of_one_static_input_each_cast_it() -> None:
    a, b = (layer.cuda() for layer in two_layers(CurrentScaling()))
    x, graphs, outs = torch.randn(8, 32, device="cuda"), [], []
    with torch.no_grad():
        for layer in (a, b):
            layer(x.clone())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs.append(layer(x))
            graphs.append(graph)
        x.copy_(torch.randn(8, 32))
        graphs[1].replay()
        assert torch.equal(outs[1], b(x.clone()))


@pytest.mark.gpu
def test_on_a_gpu_another_stream_casts_anew() -> None:
    a, b = (layer.cuda() for layer in two_layers(CurrentScaling()))
    x = torch.randn(8, 32, device="cuda", requires_grad=True) * 1
    a(x)
    made = shared_input._LAST.made
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        b(x)
    assert shared_input._LAST.made is not made
    torch.cuda.synchronize()
