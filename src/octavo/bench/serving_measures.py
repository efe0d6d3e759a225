"""How each figure of a served model is taken: prefill, decoding, the time to the first token, loading.

    prefill        the device's time of one replay of a CUDA graph; eager, wall time until the device is done
    decode         tokens in a row, one replay of a CUDA graph each, or eager; seconds of one
    first token    by the host's clock: from prompts in the host's memory to the token there
    loading        from a safetensors file, written beforehand and so in the page cache, until the weights are in the
                   model on its device

Figures of two methods are never compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from octavo.bench.cuda_graphs import CudaGraphs
from octavo.bench.serving import Decoder, Prefill
from octavo.bench.serving_rivals import Served
from octavo.bench.session import Session
from octavo.bench.timing import GRAPH, HOST, WALL, Call, GraphTimer, Measure

PREFILL, DECODE, FIRST_TOKEN, LOADING = "prefill", "decode", "first token", "loading"
REPLAYED = "replayed"


@dataclass(frozen=True)
class Form:
    """One figure that is taken of every rival.

    Attributes:
        phase: PREFILL, DECODE, FIRST_TOKEN or LOADING.
        batch: sequences.
        tokens: of each prompt; while decoding, that are in the cache at first.
        graph: REPLAYED or "".
        cache: tokens that the cache has room for, while decoding.
        steps: tokens in a row, while decoding.
    """

    phase: str
    batch: int = 1
    tokens: int = 0
    graph: str = ""
    cache: int = 0
    steps: int = 1

    @property
    def things(self) -> int:
        """Tokens that a call reads or writes; 0 where a rate says nothing."""
        return {PREFILL: self.batch * self.tokens, DECODE: self.batch}.get(self.phase, 0)

    @property
    def method(self) -> str:
        """How it is timed."""
        if self.phase in (PREFILL, DECODE):
            return GRAPH if self.graph else WALL
        return HOST if self.phase == FIRST_TOKEN else WALL


class Prepared(NamedTuple):
    """What is measured, and what must stay alive for it."""

    measure: Measure
    holds: object


def prepared(session: Session, form: Form, served: Served, folder: Path) -> Prepared:
    """Warm up, capture if it is to be replayed, or write what is to be loaded.

    Args:
        session: of the device.
        form: what is taken.
        served: by a rival.
        folder: for files to be loaded.
    """
    return _OF_PHASE[form.phase](session, form, served, folder)


def prompts_of(session: Session, served: Served, form: Form) -> Tensor:
    """Tokens int64 [batch, tokens], the same for every rival."""
    generator = torch.Generator().manual_seed(session.settings.seed)
    shape = (form.batch, form.tokens)
    return torch.randint(0, served.model.config.vocab_size, shape, generator=generator).to(session.device)


def _prefill(session: Session, form: Form, served: Served, folder: Path) -> Prepared:
    call = Prefill(served.model, prompts_of(session, served, form), served.context)
    if form.graph:
        # A replay of one call: a long prompt takes long enough.
        return Prepared(GraphTimer(CudaGraphs(), least=1).prepare([call]), call)
    return Prepared(partial(_until_done, session, call), call)


def _decode(session: Session, form: Form, served: Served, folder: Path) -> Prepared:
    decoder = Decoder(served.model, prompts_of(session, served, form), form.cache, served.context)
    step: Call = decoder.step
    graphs = CudaGraphs() if form.graph else None
    if graphs is not None:
        step = graphs.capture([decoder.step])

    def steps() -> None:
        for _ in range(form.steps):
            step()

    def measure() -> float:
        decoder.reset()
        if graphs is not None:
            return graphs.seconds(steps) / form.steps
        return _until_done(session, steps) / form.steps

    return Prepared(measure, (decoder, step))


def _first_token(session: Session, form: Form, served: Served, folder: Path) -> Prepared:
    prompts = prompts_of(session, served, form)
    waiting = prompts.cpu()
    prefill = Prefill(served.model, prompts, served.context)
    run: Call = CudaGraphs().capture([prefill]) if form.graph else prefill

    def answer() -> list[int]:
        prefill.prompts.copy_(waiting)
        run()
        tokens: list[int] = prefill.token.tolist()  # waits for the device
        return tokens

    return Prepared(partial(_until_done, session, answer), (prefill, run))


def _loading(session: Session, form: Form, served: Served, folder: Path) -> Prepared:
    path = folder / f"{len(list(folder.iterdir()))}.safetensors"
    save_model(served.model, str(path))

    def load() -> None:
        load_model(served.model, path, strict=True, device=str(session.device))

    return Prepared(partial(_until_done, session, load), path)


def _until_done(session: Session, call: Call) -> float:
    """Seconds of a call, from a device at rest until it is done."""
    session.synchronise()
    start = time.perf_counter()
    call()
    session.synchronise()
    return time.perf_counter() - start


_OF_PHASE: dict[str, Callable[[Session, Form, Served, Path], Prepared]] = {
    PREFILL: _prefill,
    DECODE: _decode,
    FIRST_TOKEN: _first_token,
    LOADING: _loading,
}
