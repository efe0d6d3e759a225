"""Whole training steps: wall time, peak memory and rate of each variant of each model, one alone on the device."""

from __future__ import annotations

import time

import torch

from octavo.bench.models import CASES, ModelCase
from octavo.bench.record import Row
from octavo.bench.session import Session
from octavo.bench.timing import WALL, timed_steps
from octavo.bench.training import prepare_training
from octavo.bench.variants import ON_CPU, ON_GPU, QUICK, Variant, parse_variant, variant_reason

# About what a variant takes on an H200, building and compiling included, before one of its kind was measured.
_EAGER_SECONDS, _COMPILED_SECONDS, _WHOLE_SECONDS = 8.0, 25.0, 90.0
# How the time of the section is shared out among models.
_WEIGHTS = {"vit": 5.0, "llama": 4.0, "gpt2": 2.0, "vit-layers": 4.0}


def chosen_variants(session: Session) -> list[Variant]:
    """What the settings name, or what suits the device."""
    usual = (QUICK if session.settings.quick else ON_GPU) if session.on_gpu else ON_CPU
    return [parse_variant(key) for key in session.settings.variants or usual]


def measure_steps(session: Session) -> None:
    """Rows `step`: every variant of every model; BF16 once more at the end, so that drift shows."""
    variants = chosen_variants(session)
    models = session.settings.models
    if any(variant.compiled for variant in variants):
        load_compiler(session.device)
    for place, key in enumerate(models):
        session.deadline.begin(_WEIGHTS[key], [_WEIGHTS[later] for later in models[place + 1 :]])
        try:
            measure_model(session, CASES[key], variants)
        finally:
            session.deadline.end()


def load_compiler(device: torch.device) -> None:
    """Let the compiler load what it needs once, so that the first variant's warm-up does not pay for all of them."""
    torch.compile(torch.sin)(torch.ones(16, device=device, requires_grad=True)).sum().backward()


def measure_model(session: Session, case: ModelCase, variants: list[Variant]) -> None:
    """The variants of one model, one after another, each freed before the next is built."""
    samples = case.batch if session.on_gpu else case.small_batch
    for variant in variants:
        measure_variant(session, case, variant, samples)
    references = [variant for variant in variants if variant.library == "torch" and not variant.graph]
    if len(variants) > len(references) > 0:
        measure_variant(session, case, references[-1], samples, repeat=True)


def measure_variant(
    session: Session, case: ModelCase, variant: Variant, samples: int, *, repeat: bool = False, kind: str = "step"
) -> None:
    """One row, measured or with the reason why not."""
    about: Row = {"kind": kind, "model": case.key, "rival": variant.key, "library": variant.library}
    about |= {"recipe": variant.recipe, "compiled": variant.compiled, "graph": variant.graph}
    about |= {"batch": samples, "repeat": repeat, "method": WALL}
    reason = case.reason() or variant_reason(variant, session.device)
    if reason is not None:
        session.skipped(about, reason)
        return
    if session.fits(about, seconds_needed(session, case, variant)):
        start = time.monotonic()
        with session.recorded_if_failed(about):
            session.measured(about, step_figures(session, case, variant, samples))
        session.costs[case.key, variant.compiled] = time.monotonic() - start


def seconds_needed(session: Session, case: ModelCase, variant: Variant) -> float:
    """About what a variant will take: as long as the last one that was compiled as it is."""
    usual = {"": _EAGER_SECONDS, "blocks": _COMPILED_SECONDS, "reduced": _COMPILED_SECONDS, "whole": _WHOLE_SECONDS}[
        variant.compiled
    ]
    return session.costs.get((case.key, variant.compiled), usual) if session.on_gpu else 0.0


def step_figures(session: Session, case: ModelCase, variant: Variant, samples: int) -> Row:
    """Train a fresh model for a few steps -> time, rate, memory.

    `build_s` is building, converting and, for a captured variant, capturing; `warm_s` the first steps, in which the
    compiler works. A replay allocates nothing: what a graph holds was allocated when it was recorded. So memory counts
    from before the recording: a captured step's is made while it is built, the compiler's in the first steps.
    """
    session.forget_compiled()
    _count_memory_anew(session)
    # What earlier sections still hold is no part of the step.
    before = torch.cuda.memory_allocated(session.device) / 2**30 if session.on_gpu else 0.0
    small = not session.on_gpu
    start = time.perf_counter()
    # What eager steps before compiling took and left is no part of the compiled ones.
    training = prepare_training(
        case,
        variant,
        small=small,
        samples=samples,
        device=session.device,
        seed=session.settings.seed,
        ran_eager=lambda: _count_memory_anew(session),
    )
    session.synchronise()
    built = time.perf_counter()
    warm_up, count = (3, 6) if session.settings.quick or small else (6, 12)
    for _ in range(warm_up):
        training.step()
    session.synchronise()
    warmed = time.perf_counter()
    if session.on_gpu and not replays(variant):
        torch.cuda.reset_peak_memory_stats(session.device)
    timing = timed_steps(training.step, count, session.synchronise)
    sizes = case.small if small else case.sizes
    things = samples * case.per_sample(sizes)
    figures = timing.row() | {"per_s": things / timing.median, "unit": case.unit}
    figures |= {"build_s": round(built - start, 2), "warm_s": round(warmed - built, 2)}
    figures |= {"converted": training.layers, "parameters": training.parameters, "loss": float(training.loss())}
    figures |= memory_figures(session)
    if figures["peak_gib"] is not None:
        figures["peak_gib"] = round(figures["peak_gib"] - before, 3)
    return figures


def _count_memory_anew(session: Session) -> None:
    session.release()
    if session.on_gpu:
        torch.cuda.reset_peak_memory_stats(session.device)


def replays(variant: Variant) -> bool:
    """Whether a measured step replays what was recorded before: as told, or as the compiler does."""
    return bool(variant.graph) or variant.compiled == "reduced"


def memory_figures(session: Session) -> Row:
    """Peaks since the last reset: what tensors took, and what the allocator held for them."""
    if not session.on_gpu:
        return {"peak_gib": None, "reserved_gib": None}
    return {
        "peak_gib": round(torch.cuda.max_memory_allocated(session.device) / 2**30, 3),
        "reserved_gib": round(torch.cuda.max_memory_reserved(session.device) / 2**30, 3),
    }
