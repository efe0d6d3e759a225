"""Models at work: prefill, decoding, time to the first token and loading, in 16 bits and in FP8, GPT-2 and Llama.

Every rival serves a copy of one model with random weights. All of them are alive at once and take turns. What a time
limit leaves out is what says least: forms and rivals stand in that order.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from octavo.bench.cases.ceilings import measure_copy, measure_products
from octavo.bench.cases.steps import memory_figures
from octavo.bench.models import CASES, ModelCase
from octavo.bench.record import Row
from octavo.bench.serving_floors import Work, decode_work, prefill_work, work_of
from octavo.bench.serving_measures import (
    DECODE,
    FIRST_TOKEN,
    LOADING,
    PREFILL,
    REPLAYED,
    Form,
    Prepared,
    prepared,
    prompts_of,
)
from octavo.bench.serving_rivals import (
    Served,
    ServingRival,
    is_native,
    linear_shapes,
    model_bytes,
    serving_rivals,
)
from octavo.bench.session import Session
from octavo.bench.shapes import SERVING_PRODUCTS
from octavo.bench.timing import interleaved

MODELS = ("llama", "gpt2")


class _Plan(NamedTuple):
    """Prompts (sequences, tokens), sequences that are decoded, tokens of their cache, and steps in a row."""

    prompts: tuple[tuple[int, int], ...]
    decoded: tuple[int, ...]
    cache: int
    steps: int
    eager_steps: int


# An eager step is bound by the host and takes long: few of them in a row say as much.
_ON_GPU = _Plan(((1, 2048), (8, 1024)), (1, 32), 512, 32, 2)
_ON_CPU = _Plan(((1, 16),), (1, 2), 16, 4, 4)
# How the time of the section is shared out among them.
_WEIGHTS = {"llama": 2.0, "gpt2": 1.0}
# About what it takes on an H200 to build a rival, or to measure a form of all of them.
_BUILD_S, _FORM_S = 3.0, 4.0
# To write and read the files of a model: of 4 GB in 16 bits, and of 0.25 GB.
_LOADING_S = {"llama": 30.0, "gpt2": 5.0}
_BUDGET_S = 2.5
_LOADED = ("bf16", "octavo-rowwise")
_CALIBRATION_TOKENS = 512
_ABOUT = {"kind": "inference"}


class _Alive(NamedTuple):
    """A rival, what it serves, and the bytes of that."""

    rival: ServingRival
    served: Served
    bytes: int


class _Ready(NamedTuple):
    about: Row
    prepared: Prepared
    figures: Row


def measure_inference(session: Session) -> None:
    """Rows `inference`, and the ceilings that their floors come from, unless there are any."""
    with session.spending("ceilings"):
        measure_copy(session)
        for shape in SERVING_PRODUCTS if session.on_gpu else session.shapes.matmuls:
            measure_products(session, shape)
    models = [key for key in MODELS if key in session.settings.models]
    if not models:
        session.skipped(_ABOUT, f"--models names none that is served here: {', '.join(MODELS)}")
    for place, key in enumerate(models):
        session.deadline.begin(_WEIGHTS[key], [_WEIGHTS[later] for later in models[place + 1 :]])
        about: Row = {**_ABOUT, "model": key}
        try:
            with session.recorded_if_failed(about):
                measure_model(session, CASES[key], about)
        finally:
            session.deadline.end()


def forms_of(session: Session, sizes: dict[str, int]) -> list[Form]:
    """What is taken of a model, of which no sequence may be longer than its positions."""
    plan = _ON_GPU if session.on_gpu else _ON_CPU
    few = 1 if session.settings.quick else None
    prompts = [(batch, min(tokens, sizes["tokens"])) for batch, tokens in plan.prompts[:few]]
    cache = min(plan.cache, sizes["tokens"])

    def of(graph: str, steps: int) -> tuple[list[Form], list[Form], Form]:
        return (
            [Form(PREFILL, batch, tokens, graph) for batch, tokens in prompts],
            [Form(DECODE, batch, cache // 2, graph, cache, steps) for batch in plan.decoded[:few]],
            Form(FIRST_TOKEN, *prompts[0], graph),
        )

    prefills, decodes, first = of(REPLAYED, plan.steps)
    eager_prefills, eager_decodes, eager_first = of("", plan.eager_steps)
    return [*prefills, *decodes, eager_first, first, Form(LOADING), *eager_prefills, *eager_decodes]


def measure_model(session: Session, case: ModelCase, about: Row) -> None:
    """Every form of one model."""
    if (reason := case.reason()) is not None:
        session.skipped(about, reason)
        return
    if not session.fits(about, _BUILD_S if session.on_gpu else 0.0):
        return
    sizes = case.sizes if session.on_gpu else case.small
    forms = forms_of(session, sizes)
    alive, work = _build(session, case, sizes, about)
    for form in forms:
        own = about | {"phase": form.phase, "batch": form.batch, "tokens": form.tokens, "graph": form.graph}
        own["method"] = form.method
        if form.graph and not session.on_gpu:
            session.skipped(own, "CUDA graphs need a GPU")
            continue
        seconds = _LOADING_S[case.key] if form.phase == LOADING else _FORM_S
        if session.fits(own, seconds if session.on_gpu else 0.0):
            _measure_form(session, form, alive, work, own)
            if session.on_gpu:
                # Without the collection of `release`, which takes long where many modules are alive.
                torch.cuda.empty_cache()


def _build(session: Session, case: ModelCase, sizes: dict[str, int], about: Row) -> tuple[list[_Alive], Work]:
    """The model in BF16, drawn anew, and a copy of it in every hand."""
    torch.manual_seed(session.settings.seed)
    with session.spending("building"), _default_dtype(torch.bfloat16), session.device:
        model = case.build(sizes)
    model.eval().requires_grad_(False)
    work = work_of(sizes, linear_shapes(model))
    prompts = prompts_of(session, Served(model, 0), Form(PREFILL, 1, min(_CALIBRATION_TOKENS, sizes["tokens"])))
    alive = []
    with session.spending("importing peers"):
        rivals = serving_rivals(session.device)
    for rival in rivals:
        own: Row = about | {"rival": rival.key, "library": rival.library, "recipe": rival.recipe}
        if rival.reason is not None:
            session.skipped(own, rival.reason)
        elif session.fits(own, _BUILD_S if session.on_gpu else 0.0):
            try:
                with session.spending(rival.library):
                    alive.append(_alive(session, rival, model, prompts))
            except Exception as error:  # whatever a rival raises is a finding
                session.failed(own, error)
    return alive, work


def _alive(session: Session, rival: ServingRival, model: nn.Module, prompts: torch.Tensor) -> _Alive:
    before = _allocated(session)
    served = rival.serve(model, prompts)
    # Of Transformer Engine's tensors no inside is told, so that it is what the allocator gave.
    held = _allocated(session) - before if rival.library == "te" else model_bytes(served.model)
    return _Alive(rival, served, held)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """So that parameters are drawn in it, and what a model needs in float32 stays so."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _allocated(session: Session) -> int:
    return torch.cuda.memory_allocated(session.device) if session.on_gpu else 0


