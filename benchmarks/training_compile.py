"""Octavo's layers under torch.compile on a CUDA device: one graph, few of them, CUDA graphs beneath, time to compile.

Parts of `check_training.py`.
"""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from benchmarks.training_model import RECIPES, Setting, Training, random_batch, state_of, unequal
from torch import Tensor, nn

import octavo
from octavo.recipes import Recipe
from octavo.study.model import ModelShape

Result = dict[str, Any]
WIDTH = 256
TWELVE = Setting(shape=ModelShape(layers=12, width=256, heads=4, context=64, vocab_size=4096))


def check_compiled(checks: Any) -> None:
    """Graphs counted over token counts; `reduce-overhead` against the default and eager."""
    plain: list[int] = []
    for name, recipe in {"bf16": None, **RECIPES}.items():
        checks.run("graphs", functools.partial(count_graphs, recipe, plain), recipe=name)
    for name, recipe in RECIPES.items():
        checks.run("reduce-overhead", functools.partial(reduce_overhead, recipe), recipe=name)


def check_compile_time(checks: Any) -> None:
    """The warm-up of a model compiled block by block against that of bf16."""
    checks.run("compile time", compile_times)


def count_graphs(recipe: Recipe | None, plain: list[int], device: str = "cuda") -> Result:
    """A norm and an MLP as one graph each, forward and backward, on ten numbers of tokens.

    Sizes cost two graphs, the first and one for all others, with Octavo or without. A layer that measures its first
    batch is one of three in turn: nothing known, then all but the gradient's scale (the first update precedes the first
    backward), then all. The first of them is that of the first size, so delayed scaling adds one.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    linears = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
    block = nn.Sequential(nn.LayerNorm(WIDTH), linears[0], nn.GELU(approximate="tanh"), linears[1]).to(device)
    if recipe is not None:
        octavo.convert(block, recipe, filter="all")
    graphs: list[int] = []
    compiled = torch.compile(block, fullgraph=True, backend=_counting(graphs))
    for step in range(10):
        x = torch.randn(2, 32 + 8 * step, WIDTH, device=device, requires_grad=True)
        fp8 = nullcontext() if recipe is None else octavo.autocast(recipe=recipe)
        with torch.autocast(torch.device(device).type, torch.bfloat16), fp8:
            y = compiled(x)
        y.float().square().mean().backward()
        block.zero_grad()
    if recipe is None:
        plain.append(len(graphs))
    allowed = (plain[0] if plain else 2) + (recipe is not None and recipe.delayed is not None)
    return {"ok": len(graphs) <= allowed, "graphs": len(graphs), "allowed": allowed}


def _counting(graphs: list[int]) -> Callable[..., Any]:
    """Forward and backward traced as for Inductor, and run op by op: what is asked is how often."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return aot_eager(graph, inputs)

    return backend


def reduce_overhead(recipe: Recipe, steps: int = 10) -> Result:
    """Training with `mode="reduce-overhead"`, in the default mode, and eager: the same bits, scales included.

    Without biases and with ReLU between layers, all that the compiler makes by itself is exact: the products and casts
    are the same kernels in all three, and an amax has no order of summation.
    """
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for place in range(4):
        layers += [nn.Linear(256, 256, bias=False), *([nn.ReLU()] if place < 3 else [])]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    octavo.convert(model, recipe, filter="all")
    data = torch.randn(steps, 2, 96, 256, device="cuda", dtype=torch.bfloat16)
    data *= torch.linspace(1, 3, steps, device="cuda", dtype=torch.bfloat16)[:, None, None, None]
    modes = {"eager": None, "default": "default", "reduce": "reduce-overhead"}
    ends, losses, replays, skipped = {}, {}, 0, 0
    for name, mode in modes.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        twin = copy.deepcopy(model)
        call = twin if mode is None else torch.compile(twin, fullgraph=True, mode=mode)
        with counted_replays() as count:
            losses[name] = _trained(call, twin, recipe, data)
        ends[name] = state_of(twin)
        if name == "reduce":
            replays, skipped = count[0], torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    wrong = {name: unequal(ends["eager"], ends[name]) for name in ("default", "reduce")}
    same = all(torch.equal(losses["eager"], losses[name]) for name in ("default", "reduce"))
    # A forward and a backward each step, but for two in which they are warmed up and recorded; with delayed scaling the
    # first two steps, in which scales become known, have graphs of their own.
    ok = same and not any(wrong.values()) and skipped == 0 and replays >= 2 * (steps - 4)
    figures: Result = {"losses_equal": same, "replays": replays, "skipped": skipped}
    return {"ok": ok, **figures, **{f"unequal_{name}": len(names) for name, names in wrong.items()}}


def _trained(call: Any, model: nn.Module, recipe: Recipe, data: Tensor) -> Tensor:
    """Losses [steps] of plain gradient descent; model is changed."""
    losses = []
    for x, target in data.unbind():
        torch.compiler.cudagraph_mark_step_begin()
        with octavo.autocast(recipe=recipe):
            y = call(x)
        loss = (y.float() - target.float()).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.detach().clone())
    return torch.stack(losses)


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """Context: how many CUDA graphs were replayed."""
    count, real = [0], torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        real(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    try:
        yield count
    finally:
        torch.cuda.CUDAGraph.replay = real  # type: ignore[method-assign]


def compile_times(seconds: float = 70.0, target: float = 1.3) -> Result:
    """Three steps of twelve blocks, each compiled, from an empty cache of the compiler; bf16 and FP8 take turns.

    The steps themselves are milliseconds of it. Medians over as many rounds as fit.
    """
    recipes: dict[str, Recipe | None] = {"bf16": None, "delayed": RECIPES["delayed"], "current": RECIPES["current"]}
    # What the compiler loads, the worker processes that it starts, and the kernels of libraries are no variant's.
    torch.compile(lambda x: (x.sin() * 2).sum(-1))(
        torch.ones(64, 64, device="cuda", requires_grad=True)
    ).sum().backward()
    for recipe in recipes.values():
        training = Training(recipe, "eager", TWELVE)
        for _ in range(2):
            training.step(*random_batch(TWELVE))
    times: dict[str, list[float]] = {name: [] for name in recipes}
    begun, rounds = time.monotonic(), 0
    while rounds == 0 or (time.monotonic() - begun) * (rounds + 1) / rounds <= seconds:
        order = list(recipes) if rounds % 2 == 0 else list(recipes)[::-1]
        for name in order:
            times[name].append(_first_steps(recipes[name]))
        rounds += 1
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    ratios = {f"{name}_ratio": round(medians[name] / medians["bf16"], 3) for name in medians if name != "bf16"}
    figures = {f"{name}_s": [round(sample, 2) for sample in samples] for name, samples in times.items()}
    return {"ok": all(ratio <= target for ratio in ratios.values()), "target": target, **ratios, **figures}


def _first_steps(recipe: Recipe | None, steps: int = 3) -> float:
    from torch._inductor.utils import fresh_inductor_cache

    gc.collect()
    torch._dynamo.reset()
    with fresh_inductor_cache():
        training, batch = Training(recipe, "blocks", TWELVE), random_batch(TWELVE)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            training.step(*batch)
        torch.cuda.synchronize()
        return time.perf_counter() - start
