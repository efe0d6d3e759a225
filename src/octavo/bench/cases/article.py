"""The comparison of the article on ViT-Huge: the largest batch in a limit of memory, and a doubled batch in FP8.

Peak memory grows linearly with the batch, so two measurements tell about where the limit is, and steps of one from
there find it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from octavo.bench.cases.steps import load_compiler, measure_variant, seconds_needed, step_figures
from octavo.bench.models import CASES
from octavo.bench.record import Row
from octavo.bench.session import Session, reason_of
from octavo.bench.variants import parse_variant, variant_reason

MODEL = "vit"
WITHIN_LIMIT = ("bf16", "octavo-delayed", "bf16-compiled", "octavo-delayed-compiled")
# The article compiled the whole model, and doubled the batch in FP8.
DOUBLED = (("bf16-whole", 32), ("octavo-current-whole", 64), ("octavo-delayed-whole", 64), ("bf16-whole", 64))
_PROBES = (8, 24)
_MOST_STEPS = 3
# A search trains at four or five sizes.
_TRAININGS = 5


def measure_article(session: Session) -> None:
    """Rows `batch_limit` of each variant, and rows `step` of the whole model compiled."""
    if not session.on_gpu:
        about: Row = {"kind": "batch_limit", "model": MODEL, "rival": "bf16"}
        session.skipped(about, "it is about the memory of a GPU")
        return
    for key in WITHIN_LIMIT:
        _measure_limit(session, key)
    load_compiler(session.device)
    for key, samples in DOUBLED:
        measure_variant(session, CASES[MODEL], parse_variant(key), samples, kind="article_step")


def _measure_limit(session: Session, key: str) -> None:
    variant, case, limit = parse_variant(key), CASES[MODEL], session.settings.memory_limit_gib
    about: Row = {"kind": "batch_limit", "model": MODEL, "rival": key, "limit_gib": limit}
    reason = case.reason() or variant_reason(variant, session.device)
    if reason is not None:
        session.skipped(about, reason)
    elif session.fits(about, _TRAININGS * seconds_needed(session, case, variant)):
        with session.recorded_if_failed(about):
            found = largest_batch(lambda samples: step_figures(session, case, variant, samples), limit)
            if found is None:
                session.skipped(about, f"not even a batch of 1 fits into {limit:g} GiB")
            else:
                samples, figures = found
                session.measured(about, {"batch": samples} | figures)


def largest_batch(measure: Callable[[int], Row], limit_gib: float) -> tuple[int, Row] | None:
    """The largest batch whose `peak_gib` is within the limit, and its figures; None if there is none.

    `measure` is asked for two batches, then near where their line meets the limit. A batch that does not fit on the
    device at all is one beyond the limit.
    """
    fitting: dict[int, Row] = {}
    too_large = math.inf

    def fits(samples: int) -> bool:
        nonlocal too_large
        try:
            figures = measure(samples)
        except RuntimeError as error:
            if reason_of(error) != "out of memory":
                raise
            figures = {"peak_gib": math.inf}
        if figures["peak_gib"] <= limit_gib:
            fitting[samples] = figures
        else:
            too_large = min(too_large, samples)
        peaks[samples] = figures["peak_gib"]
        return samples in fitting

    peaks: dict[int, float] = {}
    for samples in _PROBES:
        if samples < too_large:
            fits(samples)
    guess = _meeting(peaks, limit_gib)
    for _ in range(_MOST_STEPS):
        if guess in peaks or guess < 1:
            break
        # Up while it fits, down while it does not, and never past what is known to be too large.
        guess = guess + 1 if fits(guess) else guess - 1
        if guess >= too_large:
            break
    if not fitting:
        return (1, fitting[1]) if 1 not in peaks and fits(1) else None
    best = max(fitting)
    return best, fitting[best]


def _meeting(peaks: dict[int, float], limit: float) -> int:
    """Where the line through the first and the last finite peak meets the limit."""
    known = sorted((samples, peak) for samples, peak in peaks.items() if math.isfinite(peak))
    if len(known) < 2 or known[-1][1] <= known[0][1]:
        return max(1, known[0][0] // 2) if known else 1
    (low, at_low), (high, at_high) = known[0], known[-1]
    return max(1, math.floor(low + (limit - at_low) * (high - low) / (at_high - at_low)))
