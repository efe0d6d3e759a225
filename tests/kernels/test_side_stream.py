"""Work beside other work: when it is done so, what waits for what, and that bits are those of one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class _Stream:
    """Notes who waits for whom, in place of a stream."""

    device = None

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: _Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.events.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.events.append(f"off {self.name}")


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> tuple[side_stream.Side, list[str]]:
    events: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    main, beside = (_Stream(name, events) for name in ("main", "side"))
    return side_stream.Side(main, beside), events  # type: ignore[arg-type]


class _Pool:
    """Streams by address, handed out in turn."""

    device_index, device = 0, "cuda:0"

    def __init__(self, address: int) -> None:
        self.cuda_stream = address


def test_no_two_streams_share_the_one_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(10_000))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Pool(100 + next(turns) % side_stream._STREAMS))
    monkeypatch.setattr(side_stream, "_sides", {})
    found = []
    for address in (100, 102, 7):
        main: Any = _Pool(address)
        stream = side_stream._free_stream(main)
        assert stream is not None
        side_stream._sides[0, address] = side_stream.Side(main, stream)
        found.append(stream.cuda_stream)
    assert len({100, 102, 7, *found}) == 6
    last: Any = _Pool(8)
    for address in range(100, 100 + side_stream._STREAMS):
        side_stream._sides[0, address] = None
    assert side_stream._free_stream(last) is None


FORK, JOIN = "side waits for main", "main waits for side"


def test_both_begin_behind_what_was_there_and_what_follows_is_behind_both(
    side: tuple[side_stream.Side, list[str]],
) -> None:
    one, events = side

    def work(name: str) -> bool:
        events.append(name)
        return side_stream.is_beside()

    assert one.both(lambda: work("beside"), lambda: work("here")) == (True, False)
    assert events == [FORK, "on side", "beside", "off side", "here", JOIN]


@pytest.mark.parametrize("fails", ["beside", "here"])
def test_what_fails_is_joined_too(side: tuple[side_stream.Side, list[str]], fails: str) -> None:
    one, events = side

    def work(name: str) -> None:
        if name == fails:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        one.both(lambda: work("beside"), lambda: work("here"))
    assert events == [FORK, "on side", "off side", JOIN]
    assert not side_stream.is_beside()


def _trained(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Output and gradients, without their graph: a parameter's end of it would keep the stream it was made on."""
    xx = x.detach().requires_grad_()
    y = layer(xx)
    grads = torch.autograd.grad(y, [xx, *layer.parameters()], dy)
    return (y.detach(), *grads)


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
    both = side_stream.Side.both

    def counting(self: side_stream.Side, *calls: Any) -> Any:
        entered.append(1)
        return both(self, *calls)

    monkeypatch.setattr(side_stream.Side, "both", counting)
    return entered


def _beside(recipe: Recipe) -> int:
    """How often a captured layer puts work beside other work: its casts, but for blocks of 128, and its gradients."""
    # Those of bf16 are cast by one launch.
    return 1 if isinstance(recipe, BlockScaling) else 2


def _agree(layer: torch.nn.Module, x: Tensor, dy: Tensor, replays: int = 50) -> bool:
    """Whether the last of many replays has the bits of eager code."""
    for _ in range(3):  # until delayed scales are known
        _trained(layer, x, dy)
        octavo.update_scales(layer)
    expected = [out.clone() for out in _trained(layer, x, dy)]
    graph, outs = _captured(lambda: _trained(layer, x, dy))
    for _ in range(replays):
        graph.replay()
    return all(torch.equal(out, right) for out, right in zip(outs, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
@pytest.mark.parametrize(("m", "k", "n"), [(8192, 768, 3072), (8200, 1280, 1280), (8192, 1280, 5120)])
def test_a_captured_layer_has_the_bits_of_an_eager_one(
    recipe: Recipe, m: int, k: int, n: int, counted: list[int]
) -> None:
    layer = octavo.Linear(k, n, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    assert _agree(layer, x, dy)
    # Of the capture, and nothing of eager code.
    assert len(counted) == _beside(recipe)


@pytest.mark.gpu
def test_a_weight_in_float32_is_cast_beside_its_input_by_block_too(counted: list[int]) -> None:
    layer = octavo.Linear(1280, 1280, recipe=BlockScaling(), device="cuda", dtype=torch.float32)
    x = torch.randn(8192, 1280, device="cuda", dtype=torch.bfloat16)
    assert _agree(layer, x, torch.randn_like(x))
    assert len(counted) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_layers_one_behind_the_other_reuse_memory_without_meeting(recipe: Recipe, counted: list[int]) -> None:
    layers = torch.nn.Sequential(
        *(octavo.Linear(1024, 1024, recipe=recipe, device="cuda", dtype=torch.bfloat16) for _ in range(8))
    )
    x = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
    assert _agree(layers, x, torch.randn_like(x))
    assert len(counted) == 8 * _beside(recipe)


@pytest.mark.gpu
def test_a_fused_layer_runs_its_products_beside_one_another_too(counted: list[int]) -> None:
    layer = octavo.LayerNormLinear(1280, 3840, device="cuda", dtype=torch.bfloat16, recipe=CurrentScaling())
    x = torch.randn(8192, 1280, device="cuda", dtype=torch.bfloat16)
    assert _agree(layer, x, torch.randn(8192, 3840, device="cuda", dtype=torch.bfloat16))
    assert counted
