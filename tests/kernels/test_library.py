"""Eager code calls launchers, compiled code calls operators: neither pays for the other."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.formats import E4M3
from octavo.kernels import ScaleRule, amax_by_row_and_column, cast_transpose, partial_amax, scaled_mm


class Names(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


def everything(x: torch.Tensor) -> torch.Tensor:
    codes, scale, *_ = cast_transpose(x, E4M3, partial_amax(x), None, rule=ScaleRule())
    assert codes is not None
    assert scale is not None
    by_row, _ = amax_by_row_and_column(x, True, False)
    codes_r, scale_r, *_ = cast_transpose(x, E4M3, by_row, None, rule=ScaleRule(), gathered=x.new_zeros(()))
    assert codes_r is not None
    assert scale_r is not None
    return scaled_mm(codes, codes, scale, scale) + scaled_mm(codes_r, codes_r, scale_r, scale_r)


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
    names = ("partial_amax", "cast_transpose", "amax_by_row_and_column", "cast_transpose", "scaled_mm", "scaled_mm")
    assert operators == [f"octavo.{name}.default" for name in names]
    # Plain operations in between would be the compiler's to round as it likes; a maximum rounds nothing.
    others = [target for target in targets if target not in operators and "getitem" not in target]
    assert sorted(method.partition(" at ")[0] for method in others) == [
        "<built-in function add>",
        "<built-in method maximum of type object",
    ]


@pytest.mark.parametrize("name", ["partial_amax", "amax_by_row_and_column", "cast_transpose", "scaled_mm"])
def test_kernels_are_found_under_their_own_names(name: str) -> None:
    assert str(getattr(torch.ops.octavo, name).default._schema).startswith(f"octavo::{name}(Tensor ")
