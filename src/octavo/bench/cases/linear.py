"""One Linear, forward and backward, on the device's time: every rival in turn, beside the three products alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octavo.bench.cases.ceilings import measure_copy, scaled_mm_call
from octavo.bench.cases.steps import load_compiler
from octavo.bench.cuda_graphs import KernelTimer, num_sets
from octavo.bench.derived import restated
from octavo.bench.operands import Cast, current_cast, rowwise_cast
from octavo.bench.record import Row
from octavo.bench.rivals import Built, Rival, linear_rivals
from octavo.bench.session import MEASURED, Session, reason_of
from octavo.bench.shapes import Shape
from octavo.bench.timing import Call, Measure, Timer, Timing, interleaved

# The three products alone, by the granularity of their scales.
PRODUCTS: dict[str, Callable[[bool], Cast]] = {"gemms": current_cast, "gemms-rowwise": lambda gradient: rowwise_cast()}
_WARM_UP_STEPS = 3
# Building a torchao layer compiles it: about so long, until one has been built in this run.
_SECONDS = {"torchao": 8.0}
# The rounds of one shape take about so long: 17 rivals of 5.5 ms and four calls each have twelve. (Medians of five
# differed by 3 % at a card's limit of power.)
_MEASURING_S = 6.0
# Of the time, the first shape gets more: peers are loaded there, and caches are cold.
_FIRST_WEIGHT = 3.0


class Prepared(NamedTuple):
    """A rival that is ready: how it is measured, what must stay alive until then, and its calls if it may be its twin.

    A captured graph keeps neither layers nor inputs alive.
    """

    measure: Measure
    about: Row
    holds: object
    calls: list[Call] | None = None


class Data(NamedTuple):
    """Sets of inputs that take turns: x [M, K] and dy [M, N] in bf16, and a weight [N, K]."""

    inputs: list[Tensor]
    gradients: list[Tensor]
    weight: Tensor


def measure_linears(session: Session) -> None:
    """Rows `linear`: every rival at every shape."""
    with session.spending("copy"):
        measure_copy(session)
    rivals = linear_rivals(session.device)
    if any(rival.library == "torchao" and rival.reason is None for rival in rivals):
        # Where it fails the layers that need it fail too, each with a row that says why.
        with session.spending("compiler"), suppress(Exception):
            load_compiler(session.device)
    shapes = session.shapes.linears
    for place, shape in enumerate(shapes):
        # Each shape has its share of the time, so that none is left out whole for what others compile.
        session.deadline.begin(_FIRST_WEIGHT if place == 0 else 1.0, [1.0] * (len(shapes) - place - 1))
        try:
            if session.fits({"kind": "linear", "rival": "bf16", "shape": list(shape)}, 5.0 if session.on_gpu else 0.0):
                _measure_shape(session, shape, rivals)
                session.release()
        finally:
            session.deadline.end()


def make_data(shape: Shape, sets: int, device: torch.device) -> Data:
    """N(0, 1) data of one shape."""
    m, k, n = shape
    bf16 = torch.bfloat16
    inputs = [torch.randn(m, k, device=device, dtype=bf16).requires_grad_() for _ in range(sets)]
    gradients = [torch.randn(m, n, device=device, dtype=bf16) for _ in range(sets)]
    return Data(inputs, gradients, torch.randn(n, k, device=device, dtype=bf16))


def _measure_shape(session: Session, shape: Shape, rivals: list[Rival]) -> None:
    m, k, n = shape
    session.forget_compiled()
    sets = num_sets(2 * m * (k + n), session.cache_bytes)
    data = make_data(shape, sets, session.device)
    prepared: dict[str, Prepared] = {}
    with session.spending("products alone"):
        _prepare_products(session, shape, data, prepared)
    for rival in rivals:
        about = {"kind": "linear", "shape": list(shape), "rival": rival.key, "sets": sets}
        about |= {"library": rival.library, "recipe": rival.recipe}
        if rival.reason is not None:
            session.skipped(about, rival.reason)
        elif session.fits(about, seconds_to_build(session, rival.library) if rival.library == "torchao" else 0.0):
            with session.spending(rival.library):
                _prepare(session, rival, data, about, prepared)
    with session.spending("measuring"):
        timings = _interleaved(session, prepared)
        if any(one.about["method"] == KernelTimer.method for one in prepared.values()):
            _add_kernel_twins(session, prepared, timings)
    rows = [prepared[name].about | {"status": MEASURED} | timing.row() for name, timing in timings.items()]
    kept = [row for row in session.record.rows if row["kind"] in ("ceiling", "cast")]
    for row in restated([*kept, *rows])[len(kept) :]:
        session.measured(row, {})


def _prepare_products(session: Session, shape: Shape, data: Data, prepared: dict[str, Prepared]) -> None:
    """The three products alone, of each kind."""
    for name, cast in PRODUCTS.items():
        about: Row = {"kind": "linear", "shape": list(shape), "rival": name, "library": "torch", "recipe": ""}
        about["sets"] = len(data.inputs)
        try:
            calls = _product_calls(data, cast)
            for call in calls:
                call()
            method = {"method": session.timer.method}
            prepared[name] = Prepared(session.timer.prepare(calls), about | method, calls)
        except Exception as error:  # a kind of product that torch refuses here
            session.skipped(about, reason_of(error))


def seconds_to_build(session: Session, library: str) -> float:
    """About how long a compiled layer of a library takes until it is measured: as long as the last one took."""
    return session.costs.get(("layer", library), _SECONDS.get(library, 0.0)) + _MEASURING_S


def _prepare(session: Session, rival: Rival, data: Data, about: Row, prepared: dict[str, Prepared]) -> None:
    start = time.monotonic()
    try:
        built = rival.build(linear_of(data.weight))
        calls = step_calls(built, data)
        for _ in range(_WARM_UP_STEPS):
            with built.context():
                calls[0]()
            built.settle()
        measure, method = _timer(session, rival.key, built, calls)
        twin = calls if rival.library in ("torch", "octavo") else None
        spent = time.monotonic() - start
        session.costs["layer", rival.library] = spent
        prepared[rival.key] = Prepared(measure, about | {"method": method, "build_s": round(spent, 3)}, built, twin)
    except Exception as error:  # whatever a rival raises is a finding
        session.failed(about, error)


def linear_of(weight: Tensor) -> nn.Linear:
    """An nn.Linear without a bias that holds a copy of the weight [N, K]."""
    n, k = weight.shape
    linear = nn.Linear(k, n, bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


def step_calls(built: Built, data: Data) -> list[Call]:
    """Forward and backward on each set of inputs; results are dropped."""

    def step(x: Tensor, dy: Tensor) -> Call:
        return lambda: torch.autograd.grad(built.forward(x), [x, built.weight], dy)

    return [step(x, dy) for x, dy in zip(data.inputs, data.gradients, strict=True)]


def _timer(session: Session, key: str, built: Built, calls: list[Call]) -> tuple[Measure, str]:
    """How the calls are measured: by the session's timer; what cannot be captured, by its kernels."""
    timer: Timer = session.timer
    if key not in session.not_capturable:
        try:
            with built.context():  # entered and left outside of a graph: what an exit does is not a layer's time
                return timer.prepare(calls), timer.method
        except Exception:
            if not session.on_gpu:
                raise
            session.not_capturable.add(key)
    timer = KernelTimer()
    torch.cuda.synchronize()

    measure = timer.prepare(calls)

    def measured() -> float:
        with built.context():
            return measure()

    measured()  # what fails under the profiler too fails here, alone
    return measured, timer.method


