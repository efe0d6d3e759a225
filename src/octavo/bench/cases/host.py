"""Host time of one small Linear: what a call costs before the device has anything to do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.bench.cases.linear import linear_of, seconds_to_build
from octavo.bench.record import Row
from octavo.bench.rivals import Built, Rival, host_rivals
from octavo.bench.session import Session
from octavo.bench.timing import Call, Measure, interleaved

FORWARD, BOTH = "forward", "forward+backward"
_WARM_UP_CALLS = 10
# Rounds take about so long; one of all rivals takes half a second on a slow host.
_MEASURING_S = 8.0


def measure_host(session: Session) -> None:
    """Rows `host`: every rival, forward without gradients, and forward with backward."""
    m, k, n = session.shapes.host
    x = torch.randn(m, k, device=session.device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(m, n, device=session.device, dtype=torch.bfloat16)
    weight = torch.randn(n, k, device=session.device, dtype=torch.bfloat16)
    session.forget_compiled()
    measures: dict[str, Measure] = {}
    abouts: dict[str, Row] = {}
    for rival in host_rivals(session.device):
        about = {"kind": "host", "shape": [m, k, n], "rival": rival.key, "library": rival.library}
        about |= {"recipe": rival.recipe, "method": session.host_timer.method}
        if rival.reason is not None:
            session.skipped(about, rival.reason)
        elif session.fits(about, seconds_to_build(session, rival.library) if rival.key.endswith("-compiled") else 0.0):
            try:
                with session.spending(rival.library):
                    for which, call in _calls(rival, linear_of(weight), x, dy).items():
                        measures[f"{rival.key} {which}"] = session.host_timer.prepare([call])
                        abouts[f"{rival.key} {which}"] = about | {"pass": which}
            except Exception as error:  # whatever a rival raises is a finding
                session.failed(about, error)
    with session.spending("measuring"):
        timings = interleaved(measures, session.rounds, session.dropped, _MEASURING_S if session.on_gpu else None)
    for name, timing in timings.items():
        reference = timings.get(f"bf16 {abouts[name]['pass']}")
        ratio = None if reference is None else timing.median / reference.median
        session.measured(abouts[name], timing.row("us") | {"ratio": ratio})


def _calls(rival: Rival, linear: nn.Linear, x: Tensor, dy: Tensor) -> dict[str, Call]:
    """The calls of one rival, warmed up."""
    built = rival.build(linear)
    calls = {FORWARD: _forward(built, x), BOTH: _both(built, x, dy)}
    for turn in range(_WARM_UP_CALLS):
        for call in calls.values():
            call()
        if turn == 0:
            built.settle()
    return calls


def _forward(built: Built, x: Tensor) -> Call:
    def call() -> None:
        with torch.no_grad(), built.context():
            built.forward(x)

    return call


def _both(built: Built, x: Tensor, dy: Tensor) -> Call:
    weight = built.weight

    def call() -> None:
        x.grad = weight.grad = None
        with built.context():
            y = built.forward(x)
        y.backward(dy)

    return call
