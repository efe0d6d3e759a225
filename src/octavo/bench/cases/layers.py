"""One TransformerLayer, forward and backward: wall time, host time and peak memory of every rival at every shape."""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.bench.cases.steps import memory_figures
from octavo.bench.layer_rivals import BuiltLayer, LayerRival, layer_rivals
from octavo.bench.record import Row
from octavo.bench.session import Session
from octavo.bench.shapes import LayerShape
from octavo.bench.timing import WALL, Call, Measure, interleaved

# A layer takes about so long until it is measured on an H200, its kernels compiled; a large one in FP8.
_SECONDS = 3.0
_MEASURING_S = 6.0
_WARM_UP_STEPS = 4
# Calls in a row: more of them where a call is short, and never so many that the device's queue fills.
_CALLS = {False: 2, True: 8}
_LARGE = 1 << 24
_HOST_CALLS = 3


class _Ready(NamedTuple):
    """What is measured of a rival, what its rows say, and what must stay alive."""

    wall: Measure
    host: Measure
    about: Row
    figures: Row
    holds: object


def measure_layers(session: Session) -> None:
    """Rows `layer`."""
    shapes = session.shapes.layers
    for place, shape in enumerate(shapes):
        session.deadline.begin(1.0, [1.0] * (len(shapes) - place - 1))
        try:
            _measure_shape(session, shape)
        finally:
            session.deadline.end()
            session.release()


def _measure_shape(session: Session, shape: LayerShape) -> None:
    ready: dict[str, _Ready] = {}
    x, dy = (
        torch.randn(shape.seq, shape.batch, shape.hidden, device=session.device, dtype=torch.bfloat16) for _ in range(2)
    )
    for rival in layer_rivals(session.device):
        about: Row = {"kind": "layer", "shape": list(shape), "rival": rival.key, "library": rival.library}
        about |= {"recipe": rival.recipe, "graph": rival.graph, "method": WALL}
        if rival.reason is not None:
            session.skipped(about, rival.reason)
        elif session.fits(about, _SECONDS if session.on_gpu else 0.0):
            try:
                with session.spending(rival.library), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a recipe that has met no data yet, or a peer's own
                    ready[rival.key] = _prepare(session, rival, shape, x, dy, about)
            except Exception as error:  # whatever a rival raises is a finding
                session.failed(about, error)
            # Not of the session: what others hold is needed still.
            gc.collect()
    with session.spending("measuring"):
        budget = _MEASURING_S if session.on_gpu else None
        walls = interleaved({key: one.wall for key, one in ready.items()}, session.rounds, session.dropped, budget)
        hosts = interleaved({key: one.host for key, one in ready.items()}, session.rounds, session.dropped, budget)
    tokens = shape.seq * shape.batch
    for key, one in ready.items():
        host = {f"host_{name}": value for name, value in hosts[key].row("us").items() if name != "samples"}
        wall = walls[key]
        session.measured(
            one.about, wall.row() | host | one.figures | {"per_s": tokens / wall.median, "unit": "tokens/s"}
        )


def _prepare(session: Session, rival: LayerRival, shape: LayerShape, x: Tensor, dy: Tensor, about: Row) -> _Ready:
    """Build and warm up a rival, and take its memory: its own, whatever else is alive beside it."""
    start = time.monotonic()
    before = _begin_memory(session)
    built = rival.build(shape, x)
    call = step_call(built, x, dy)
    for _ in range(_WARM_UP_STEPS - 1):
        call()
    if session.on_gpu and not rival.graph:
        # What a graph holds was allocated when it was captured, and counts from then on.
        session.synchronise()
        torch.cuda.reset_peak_memory_stats(session.device)
    call()
    session.synchronise()
    peak = memory_figures(session)["peak_gib"]
    figures: Row = {"peak_gib": None if peak is None else round(peak - before, 3)}
    figures["build_s"] = round(time.monotonic() - start, 3)
    calls = _CALLS[shape.hidden * shape.ffn < _LARGE] if session.on_gpu else 1
    host = _host_measure(session, call)
    return _Ready(_wall_measure(session, call, calls), host, about, figures, (built, x, dy))


def _begin_memory(session: Session) -> float:
    """GiB that are held already; peaks count from here."""
    if not session.on_gpu:
        return 0.0
    session.synchronise()
    torch.cuda.reset_peak_memory_stats(session.device)
    return float(torch.cuda.memory_allocated(session.device)) / 2**30


def step_call(built: BuiltLayer, x: Tensor, dy: Tensor) -> Call:
    """Gradients to None, forward in the rival's context, backward; x's gradient is asked for as well."""
    parameters: list[Any] = list(built.layer.parameters())
    leaf = x.detach().requires_grad_()

    def call() -> None:
        leaf.grad = None
        for parameter in parameters:
            parameter.grad = None
        with built.context():
            y = built.forward(leaf)
        y.backward(dy)

    return call


def _wall_measure(session: Session, call: Call, calls: int) -> Measure:
    """Seconds of a call, of several in a row until the device is done."""

    def measure() -> float:
        session.synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        session.synchronise()
        return (time.perf_counter() - start) / calls

    return measure


def _host_measure(session: Session, call: Call) -> Measure:
    """Seconds until a call returns, the queue empty before each: a layer launches far fewer kernels than fill it."""
    calls = _HOST_CALLS if session.on_gpu else 1

    def measure() -> float:
        spent = 0.0
        for _ in range(calls):
            session.synchronise()
            start = time.perf_counter()
            call()
            spent += time.perf_counter() - start
        session.synchronise()
        return spent / calls

    return measure