def _interleaved(session: Session, prepared: dict[str, Prepared]) -> dict[str, Timing]:
    """Graphs take turns with one another. What is measured by its kernels comes after: a profiler slows the rest."""
    by_kernels = {name for name, one in prepared.items() if one.about["method"] == KernelTimer.method}
    together = {name: one.measure for name, one in prepared.items() if name not in by_kernels}
    timings = interleaved(together, session.rounds, session.dropped, _MEASURING_S if session.on_gpu else None)
    for name in sorted(by_kernels):
        timings |= interleaved({name: prepared[name].measure}, 3, 1)
    return timings


def _add_kernel_twins(session: Session, prepared: dict[str, Prepared], timings: dict[str, Timing]) -> None:
    """Measure BF16 and Octavo by their kernels as well, under names of their own: a peer could not be captured."""
    for name, one in list(prepared.items()):
        if one.about["method"] == KernelTimer.method or one.calls is None or name.endswith("-again"):
            continue
        twin = f"{name}-kernels"
        about = one.about | {"rival": twin, "method": KernelTimer.method}
        try:
            timings |= interleaved({twin: KernelTimer().prepare(one.calls)}, 3, 1)
            prepared[twin] = one._replace(about=about)
        except Exception as error:  # no permission to trace the device
            session.failed(about, error)


def _product_calls(data: Data, make_cast: Callable[[bool], Cast]) -> list[Call]:
    """fprop, dgrad and wgrad on codes that are there already, as torch offers them."""
    cast, cast_gradient = make_cast(False), make_cast(True)
    with torch.no_grad():
        w = cast(data.weight)
        calls = []
        for x_high, dy_high in zip(data.inputs, data.gradients, strict=True):
            x, dy = cast(x_high.detach()), cast_gradient(dy_high)
            fprop = scaled_mm_call(*x.row_wise, *w.row_wise, True)
            dgrad = scaled_mm_call(*dy.row_wise, *w.column_wise, False)
            wgrad = scaled_mm_call(*dy.column_wise, *x.column_wise, False)
            calls.append(_all_of(fprop, dgrad, wgrad))
    return calls


def _all_of(*calls: Call) -> Call:
    def call() -> None:
        for one in calls:
            one()

    return call
