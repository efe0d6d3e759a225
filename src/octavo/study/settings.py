"""What a study is asked to do, and the presets that fill in the rest.

`StudySettings` is what the user says; `Preset` is a model shape with the training that suits it. The learning rates
are the usual ones for these widths, the numbers of steps are chosen for the time that a study may take: five minutes
on two CPU cores for `tiny`, a few minutes on one large GPU for the others.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.study.model import ModelShape

_CHECKPOINT_RATE = 5e-5
_DEVICE = r"cpu|cuda(:\d+)?"
METHODS = ("tensor_static", "tensor_dynamic", "rowwise", "block128", "mxfp8", "int8", "int4", "te")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model shape and the training, evaluation and timing that suit it; sizes in tokens, sequences and steps."""

    shape: ModelShape
    batch_size: int
    steps: int
    finetune_steps: int
    learning_rate: float
    finetune_learning_rate: float
    warmup: int
    evaluations: int
    validation_tokens: int
    test_tokens: int
    evaluation_batch: int
    generation_batch: int
    generation_tokens: int
    generation_repeats: int
    tokenizer_vocabulary: int
    threads: int | None = None  # of the CPU; None leaves torch's own number


_GPT2 = Preset(
    shape=ModelShape(layers=12, width=768, heads=12, context=1024, vocab_size=50_304, dropout=0.1),
    batch_size=16,
    steps=400,
    finetune_steps=100,
    learning_rate=6e-4,
    finetune_learning_rate=3e-5,
    warmup=40,
    evaluations=20,
    validation_tokens=65_536,
    test_tokens=131_072,
    evaluation_batch=16,
    generation_batch=16,
    generation_tokens=64,
    generation_repeats=3,
    tokenizer_vocabulary=8192,
)

PRESETS: dict[str, Preset] = {
    "tiny": Preset(
        shape=ModelShape(layers=4, width=128, heads=4, context=128, vocab_size=2048),
        batch_size=4,
        steps=800,
        finetune_steps=100,
        learning_rate=3e-3,
        finetune_learning_rate=3e-4,
        warmup=40,
        evaluations=5,
        validation_tokens=8_192,
        test_tokens=32_768,
        evaluation_batch=16,
        generation_batch=4,
        generation_tokens=16,
        generation_repeats=3,
        tokenizer_vocabulary=2048,
        # Matrices this small gain a factor of 1.6 from a second core, and lose one of 20 when something else wants that
        # core: the threads of each product wait for one another. One thread also gives the same bits on any machine.
        threads=1,
    ),
    "gpt2": _GPT2,
    "gpt2-medium": dataclasses.replace(
        _GPT2,
        shape=ModelShape(layers=24, width=1024, heads=16, context=1024, vocab_size=50_304, dropout=0.1),
        learning_rate=3e-4,
        finetune_learning_rate=2e-5,
    ),
}


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """Everything that decides the outcome of a study; saved in the run's folder and compared when it is resumed."""

    out: Path
    preset: str = "tiny"
    model_dir: Path | None = None
    data: str = "docs"
    data_dir: Path | None = None
    seed: int = 0
    steps: int | None = None
    epochs: float | None = None
    finetune_steps: int | None = None
    dtype: str = "bf16"
    methods: tuple[str, ...] | None = None
    device: str = "cpu"
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work, each with the rule and the remedy."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset {self.preset!r} is unknown; choose one of {', '.join(PRESETS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; choose bf16 or fp16")
        if re.fullmatch(_DEVICE, self.device) is None:
            raise ValueError(f"device {self.device!r} is unknown; choose cpu, cuda, or cuda:N for the GPU of number N")
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs exclude each other: both say how long to train; give one")
        for name in ("steps", "finetune_steps", "epochs", "time_limit_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be greater than 0")
        unknown = [name for name in self.methods or () if name not in METHODS]
        if unknown:
            raise ValueError(f"method {unknown[0]!r} is unknown; choose among {', '.join(METHODS)}")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}; it must be 0 or more")

    @property
    def training(self) -> Preset:
        """The preset with the settings' own numbers of steps in their places.

        Where `steps` are given and `finetune_steps` are not, no fine-tuning takes more steps than the baseline. A
        checkpoint is trained at the usual rate of fine-tuning, whatever the preset says.
        """
        preset = PRESETS[self.preset]
        steps = preset.steps if self.steps is None else self.steps
        usual = preset.finetune_steps if self.steps is None else min(preset.finetune_steps, self.steps)
        if self.model_dir is not None:
            preset = dataclasses.replace(
                preset, learning_rate=_CHECKPOINT_RATE, finetune_learning_rate=_CHECKPOINT_RATE, threads=None
            )
        return dataclasses.replace(
            preset,
            steps=steps,
            finetune_steps=usual if self.finetune_steps is None else self.finetune_steps,
        )

    def to_json(self) -> dict[str, Any]:
        """The settings that must be the same when a run is resumed (the time limit may differ)."""
        values = dataclasses.asdict(self)
        del values["time_limit_s"], values["out"]
        return {key: str(value) if isinstance(value, Path) else value for key, value in values.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any], out: Path, time_limit_s: float | None) -> StudySettings:
        """Rebuild what `to_json` gave. Raises ValueError for what another version of Octavo wrote."""
        fields = dict(values)
        known = {field.name for field in dataclasses.fields(cls)} - {"out", "time_limit_s"}
        if set(fields) != known:
            raise ValueError(
                f"{out} was begun by another version of Octavo (its settings differ in "
                f"{', '.join(sorted(set(fields) ^ known))}): finish it with that version, or choose another --out"
            )
        for name in ("model_dir", "data_dir"):
            fields[name] = None if fields[name] is None else Path(fields[name])
        if fields["methods"] is not None:
            fields["methods"] = tuple(fields["methods"])
        return cls(out=out, time_limit_s=time_limit_s, **fields)
