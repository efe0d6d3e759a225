"""Work beside other work: when it is done so, and that bits are those of one thing after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import octavo
from octavo.kernels import side_stream
from octavo.kernels.side_stream import side_of
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

ENOUGH = 2**40
RECIPES = [BlockScaling(), CurrentScaling(), DelayedScaling(), RowwiseScaling()]


def test_there_is_nothing_beside_on_a_cpu() -> None:
    assert side_of(torch.ones(2), ENOUGH) is None
    assert not side_stream.is_beside()


class _CallsItselfCuda(Tensor):
    is_cuda = True


def test_a_tensor_that_only_says_it_is_on_a_device_gets_no_stream() -> None:
    assert side_of(torch.ones(2).as_subclass(_CallsItselfCuda), ENOUGH) is None


def _trained(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    xx = x.detach().requires_grad_()
    y = layer(xx)
    return (y, *torch.autograd.grad(y, [xx, *layer.parameters()], dy))


def _captured(call: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = call()
    return graph, outs


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that work was put beside."""
    entered: list[int] = []
    enter = side_stream.Side.__enter__

    def counting(self: side_stream.Side) -> None:
        entered.append(1)
        enter(self)

    monkeypatch.setattr(side_stream.Side, "__enter__", counting)
    return entered


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize(("m", "k", "n"), [(8192, 768, 3072), (8200, 1280, 1280)])
def test_a_captured_layer_has_the_bits_of_an_eager_one_in_every_replay(
    recipe: Recipe, m: int, k: int, n: int, counted: list[int]
) -> None:
    layer = octavo.Linear(k, n, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # until delayed scales are known
        _trained(layer, x, dy)
        octavo.update_scales(layer)
    expected = [out.clone() for out in _trained(layer, x, dy)]
    assert not counted
    graph, outs = _captured(lambda: _trained(layer, x, dy))
    # Forward and backward.
    assert len(counted) == 2
    for _ in range(50):
        graph.replay()
    assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_layers_one_behind_the_other_reuse_memory_without_meeting(
    recipe: Recipe, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager code with streams, memory let go of and taken again all the time, against eager code without."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        *(octavo.Linear(1024, 1024, recipe=recipe, device="cuda", dtype=torch.bfloat16) for _ in range(6))
    )
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        _trained(layers, x, dy)
        octavo.update_scales(layers)
    expected = [out.clone() for out in _trained(layers, x, dy)]
    assert not counted
    monkeypatch.setattr(side_stream, "_LONG", 0)
    monkeypatch.setattr(side_stream, "_CAPTURED", 0)
    for _ in range(20):
        found = _trained(layers, x, dy)
        assert all(torch.equal(out, right) for out, right in zip(found, expected, strict=True))
    assert len(counted) == 20 * 6 * 2


@pytest.mark.gpu
def test_a_fused_layer_runs_its_products_beside_one_another_too(counted: list[int]) -> None:
    layer = octavo.LayerNormLinear(1280, 3840, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8192, 1280, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(8192, 3840, device="cuda", dtype=torch.bfloat16)

    def call() -> tuple[Tensor, ...]:
        with octavo.autocast(recipe=CurrentScaling()):
            return _trained(layer, x, dy)

    expected = [out.clone() for out in call()]
    graph, outs = _captured(call)
    assert counted
    graph.replay()
    assert all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
def test_what_fails_beside_leaves_the_stream_as_it_was() -> None:
    x = torch.ones(2, device="cuda")
    side, before = side_of(x, ENOUGH), torch.cuda.current_stream()
    assert side is not None
    with side:
        assert side_stream.is_beside()
        assert torch.cuda.current_stream() != before
        assert side_of(x, ENOUGH) is None  # nothing beside what is beside

    def fails() -> None:
        with side:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.cuda.current_stream() == before
    assert not side_stream.is_beside()
