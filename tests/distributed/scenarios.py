"""What runs on each rank of the tests of this folder: each function takes its rank first and returns plain data."""

from __future__ import annotations

import contextlib
import copy
import unittest.mock
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling, StaticScaling

DELAYED = DelayedScaling(amax_history_len=4)
RECIPES: dict[str, Recipe] = {
    "delayed": DELAYED,
    "delayed, first batch": DelayedScaling(amax_history_len=4, initialise_from_first_batch=True),
    "current": CurrentScaling(),
    "rowwise": RowwiseScaling(),
    "static": StaticScaling(input_scale=2.0**-5),
}
Values = dict[str, Any]


def integers(rows: int, seed: int, factor: int = 1) -> Tensor:
    """[rows, 16] of -2 … 2 times `factor`, so that sums are exact and the same in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, (rows, 16), generator=generator).float() * factor


def integer_model() -> nn.Sequential:
    """Two FP8 layers whose weights are -1, 0 or 1, the same in every process."""
    model = nn.Sequential(octavo.Linear(16, 16, bias=False), octavo.Linear(16, 16, bias=False))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(torch.randint(-1, 2, (16, 16), generator=generator))
    return model


def scales_of(model: nn.Module) -> Values:
    """Scales and histories of a model, by name."""
    return {key: value.tolist() for key, value in model.state_dict().items() if "_scale" in key or "_amax" in key}


def local_batch(rank: int, rows: tuple[int, int] = (24, 24)) -> Tensor:
    """Rank 1 sees 100 times larger activations."""
    return integers(rows[rank], rank, 100 if rank == 1 else 1)


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[tuple[int, str, object]]]:
    """(length, operation, group) of every all_reduce that Python code calls."""
    calls: list[tuple[int, str, object]] = []
    real = dist.all_reduce

    def record(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: object | None = None, *rest: Any) -> Any:
        calls.append((tensor.numel(), "max" if op == dist.ReduceOp.MAX else str(op), group))
        return real(tensor, op, group, *rest)

    with unittest.mock.patch.object(dist, "all_reduce", record):
        yield calls


def one_step(model: nn.Module, x: Tensor, group: object | None = None, recipe: Recipe = DELAYED) -> Values:
    """Sum loss; the update at the context's exit, then that of the gradients."""
    with octavo.autocast(recipe=recipe, amax_group=group):
        y = model(x)
    y.sum().backward()
    octavo.update_scales(model, group)
    return scales_of(model)


def case_26(rank: int, rows: tuple[int, int]) -> Values:
    return one_step(integer_model(), local_batch(rank, rows))


