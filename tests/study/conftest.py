"""A model and a text small enough that a whole study takes seconds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.study.model import ModelShape
from octavo.study.settings import PRESETS, Preset, StudySettings

WORDS = ["the", "scale", "of", "a", "tensor", "is", "its", "largest", "value", "over", "limit", "no", "code", "lost"]

MICRO = Preset(
    shape=ModelShape(layers=2, width=32, heads=2, context=32, vocab_size=320),
    batch_size=4,
    steps=6,
    finetune_steps=2,
    learning_rate=3e-3,
    finetune_learning_rate=3e-4,
    warmup=2,
    evaluations=2,
    validation_tokens=128,
    test_tokens=256,
    evaluation_batch=4,
    generation_batch=2,
    generation_tokens=2,
    generation_repeats=1,
    tokenizer_vocabulary=300,
)


def write_texts(folder: Path, files: int = 30) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    source = random.Random(0)
    for number in range(files):
        sentences = [" ".join(source.choices(WORDS, k=12)) + f" {number}." for _ in range(12)]
        (folder / f"text{number:02d}.txt").write_text("\n".join(sentences), encoding="utf-8")
    return folder


@pytest.fixture
def micro(monkeypatch: pytest.MonkeyPatch) -> Preset:
    monkeypatch.setitem(PRESETS, "micro", MICRO)
    return MICRO


@pytest.fixture
def micro_settings(micro: Preset, tmp_path: Path) -> StudySettings:
    return StudySettings(out=tmp_path / "run", preset="micro", data=str(write_texts(tmp_path / "texts")))
