"""A run: the folder of one study with its settings, record, data and device, as the phases see it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from octavo.study.atomic import read_json, write_json
from octavo.study.budget import TimeBudget
from octavo.study.evaluation import Evaluator
from octavo.study.model import GPT, ModelShape, build_model
from octavo.study.pretrained import PretrainedModel, load_pretrained, pretrained_shape
from octavo.study.progress import Progress, SilentProgress, Stop
from octavo.study.record import Record, Row
from octavo.study.settings import DTYPES, Preset, StudySettings
from octavo.study.tokens import Batches, TokenData

RECORD, SETTINGS, TOKENS, TOKENIZER = "record.jsonl", "settings.json", "tokens.safetensors", "tokenizer.json"


@dataclass
class Run:
    """One study on its way; phases read from it, return rows, and leave remarks in `notes`."""

    settings: StudySettings
    record: Record
    budget: TimeBudget
    progress: Progress = field(default_factory=SilentProgress)
    stop: Stop = field(default_factory=Stop)
    notes: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.settings.out

    @property
    def device(self) -> torch.device:
        """Where models live."""
        return torch.device(self.settings.device)

    @property
    def preset(self) -> Preset:
        """Shape and training numbers."""
        return self.settings.training

    @property
    def half(self) -> torch.dtype:
        """The 16-bit dtype of the baseline."""
        return DTYPES[self.settings.dtype]

    @cached_property
    def data(self) -> TokenData:
        """The token streams that the data phase wrote."""
        return TokenData.load(self.folder / TOKENS)

    @cached_property
    def shape(self) -> ModelShape:
        """The model's shape."""
        folder = self.settings.model_dir
        return self.preset.shape if folder is None else pretrained_shape(folder, self.preset.shape.context)

    def new_model(self) -> GPT | PretrainedModel:
        """A model with the run's initial weights, on the run's device."""
        folder = self.settings.model_dir
        model = build_model(self.shape, self.settings.seed) if folder is None else load_pretrained(folder)
        return model.to(self.device)

    def batches(self, seed: int) -> Batches:
        """Training batches in the order of `seed`."""
        return Batches(self.data.train, self.preset.batch_size, self.shape.context, seed, self.device)

    def evaluator(self, split: str, max_tokens: int) -> Evaluator:
        """The evaluator of `validation` or `test` over at most `max_tokens` tokens."""
        return Evaluator(
            stream=getattr(self.data, split),
            context=self.shape.context,
            batch_size=self.preset.evaluation_batch,
            device=self.device,
            max_tokens=max_tokens,
        )

    def decided(self, name: str, decide: list[int], rows: list[Row]) -> tuple[list[int], list[Row]]:
        """Numbers fitted to the time limit, remembered so that a resumed run uses the same ones.

        Gives what an earlier start of this run stored under `name`, or stores `decide` with its rows.
        """
        path = self.folder / f"{name}.json"
        if path.exists():
            stored = read_json(path)
            return stored["value"], stored["rows"]
        write_json(path, {"value": decide, "rows": rows})
        return decide, rows

    def is_decided(self, name: str) -> bool:
        """Whether `decided` has stored a value under `name`."""
        return (self.folder / f"{name}.json").exists()


def shape_row(preset: str, shape: ModelShape, parameters: int) -> Row:
    """The `model` row."""
    sizes = dataclasses.asdict(shape)
    del sizes["dropout"]
    return {"kind": "model", "preset": preset, "parameters": parameters, **sizes}
