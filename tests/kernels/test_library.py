"""Eager code calls launchers, compiled code calls operators: neither pays for the other."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.formats import E4M3
from octavo.kernels import amax, cast_transpose, scale_from_amax, scaled_mm


class Names(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def everything(x: torch.Tensor) -> torch.Tensor:
    multiplier, scale = scale_from_amax(amax(x), E4M3)
    codes = cast_transpose(x, E4M3, multiplier, None).codes
    assert codes is not None
    return scaled_mm(codes, codes, scale, scale)


def test_eager_code_never_enters_the_dispatcher_for_a_kernel() -> None:
    with Names() as names:
        everything(torch.randn(16, 32))
    assert names.seen
    assert not [name for name in names.seen if name.startswith("octavo")]


def test_compiled_code_holds_one_operator_a_kernel() -> None:
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    torch.compile(everything, fullgraph=True, backend=record)(torch.randn(16, 32))
    operators = [target for target in targets if target.startswith("octavo.")]
    assert operators == [
        f"octavo.{name}.default" for name in ("amax", "scale_from_amax", "cast_transpose", "scaled_mm")
    ]
    # Plain operations in between would be the compiler's to round as it likes.
    assert [target for target in targets if target not in operators and "getitem" not in target] == []


@pytest.mark.parametrize("name", ["amax", "scale_from_amax", "cast_transpose", "scaled_mm"])
def test_kernels_are_found_under_their_own_names(name: str) -> None:
    assert str(getattr(torch.ops.octavo, name).default._schema).startswith(f"octavo::{name}(Tensor ")
