"""Casts to both layouts against copying, in the shapes of the Linears' operands."""

from __future__ import annotations

from functools import partial

import torch

from octavo.bench.cases.ceilings import measure_copy
from octavo.bench.cuda_graphs import num_sets
from octavo.bench.operands import Cast, current_cast, delayed_cast, rowwise_cast
from octavo.bench.roofline import ONE_READ, TWO_READS
from octavo.bench.session import Session
from octavo.bench.timing import Call, Measure, interleaved

# Bytes an element that a cast must move if it reads memory as rarely as it can.
CASTS: dict[str, int] = {
    "delayed": ONE_READ,
    "delayed gradient": ONE_READ,
    "current": TWO_READS,
    "rowwise": TWO_READS,
}
COPIES = ("copy", "copy again")  # the same thing twice: what differs is noise


def measure_casts(session: Session) -> None:
    """Rows `cast`: each cast of each shape, the copy of the same matrix beside it, taking turns."""
    with session.spending("copy"):
        measure_copy(session)
    for shape in session.shapes.casts:
        if session.fits({"kind": "cast", "name": "delayed", "shape": list(shape)}):
            with session.spending("casts"):
                _measure_shape(session, shape)
                session.release()


def _measure_shape(session: Session, shape: tuple[int, int]) -> None:
    elements = shape[0] * shape[1]
    sets = num_sets(2 * elements, session.cache_bytes)
    inputs = [torch.randn(shape, device=session.device, dtype=torch.bfloat16) for _ in range(sets)]
    targets = [torch.empty_like(x) for x in inputs]
    copies: list[Call] = [partial(target.copy_, x) for x, target in zip(inputs, targets, strict=True)]
    about = {"kind": "cast", "shape": list(shape), "method": session.timer.method, "sets": sets}
    measures: dict[str, Measure] = {name: session.timer.prepare(copies) for name in COPIES}
    for name, cast in _casts(session.device).items():
        try:
            measures[name] = session.timer.prepare(_calls(cast, inputs))
        except Exception as error:  # the other casts go on
            session.failed({**about, "name": name}, error)
    timings = interleaved(measures, session.rounds, session.dropped)
    ceiling = session.ceilings.copy
    same = ONE_READ * elements / timings["copy"].median
    for name, timing in timings.items():
        moved = elements * CASTS.get(name, ONE_READ)
        rate = moved / timing.median
        figures = {
            "bytes": moved,
            "per_s": rate,
            "of_copy": None if ceiling is None else rate / ceiling,
            "of_same_copy": rate / same,
        }
        session.measured({**about, "name": name}, timing.row() | figures)


def _casts(device: torch.device) -> dict[str, Cast]:
    return {
        "delayed": delayed_cast(device),
        "delayed gradient": delayed_cast(device, gradient=True),
        "current": current_cast(),
        "rowwise": rowwise_cast(),
    }


def _calls(cast: Cast, inputs: list[torch.Tensor]) -> list[Call]:
    return [partial(cast, x) for x in inputs]
