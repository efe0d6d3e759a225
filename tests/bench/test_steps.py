"""Whose peak memory a step's is: a replay allocates nothing, so what it replays counts from before its recording."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench import BenchSettings
from octavo.bench.cases import steps as steps_case
from octavo.bench.models import CASES
from octavo.bench.record import BenchRecord
from octavo.bench.session import Session
from octavo.bench.training import Training
from octavo.bench.variants import parse_variant

# GiB: eager steps before the compiler, what the recording allocates, what steps that allocate do, and what is outside.
EAGER, RECORDING, STEP, OUTSIDE = 22, 19, 18, 7


class Device:
    """The peak that an allocator would tell, of steps of which the first two are recorded if `recording` says so."""

    def __init__(self, recording: str) -> None:
        self.peak, self.recording, self.steps = 0, recording, 0

    def reset(self, device: object) -> None:
        self.peak = OUTSIDE

    def allocate(self, gib: int) -> None:
        self.peak = max(self.peak, gib)

    def build(self, *args: object, ran_eager: Callable[[], None], **options: object) -> Training:
        self.allocate(EAGER)
        ran_eager()
        self.allocate(RECORDING if self.recording == "captured" else OUTSIDE)
        return Training(self.step, lambda: torch.zeros(()), 4, 100)

    def step(self) -> None:
        self.steps += 1
        if not self.recording:
            self.allocate(STEP)
        elif self.recording == "reduced" and self.steps <= 2:
            self.allocate(RECORDING)


@pytest.mark.parametrize(
    ("key", "recording", "peak"),
    [
        ("octavo-delayed", "", STEP),
        ("octavo-delayed-compiled", "", STEP),
        ("bf16-reduced", "reduced", RECORDING),
        ("octavo-delayed-reduced", "reduced", RECORDING),
        ("octavo-delayed-compiled-captured", "captured", RECORDING),
    ],
)
def test_memory_counts_from_before_a_recording(
    key: str, recording: str, peak: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(recording)
    session: Any = Session(BenchSettings(out=tmp_path, device="cpu"), BenchRecord(tmp_path / "record.jsonl"))
    session.on_gpu = True
    for name in ("synchronise", "release", "forget_compiled"):
        monkeypatch.setattr(Session, name, lambda self: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", device.reset)
    # What an earlier section left, and the allocator counts too.
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda of: 0.5 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda of: device.peak * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda of: device.peak * 2**30)
    monkeypatch.setattr(steps_case, "prepare_training", device.build)
    figures = steps_case.step_figures(session, CASES["vit"], parse_variant(key), 2)
    assert figures["peak_gib"] == peak - 0.5
