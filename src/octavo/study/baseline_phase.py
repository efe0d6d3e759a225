"""Phase `baseline`: train the model in 16 bits; its best weights are the start of everything that follows."""

from __future__ import annotations

import copy
import time
from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from octavo.study.budget import TrainingCost, fit_training
from octavo.study.checkpoint import load_weights, save_weights
from octavo.study.record import Row
from octavo.study.run import Run
from octavo.study.training import BEST, Precision, Trainer, TrainingPlan, training_context, validation_row

BASELINE = "baseline"
_PROBE_STEPS = 3
_OVERHEAD = 1.1  # logging and checkpoints beside the steps themselves


def train_baseline(run: Run) -> list[Row]:
    """Train, keep the best weights in baseline/best.safetensors; rows `train_step`, `validation`, `adjustment`."""
    model = run.new_model()
    settings = run.settings
    if settings.model_dir is not None and settings.steps is None and settings.epochs is None:
        return pretrained_baseline(run, model)
    (steps, validations), rows = baseline_steps(run, model)
    preset = run.preset
    plan = TrainingPlan(
        steps=steps,
        learning_rate=preset.learning_rate,
        warmup=preset.warmup,
        evaluate_every=-(-steps // validations),
        log_every=1 if run.device.type == "cpu" else 10,
        seed=run.settings.seed,
        dtype=run.half,
    )
    trainer = Trainer(
        model,
        plan,
        run.batches(run.settings.seed),
        run.evaluator("validation", preset.validation_tokens),
        phase=BASELINE,
        precision=Precision(method=run.settings.dtype),
        folder=run.folder / BASELINE,
    )
    run.progress.phase(BASELINE, steps, "steps")
    return rows + trainer.run(run.progress, run.stop).rows


def pretrained_baseline(run: Run, model: nn.Module) -> list[Row]:
    """A checkpoint as it is: saved as the baseline, with its `validation` row at step 0."""
    run.progress.phase(BASELINE, 1, "evaluations")
    save_weights(model, baseline_weights(run))

    def context() -> AbstractContextManager[object]:
        return training_context(run.device, run.half)

    result = run.evaluator("validation", run.preset.validation_tokens)(model, context)
    run.progress.advance(1, f"perplexity {result.perplexity:.2f}")
    run.notes.append("the checkpoint as it is; --steps would train it first")
    return [validation_row(BASELINE, run.settings.dtype, run.settings.seed, 0, result)]


def baseline_steps(run: Run, model: nn.Module) -> tuple[list[int], list[Row]]:
    """Steps and validations: as asked for, or by epochs, shrunk to the time limit; and the `adjustment` rows."""
    settings = run.settings
    wanted = wanted_steps(run)
    validations = min(wanted, run.preset.evaluations)
    if run.budget.limit_s is None or run.is_decided("baseline-steps"):
        return run.decided("baseline-steps", [wanted, validations], [])
    step_s = step_seconds(run, copy.deepcopy(model), Precision(method=settings.dtype)) * _OVERHEAD
    cost = TrainingCost(step_s=step_s, validation_s=step_s * forward_steps(run, run.preset.validation_tokens))
    available = run.budget.seconds_for(BASELINE)
    return run.decided("baseline-steps", *fit_training(wanted, validations, cost, available, BASELINE))


def wanted_steps(run: Run) -> int:
    """Steps of the baseline as asked for, before any time limit."""
    settings = run.settings
    if settings.epochs is None:
        return run.preset.steps
    return max(1, round(settings.epochs * run.batches(settings.seed).steps_per_epoch))


def forward_steps(run: Run, tokens: int) -> float:
    """What evaluating on so many tokens costs, in training steps: a forward is a third of a step."""
    return tokens / (run.preset.batch_size * run.shape.context) / 3


def step_seconds(run: Run, model: nn.Module, precision: Precision) -> float:
    """Seconds of one training step (fastest of a few, the first left out); `model` is used up."""
    plan = TrainingPlan(
        steps=1, learning_rate=0.0, warmup=0, evaluate_every=10**9, seed=run.settings.seed, dtype=run.half
    )
    trainer = Trainer(
        model,
        plan,
        run.batches(run.settings.seed),
        run.evaluator("validation", 1),
        phase="probe",
        precision=precision,
        folder=run.folder / "probe",
    )
    times = []
    for _ in range(_PROBE_STEPS):
        start = time.perf_counter()
        trainer.train_steps(1)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def baseline_weights(run: Run) -> Path:
    """Where the best weights lie."""
    return run.folder / BASELINE / BEST


def baseline_model(run: Run) -> nn.Module:
    """A fresh fp32 model with the baseline's best weights, on the run's device."""
    model = run.new_model()
    load_weights(model, baseline_weights(run))
    return model
