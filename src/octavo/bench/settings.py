"""What a bench is asked to measure; complete and checked when built."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from octavo.bench.variants import parse_variant

SECTIONS = ("ceilings", "casts", "linear", "host", "steps", "layers", "inference", "article")
# What takes minutes of its own is asked for by name: twenty TransformerLayers a shape, served models, the article's
# batch sizes.
DEFAULT_SECTIONS = SECTIONS[:-3]
MODELS = ("vit", "llama", "gpt2", "vit-layers")
DEFAULT_MODELS = MODELS[:-1]
RECORD = "record.jsonl"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The choices of one run.

    Attributes:
        out: the folder of the record and the page.
        only: sections, of SECTIONS.
        models: of the steps, of MODELS; those of them that are served, too.
        variants: of the steps, such as "octavo-delayed-compiled"; None for those of the device.
        quick: fewer shapes, rounds and steps.
        time_limit_s: what does not fit is left out, and the record says so.
        device: "cuda", "cuda:N" or "cpu".
        seed: of data and models.
        memory_limit_gib: of the article's largest batch.
        commit: for the record, where git does not know it.
    """

    out: Path
    only: tuple[str, ...] = DEFAULT_SECTIONS
    models: tuple[str, ...] = DEFAULT_MODELS
    variants: tuple[str, ...] | None = None
    quick: bool = False
    time_limit_s: float | None = None
    device: str = "cuda"
    seed: int = 0
    memory_limit_gib: float = 20.0
    commit: str | None = None

    def __post_init__(self) -> None:
        _check(self.only, SECTIONS, "--only")
        _check(self.models, MODELS, "--models")
        if self.record_path.exists():
            raise ValueError(f"{self.record_path} exists and would be replaced: move it, or choose another --out")
        for key in self.variants or ():
            parse_variant(key)
        if self.time_limit_s is not None and self.time_limit_s <= 0:
            raise ValueError(f"the time limit is {self.time_limit_s} s: it must be positive")
        if not 0 < self.memory_limit_gib < float("inf"):
            raise ValueError(f"the memory limit is {self.memory_limit_gib} GiB: it must be positive and finite")
        kind = self.device.partition(":")[0]
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"device {self.device!r} is unknown; choose cpu, cuda, or cuda:N")
        if kind == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device here; choose --device cpu, which checks the path and no speed")

    @property
    def record_path(self) -> Path:
        """Where the rows go."""
        return self.out / RECORD

    @property
    def page_path(self) -> Path:
        """Where the page goes."""
        return self.out / "report.html"


def _check(chosen: tuple[str, ...], known: tuple[str, ...], option: str) -> None:
    for name in chosen:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, which is unknown; choose from {', '.join(known)}")
    if not chosen:
        raise ValueError(f"{option} names nothing; choose from {', '.join(known)}")
