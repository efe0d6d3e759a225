"""cast_transpose under the compiler: one graph, the same bits, the amax gathered in forward, backward and recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from tests.kernels.matrices import with_specials
from tests.kernels.sources import AMAX_KINDS, KINDS, given, rule_of
from torch import Tensor

from octavo.formats import E4M3, E5M2
from octavo.kernels import CastOutput, cast_transpose, partial_amax


def assert_same(found: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            assert a.stride() == b.stride()
            width = torch.uint8 if a.dtype.itemsize == 1 else torch.int32
            assert torch.equal(a.reshape(-1).view(width), b.reshape(-1).view(width))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_into_one_graph_it_gives_the_same(kind: str) -> None:
    torch._dynamo.reset()
    rule = rule_of(kind)

    def both(x: Tensor, rowwise: Tensor | None, columnwise: Tensor | None, gathered: Tensor) -> CastOutput:
        return cast_transpose(
            x * 2, E4M3, rowwise, columnwise, rule=rule, gathered=gathered, inf_to_nan=True, column_sum=True
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=True)
    for shape in ((5, 7), (33, 16), (0, 9)):
        x = with_specials(torch.randn(shape))
        pair = given(kind, x)
        for start in (0.0, 1e9):
            gathered, expected_gathered = torch.tensor(start), torch.tensor(start)
            assert_same(compiled(x, *pair, gathered), both(x, *pair, expected_gathered))
            assert gathered.item() == expected_gathered.item()
        assert gathered.item() == 1e9


@pytest.mark.parametrize("shape", [(), (16, 1)])
def test_compiled_code_gives_scales_of_their_own(shape: tuple[int, ...]) -> None:
    """What is written into the given one after the cast, in the graph or later, leaves them alone."""
    torch._dynamo.reset()

    def cast(x: Tensor, scale: Tensor) -> tuple[Tensor | None, ...]:
        output = cast_transpose(x, E4M3, scale, None)
        scale.mul_(2)
        return output.codes, output.scale

    x, scale = torch.randn(16, 16), torch.full(shape, 0.7)
    codes, used = torch.compile(cast, fullgraph=True, backend="aot_eager")(x, scale)
    scale.fill_(9.0)
    assert_same((codes, used), cast_transpose(x, E4M3, torch.full(shape, 0.7), None)[:2])


def test_one_graph_serves_every_number_of_rows() -> None:
    torch._dynamo.reset()
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(1)
        return graph.forward

    def current(x: Tensor, gathered: Tensor) -> CastOutput:
        partial = partial_amax(x)
        return cast_transpose(x, E4M3, partial, partial, rule=rule_of(AMAX_KINDS[0]), gathered=gathered)

    compiled = torch.compile(current, fullgraph=True, backend=count)
    for rows in (32, 48, 7, 100, 1000):
        compiled(torch.randn(rows, 16), torch.zeros(()))
    # One of the first shape, one of any number of rows.
    assert len(graphs) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [(False, False, False), (True, True, True), (True, False, True)], ids=str)
def test_the_operator_describes_itself_rightly(kind: str, flags: tuple[bool, bool, bool]) -> None:
    gather, inf_to_nan, column_sum = flags
    for x in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(16, 32), torch.randn(0, 5)):
        rowwise, columnwise = given(kind, x)
        epsilon, power_of_two = (rule_of(kind) or (None, False))[:2]
        shared = rowwise is columnwise
        arguments = (x, "E5M2", rowwise, columnwise, epsilon, power_of_two, gather, inf_to_nan, column_sum, shared)
        torch.library.opcheck(
            torch.ops.octavo.cast_transpose.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


class _Doubled(torch.autograd.Function):
    """Casts in its forward and in its backward, and gathers in both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, gathered: Tensor, gathered_gradient: Tensor) -> Tensor:
        output = cast_transpose(x, E4M3, scale, scale, gathered=gathered)
        ctx.save_for_backward(output.codes_t, output.scale_t)
        ctx.gathered_gradient, ctx.shape = gathered_gradient, x.shape
        return output.codes.float()[: x.shape[0], : x.shape[1]] * output.scale  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        codes_t, scale_t = ctx.saved_tensors
        partial = partial_amax(dy)
        rule = rule_of(AMAX_KINDS[0])
        output = cast_transpose(dy, E5M2, partial, None, rule=rule, gathered=ctx.gathered_gradient, column_sum=True)
        dx = output.codes.float()[: ctx.shape[0], : ctx.shape[1]] * output.scale  # type: ignore[union-attr]
        saved = (codes_t.float() * scale_t).t()[: ctx.shape[0], : ctx.shape[1]]
        return dx * saved + output.column_sum, None, None, None


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gathered_in_a_forward_and_in_a_backward_once_each(backend: str, checkpointed: bool) -> None:
    """Under a checkpoint too, whose recompute runs in the backward, after `gathered` and the scale were written to."""

    def run(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        scale, gathered, gathered_gradient = torch.tensor(0.7), torch.tensor(0.0), torch.tensor(0.0)

        def layer(x: Tensor) -> Tensor:
            return _Doubled.apply(x * 2, scale, gathered, gathered_gradient)

        def step(x: Tensor) -> Tensor:
            # (Eager recomputes gather again; that a layer's do not is its runtime's doing.)
            if checkpointed and compiled:
                return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return layer(x)

        function = torch.compile(step, fullgraph=True, backend=backend) if compiled else step
        seen = []
        for size in (1.0, 5.0, 3.0):
            # Integers: their column sums are exact in any order.
            x = (torch.arange(15.0).reshape(3, 5) * size).requires_grad_()
            dy = torch.arange(15.0).reshape(3, 5) - 7
            y = function(x)
            after_forward = gathered.clone()
            gathered.zero_()
            y.backward(dy * size)
            assert gathered.item() == 0.0, "nothing is gathered by a recompute"
            seen += [y.detach(), x.grad, after_forward, gathered_gradient.clone()]
            gathered_gradient.zero_()
        return seen

    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found = run(True)
    for a, b in zip(found, run(False), strict=True):
        assert torch.equal(a, b)
    assert found[2].item() == 28.0
    assert found[6].item() == 140.0
    assert found[3].item() == 7.0
