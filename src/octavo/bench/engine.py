"""The bench itself: sections in order, each in its share of the time, everything recorded as it is measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from octavo.bench.cases.article import measure_article
from octavo.bench.cases.cast_transpose import measure_casts
from octavo.bench.cases.ceilings import measure_ceilings
from octavo.bench.cases.host import measure_host
from octavo.bench.cases.inference import measure_inference
from octavo.bench.cases.layers import measure_layers
from octavo.bench.cases.linear import measure_linears
from octavo.bench.cases.steps import measure_steps
from octavo.bench.derived import restated
from octavo.bench.environment import run_row
from octavo.bench.peers import NAMES, peer_reason
from octavo.bench.record import BenchRecord, Row
from octavo.bench.session import Session, Watcher, reason_of
from octavo.bench.settings import SECTIONS, BenchSettings
from octavo.bench.targets import target_rows
from octavo.bench.timing import Timer

# How the time is shared out, when there is a limit.
WEIGHTS = {"ceilings": 15.0, "casts": 20.0, "linear": 130.0, "host": 40.0, "steps": 260.0}
WEIGHTS |= {"layers": 90.0, "inference": 150.0, "article": 150.0}
CASES: dict[str, Callable[[Session], None]] = {
    "ceilings": measure_ceilings,
    "casts": measure_casts,
    "linear": measure_linears,
    "host": measure_host,
    "steps": measure_steps,
    "layers": measure_layers,
    "inference": measure_inference,
    "article": measure_article,
}


def run_bench(
    settings: BenchSettings,
    *,
    command: list[str],
    watch: Watcher | None = None,
    timer: Timer | None = None,
) -> list[Row]:
    """Measure what the settings ask for -> the rows of the record, which is in `settings.record_path`.

    A case that fails is a row with its reason. An interruption (KeyboardInterrupt) goes through, and the record holds
    what was measured by then.

    Args:
        settings: what to measure.
        command: of the `run` row.
        watch: hears of every row.
        timer: of device time, instead of the device's own.
    """
    record = BenchRecord(settings.record_path)
    session = Session(settings, record, timer=timer, watch=watch)
    torch.manual_seed(settings.seed)
    session.add(run_row(settings, command))
    for library in NAMES:
        # Before anything runs: Transformer Engine does not import where torch has loaded a part of another cuDNN.
        peer_reason(library, session.device)
    chosen = [name for name in SECTIONS if name in settings.only]
    with _one_thread(session.on_gpu):
        for place, name in enumerate(chosen):
            session.deadline.begin(WEIGHTS[name], [WEIGHTS[later] for later in chosen[place + 1 :]])
            try:
                _run_section(session, name)
            finally:
                session.deadline.end()
    record.replace(restated(record.rows))
    for row in target_rows(record.rows):
        session.add(row)
    return record.rows


@contextmanager
def _one_thread(on_gpu: bool) -> Iterator[None]:
    """On a CPU one thread: the shapes are small, and threads that wait for busy cores would take most of the time."""
    before = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_section(session: Session, name: str) -> None:
    """One section and its `section` row."""
    start = time.monotonic()
    about = {"kind": "section", "name": name}
    status, reason = "done", None
    session.spent = {}
    try:
        with warnings.catch_warnings():
            # Rivals warn of what they deprecate; a record is no place to act on it.
            warnings.simplefilter("ignore")
            CASES[name](session)
    except KeyboardInterrupt:
        session.add({**about, "seconds": time.monotonic() - start, "status": "interrupted", "reason": None})
        raise
    except Exception as error:  # the others go on
        status, reason = "failed", reason_of(error)
    session.release()
    spent = {on: round(seconds, 3) for on, seconds in session.spent.items()}
    seconds = round(time.monotonic() - start, 3)
    session.add({**about, "seconds": seconds, "spent": spent, "status": status, "reason": reason})
