"""What repeats a launch is not launched, what only looks like it is; and all that comes out stays the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels are Triton's")

from tests.kernels.traced_launches import Compiled, take_kernels_everywhere

from octavo.formats import E4M3, E5M2
from octavo.kernels import CastOutput, ScaleRule, cast_transpose, partial_amax
from octavo.kernels.repeated_launches import merge_repeats

CAST = "cast_transpose_kernel"


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    take_kernels_everywhere(monkeypatch)


def value(cast: CastOutput) -> Tensor:
    """Something new that follows from codes and scale, so that the graph hands neither out."""
    assert cast.codes is not None
    assert cast.scale is not None
    return cast.codes.float() * cast.scale


class State:
    """A scale, and two places to gather."""

    def __init__(self) -> None:
        self.scale, self.gathered, self.other = torch.tensor(0.25), torch.tensor(1.0), torch.tensor(2.0)

    def cast(self, x: Tensor, gathered: Tensor | None = None, **options: Any) -> Tensor:
        return value(cast_transpose(x, options.pop("format", E4M3), self.scale, self.scale, gathered=gathered))


def casts_of(function: Callable[[State, Tensor, Tensor], Any], *, by_eager: bool = True) -> int:
    """How many casts are left of a function's, whose results and state are those of eager code."""
    x, y = torch.randn(16, 32) * 8, torch.randn(16, 32) * 20
    backend, found, expected = Compiled(), State(), State()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    with torch.no_grad():
        results, wanted = compiled(found, x.clone(), y.clone()), function(expected, x.clone(), y.clone())
    if by_eager:
        for a, b in zip(results, wanted, strict=True):
            assert torch.equal(a.float(), b.float())
    for name in ("gathered", "other"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert backend.clones == 0, "a launch writes where it is to write"
    return backend.launches[CAST]


def test_the_same_cast_is_launched_once() -> None:
    assert casts_of(lambda s, x, y: [s.cast(x), s.cast(x) * 2]) == 1


def test_what_was_gathered_there_is_not_gathered_again() -> None:
    assert casts_of(lambda s, x, y: [s.cast(x, s.gathered), s.cast(x, s.gathered) * 2]) == 1


def test_with_another_gathered_there_in_between_as_well() -> None:
    def function(s: State, x: Tensor, y: Tensor) -> list[Tensor]:
        return [s.cast(x, s.gathered), s.cast(y, s.gathered), s.cast(x, s.gathered) * 2]

    assert casts_of(function) == 2


def test_equal_computations_before_a_cast_are_seen_through() -> None:
    def function(s: State, x: Tensor, y: Tensor) -> list[Tensor]:
        return [s.cast(other.view(32, 16).bfloat16(), s.gathered) * (1 + i) for i, other in enumerate((x, x, x))]

    assert casts_of(function) == 1


def test_a_scale_that_is_measured_is_measured_once() -> None:
    def cast(x: Tensor) -> Tensor:
        amaxes = partial_amax(x)
        return value(cast_transpose(x, E4M3, amaxes, amaxes, rule=ScaleRule()))

    assert casts_of(lambda s, x, y: [cast(x), cast(x) + 1]) == 1


OTHERS: dict[str, Callable[[State, Tensor, Tensor], list[Tensor]]] = {
    "another input": lambda s, x, y: [s.cast(x), s.cast(y)],
    "another format": lambda s, x, y: [s.cast(x), s.cast(x, format=E5M2)],
    "another dtype": lambda s, x, y: [s.cast(x), s.cast(x.bfloat16())],
    "another sign of zero": lambda s, x, y: [s.cast(x * 0.0), s.cast(x * -0.0)],
    "gathered elsewhere": lambda s, x, y: [s.cast(x, s.gathered), s.cast(x, s.other)],
    "gathered by one alone": lambda s, x, y: [s.cast(x, s.gathered), s.cast(x)],
    "written to in between": lambda s, x, y: [s.cast(x), s.cast(x.add_(1.0))],
    "begun anew in between": lambda s, x, y: [s.cast(x, s.gathered), s.cast(x, s.gathered.zero_())],
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_differs_is_launched(case: str) -> None:
    assert casts_of(OTHERS[case]) == 2


def test_what_is_random_is_launched() -> None:
    drop = torch.nn.functional.dropout
    assert casts_of(lambda s, x, y: [s.cast(drop(x)), s.cast(drop(x))], by_eager=False) == 2


@pytest.mark.parametrize("view", [False, True])
def test_who_is_handed_codes_has_them_alone(view: bool) -> None:
    def codes(s: State, x: Tensor) -> Tensor:
        made = cast_transpose(x, E4M3, s.scale, None).codes
        assert made is not None
        return made[:3] if view else made

    assert casts_of(lambda s, x, y: [codes(s, x), codes(s, x), s.cast(x), s.cast(x) * 2]) == 3


def graph_of(*casts: Callable[[Tensor, Tensor], Any]) -> torch.fx.Graph:
    """A graph of operators, each called with x and y."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x, y: [cast(x, y) for cast in casts], tracing_mode="fake")(
        torch.randn(16, 16), torch.randn(16, 16)
    ).graph


def amax(x: Tensor) -> Tensor:
    return torch.ops.octavo.partial_amax(x) + 1


def test_what_is_computed_again_after_a_write_in_place_is_another_value() -> None:
    before = graph_of(lambda x, y: amax(x + 1), lambda x, y: amax(x + 1))
    assert merge_repeats(before) == 1
    assert merge_repeats(graph_of(lambda x, y: amax(x + 1), lambda x, y: x.copy_(y), lambda x, y: amax(x + 1))) == 0


def test_launches_of_two_checkpoints_stay_two() -> None:
    for apart in (False, True):
        graph = graph_of(lambda x, y: amax(x), lambda x, y: amax(x))
        for number, node in enumerate(
            graph.find_nodes(op="call_function", target=torch.ops.octavo.partial_amax.default)
        ):
            node.meta["ac_graph_id"] = number * apart
        assert merge_repeats(graph) == (0 if apart else 1)


def test_a_graph_without_kernels_stays_as_it_is() -> None:
    graph = graph_of(lambda x, y: x.sin() + x.sin())
    before = str(graph)
    assert merge_repeats(graph) == 0
    assert str(graph) == before