def case_26_converted(rank: int) -> Values:
    """Scales of the first batch are each rank's own; from the first update on they agree."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    octavo.convert(model, DELAYED, filter="all")
    x = local_batch(rank)
    model(x).sum().backward()
    octavo.update_scales(model)
    return scales_of(model)


def data_parallel(rank: int, name: str, inside: bool) -> Values:
    """Three steps of a model wrapped by DDP, ranks seeing different tokens and different numbers of them."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    octavo.convert(model, RECIPES[name], filter="all")
    before = parameters_of(model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    collectives = []
    for step in range(3):
        x = torch.randn(7 + 6 * rank, 16, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + 9 * rank)
        with recorded_collectives() as calls:
            with octavo.autocast() if inside else contextlib.nullcontext():
                y = wrapped(x)
            y.square().mean().backward()
            if not inside:
                octavo.update_scales(wrapped)
        collectives.append([call[:2] for call in calls])
        optimizer.step()
        optimizer.zero_grad()
    return {
        "before": before,
        "parameters": parameters_of(model),
        "scales": scales_of(model),
        "collectives": collectives,
    }


def parameters_of(model: nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def guard_moves_alike(rank: int) -> Values:
    """Rank 1 alone sees an outlier that leaves nothing of the other values."""
    model = integer_model()
    octavo.convert(model, CurrentScaling())
    x = integers(32, rank)
    if rank == 1:
        x[0, 0] = 1e8
    guard = octavo.PrecisionGuard(model, every=2)
    moved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            model(x).sum().backward()
            moved.append(guard.step())
    guard.remove()
    return {"moved": moved, "reasons": guard.moved, "warnings": len(caught)}


def wrapping_keeps_state(rank: int) -> Values:
    """Scales that differ by rank before DDP wraps the model, and after it has run without gradients."""
    model = integer_model()
    for layer in model:
        layer.delayed_state.input.load(torch.tensor(2.0**rank), torch.zeros(4))
        layer.delayed_state.adopt_recipe(DELAYED)
    before = scales_of(model)
    wrapped = DistributedDataParallel(model)
    with torch.no_grad(), octavo.autocast(recipe=DELAYED):
        wrapped(integers(4, 0))
    return {"before": before, "after": scales_of(model), "buffers": [name for name, _ in wrapped.named_buffers()]}


def one_collective(rank: int) -> list[Any]:
    """Layers of three recipes, two of them with histories that agree: what each of two steps reduces."""
    recipe = DELAYED.replaced(
        overrides={"^1$": DelayedScaling(amax_history_len=2), "^2$": DELAYED.replaced(reduce_amax=False)}
    )
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    octavo.convert(model, recipe, filter="all")
    steps = []
    for _ in range(2):
        with recorded_collectives() as calls:
            with octavo.autocast():
                y = model(local_batch(rank))
            y.sum().backward()
        steps.append([call[:2] for call in calls])
    return steps


def local_scales(rank: int) -> Values:
    with recorded_collectives() as calls:
        scales = one_step(integer_model(), local_batch(rank), recipe=DELAYED.replaced(reduce_amax=False))
    return {"scales": scales, "calls": len(calls)}


def groups(rank: int, alone: bool) -> Values:
    """A group of all that is not the default one, or one that holds rank 0 alone."""
    group = dist.new_group([0] if alone else [0, 1])
    model = integer_model()
    with recorded_collectives() as calls:
        scales = one_step(model, local_batch(rank), group)
    return {"scales": scales, "calls": [(*call[:2], call[2] is group) for call in calls]}


def failing_step(rank: int) -> Values:
    """A forward that fails on both ranks inside the context, after amaxes were gathered; then a right step."""
    model = integer_model()
    one_step(model, local_batch(rank))
    before = scales_of(model)
    with recorded_collectives() as calls:
        try:
            with octavo.autocast(recipe=DELAYED):
                model(local_batch(rank))
                raise ArithmeticError
        except ArithmeticError:
            pass
    during = {key: value for key, value in scales_of(model).items() if key.endswith("_scale")}
    after = one_step(model, local_batch(rank))
    return {"before": before, "during": during, "calls": len(calls), "after": after}


class Branches(nn.Module):
    """Two branches that a rank may leave out."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.a, self.b = kind(16, 16, bias=False), kind(16, 16, bias=False)
        with torch.no_grad():
            self.a.weight.copy_(torch.eye(16))
            self.b.weight.copy_(torch.eye(16) * 2)

    def forward(self, x: Tensor, branches: str) -> Tensor:
        return x + sum(getattr(self, name)(x) for name in branches)


def unused_layer(rank: int, converted: bool, unused: dict[int, str], context: bool) -> Values:
    """Branches differ by rank; two steps."""
    model = Branches(nn.Linear if converted else octavo.Linear)
    if converted:
        octavo.convert(model, DELAYED, filter="all")
    x = local_batch(rank).requires_grad_()
    branches = "".join(name for name in "ab" if name not in unused.get(rank, ""))
    for _ in range(2):
        with octavo.autocast(recipe=DELAYED) if context else contextlib.nullcontext():
            y = model(x, branches)
        y.sum().backward()
        if not context:
            octavo.update_scales(model)
    return {
        f"{name}.{operand}": getattr(getattr(model, name).delayed_state, operand).scale.item()
        for name in "ab"
        for operand in ("input", "weight", "grad_output")
    }


def copies_on_one_rank(rank: int) -> Values:
    """Rank 0 alone keeps a copy of the model, as for evaluation or averaged weights."""
    model = integer_model()
    one_step(model, local_batch(rank))
    averaged = copy.deepcopy(model) if rank == 0 else None
    if averaged is not None:
        with torch.no_grad(), octavo.autocast(recipe=DELAYED):
            averaged(local_batch(rank))
    one_step(model, local_batch(rank))
    return scales_of(model)


def zero_tokens(rank: int) -> Values:
    """Rank 0 has no token this time."""
    return one_step(integer_model(), local_batch(rank, (0, 24)))


def compiled_step(rank: int) -> Values:
    """The context inside of what is compiled, against the same in eager code; and what the graph reduces with."""
    results, operations = [], []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        operations.extend(str(node.target) for node in graph.graph.nodes if "all_reduce" in str(node.target))
        return graph

    for compiles in (False, True):
        torch._dynamo.reset()
        model = integer_model()

        def step(x: Tensor, model: nn.Module = model) -> Tensor:
            with octavo.autocast(recipe=DELAYED):
                return model(x)

        run = torch.compile(step, backend=backend, fullgraph=True) if compiles else step
        for _ in range(2):
            run(local_batch(rank)).sum().backward()
        octavo.update_scales(model)
        results.append(scales_of(model))
    return {"eager": results[0], "compiled": results[1], "operations": operations}