def _measure_form(session: Session, form: Form, alive: list[_Alive], work: Work, about: Row) -> None:
    ready: dict[str, _Ready] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in alive:
            rival = one.rival
            if not (rival.decodes or form.phase in (PREFILL, FIRST_TOKEN)):
                continue
            if form.phase == LOADING and rival.key not in _LOADED:
                continue
            own = about | {"rival": rival.key, "library": rival.library, "recipe": rival.recipe}
            try:
                with session.spending(f"preparing {form.phase}"):
                    ready[rival.key] = _prepare(session, form, one, work, own, Path(folder))
            except Exception as error:  # whatever a rival raises is a finding
                session.failed(own, error)
        try:
            with session.spending(f"measuring {form.phase}"):
                _take(session, form, ready)
        except Exception as error:
            for made in ready.values():
                session.failed(made.about, error)


def _take(session: Session, form: Form, ready: dict[str, _Ready]) -> None:
    """All rivals take turns; BF16 is measured twice, so that the noise shows."""
    measures = {key: one.prepared.measure for key, one in ready.items()}
    if "bf16" in measures and form.phase != LOADING:
        measures["bf16-again"] = measures["bf16"]
    rounds, dropped = (3, 1) if form.phase == LOADING else (session.rounds, session.dropped)
    budget = _BUDGET_S if session.on_gpu else None
    for key, timing in interleaved(measures, rounds, dropped, budget).items():
        one = ready[key.removesuffix("-again")]
        figures = timing.row() | one.figures
        if form.things:
            figures |= {"per_s": form.things / timing.median, "unit": "tokens/s"}
        elif form.phase == LOADING:
            figures |= {"per_s": one.figures["weight_bytes"] / timing.median, "unit": "B/s"}
        session.measured(one.about | {"rival": key}, figures)


def _prepare(session: Session, form: Form, one: _Alive, work: Work, about: Row, folder: Path) -> _Ready:
    """What is measured of a rival, tried once, and its memory: its own, whatever else is alive beside it."""
    start = time.monotonic()
    before = _allocated(session)
    if session.on_gpu:
        session.synchronise()
        torch.cuda.reset_peak_memory_stats(session.device)
    made = prepared(session, form, one.served, folder)
    made.measure()
    peak = memory_figures(session)["peak_gib"]
    figures: Row = {"weight_bytes": one.bytes, "converted": one.served.layers, "native": is_native(one.served.model)}
    figures["peak_gib"] = None if peak is None else round(peak + (one.bytes - before) / 2**30, 3)
    figures["build_s"] = round(time.monotonic() - start, 3)
    return _Ready(about, made, figures | _work(form, one.rival, work))


def _work(form: Form, rival: ServingRival, work: Work) -> Row:
    """What a floor is computed from."""
    figures: dict[str, Any] = {"products": rival.products}
    if form.phase == PREFILL:
        return figures | prefill_work(work, form.batch, form.tokens, rival.cost)
    if form.phase == DECODE:
        # The middle of the tokens that are decoded in a row.
        return figures | decode_work(work, form.batch, form.tokens + form.steps // 2, rival.cost)
    return {}
