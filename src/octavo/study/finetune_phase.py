"""Phase `finetune`: the same steps from the same start and in the same order, in 16 bits and in FP8.

Each result is evaluated twice: as it would be served (an FP8 recipe in its FP8 form), and in 16 bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from octavo.conversion import convert, unconvert
from octavo.recipes import CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import GemmCount, count_gemms, update_scales
from octavo.study.atomic import read_json, write_json
from octavo.study.baseline_phase import baseline_model, forward_steps, step_seconds, wanted_steps
from octavo.study.budget import TrainingCost, fit_training
from octavo.study.checkpoint import save_weights
from octavo.study.environment import has_native_fp8
from octavo.study.evaluation import Evaluation
from octavo.study.quantize_phase import calibration_batches, serving_context
from octavo.study.record import Row, clean
from octavo.study.run import Run
from octavo.study.scale_history import scale_history
from octavo.study.serving import EMULATED, HIGH, NATIVE, head_patterns, serving_methods
from octavo.study.training import Precision, Trainer, TrainingPlan, TrainingResult

FINETUNE = "finetune"
WEIGHTS = "model.safetensors"
_VALIDATIONS = 3  # of each method
_OVERHEAD = 1.1  # watching and logging beside the steps themselves
_SEED_OFFSET = 1  # another order than the baseline's, the same for every method
_WATCHED = 10  # points of the scale history
_HISTORY = 16  # amax history: as long as a short fine-tuning can fill


@dataclass(frozen=True)
class TuningMethod:
    """How one fine-tuning computes, and how its result is served."""

    key: str
    recipe: Recipe | None
    served_as: str


def tuning_methods(half: str) -> list[TuningMethod]:
    """The 16-bit method first, then FP8 with delayed, current and row-wise scaling."""
    return [
        TuningMethod(half, None, half),
        TuningMethod("delayed", DelayedScaling(amax_history_len=_HISTORY), "tensor_static"),
        TuningMethod("current", CurrentScaling(), "tensor_dynamic"),
        TuningMethod("rowwise", RowwiseScaling(), "rowwise"),
    ]


def finetune(run: Run) -> list[Row]:
    """Fine-tune with every method; rows `train_step`, `validation`, `scale_history`, `finetune`, `adjustment`."""
    methods = tuning_methods(run.settings.dtype)
    (steps, validations), rows = finetune_steps(run, methods)
    run.progress.phase(FINETUNE, steps * len(methods), "steps")
    for method in methods:
        run.stop.check()
        rows.extend(tuned(run, method, steps, validations))
    return rows


def finetune_steps(run: Run, methods: list[TuningMethod]) -> tuple[list[int], list[Row]]:
    """Steps and validations of each method, shrunk to the time limit, and the `adjustment` rows if shrunk."""
    wanted = run.preset.finetune_steps
    if run.settings.epochs is not None and run.settings.finetune_steps is None:
        wanted = min(wanted, wanted_steps(run))
    validations = min(wanted, _VALIDATIONS)
    if run.budget.limit_s is None or run.is_decided("finetune-steps"):
        return run.decided("finetune-steps", [wanted, validations], [])
    step_s = 0.0
    for method in methods:
        model = prepared(baseline_model(run), method)
        step_s += step_seconds(run, model, precision_of(method, watch_every=None)) * _OVERHEAD
    cost = TrainingCost(
        step_s=step_s,
        validation_s=step_s * forward_steps(run, validation_tokens(run)),
        closing_s=2 * step_s * forward_steps(run, test_tokens(run)),  # as served, and in 16 bits
    )
    available = run.budget.seconds_for(FINETUNE)
    return run.decided("finetune-steps", *fit_training(wanted, validations, cost, available, FINETUNE))


def test_tokens(run: Run) -> int:
    """As many test tokens as quantization without training was measured on."""
    return run.decided("test-tokens", [run.preset.test_tokens], [])[0][0]


def validation_tokens(run: Run) -> int:
    """Half of the baseline's, and no more than the test has."""
    return min(run.preset.validation_tokens // 2, test_tokens(run))


def prepared(model: nn.Module, method: TuningMethod) -> nn.Module:
    """The model with its linear layers in the method's precision, the head left in 16 bits."""
    if method.recipe is not None:
        convert(model, recipe=method.recipe, exclude=head_patterns(model), filter="all")
    return model


def precision_of(method: TuningMethod, watch_every: int | None) -> Precision:
    """The training loop's seam: the end of a step of delayed scaling, and the scale history every so many steps."""
    if method.recipe is None:
        return Precision(method=method.key)

    def watching(model: nn.Module, step: int) -> AbstractContextManager[list[Row]]:
        return nullcontext([]) if watch_every is None else scale_history(model, method.key, step, watch_every)

    return Precision(method=method.key, after_backward=update_scales, watching=watching)


def tuned(run: Run, method: TuningMethod, steps: int, validations: int) -> list[Row]:
    """The rows of one method: from its file if an earlier start finished it, else by training."""
    path = run.folder / FINETUNE / f"{method.key}.json"
    if path.exists():
        stored: list[Row] = read_json(path)
        run.progress.advance(steps, f"{method.key}: done before")
        return stored
    model = prepared(baseline_model(run), method)
    preset = run.preset
    plan = TrainingPlan(
        steps=steps,
        learning_rate=preset.finetune_learning_rate,
        warmup=min(preset.warmup, max(1, steps // 10)),
        evaluate_every=-(-steps // validations),
        log_every=1 if run.device.type == "cpu" else 5,
        seed=run.settings.seed + _SEED_OFFSET,
        dtype=run.half,
        keep_best=False,
    )
    trainer = Trainer(
        model,
        plan,
        run.batches(plan.seed),
        run.evaluator("validation", validation_tokens(run)),
        phase=FINETUNE,
        precision=precision_of(method, max(1, steps // _WATCHED)),
        folder=run.folder / FINETUNE / method.key,
    )
    result = trainer.run(run.progress, run.stop)
    gemms = products_of_a_step(trainer).fp8
    if method.recipe is not None:
        unconvert(model)
    save_weights(model, run.folder / FINETUNE / method.key / WEIGHTS)
    served, plain = served_evaluations(run, model, method)
    row = finetune_row(run, method, result, served, plain) | {"fp8_gemms_per_step": gemms}
    rows = [clean(each) for each in [*reseeded(result.rows, run.settings.seed), row]]
    write_json(path, rows)
    return rows


def products_of_a_step(trainer: Trainer) -> GemmCount:
    """The products of one training step, by precision: the proof that FP8 was on."""
    inputs, targets = trainer.batches(0)
    trainer.model.train()
    with count_gemms() as gemms:
        with trainer.forward_context():
            logits = trainer.model(inputs)
        F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1)).backward()
    trainer.model.zero_grad(set_to_none=True)
    return gemms


def reseeded(rows: list[Row], seed: int) -> list[Row]:
    """Rows under the study's own seed, not the one that orders the batches."""
    return [{**row, "seed": seed} for row in rows]


def served_evaluations(run: Run, model: nn.Module, method: TuningMethod) -> tuple[Evaluation, Evaluation]:
    """The fine-tuned model, unconverted, on the test split: as served, and in 16 bits. `model` is used up."""
    model.to(run.half).eval().requires_grad_(False)
    evaluate = run.evaluator("test", test_tokens(run))
    plain = evaluate(model, lambda: serving_context(run))
    if method.recipe is None:
        return plain, plain
    serving_methods(run.settings.dtype)[method.served_as].apply(model, calibration_batches(run))
    return evaluate(model, lambda: serving_context(run)), plain


def finetune_row(run: Run, method: TuningMethod, result: TrainingResult, served: Evaluation, plain: Evaluation) -> Row:
    """The `finetune` row."""
    execution = HIGH if method.recipe is None else NATIVE if has_native_fp8(run.device) else EMULATED
    return {
        "kind": "finetune",
        "method": method.key,
        "seed": run.settings.seed,
        "steps": result.steps,
        "perplexity": served.perplexity,
        "perplexity_bf16_serving": plain.perplexity,
        "loss": served.loss,
        "accuracy": served.accuracy,
        "steps_per_s": result.steps_per_s,
        "peak_memory_bytes": result.peak_memory_bytes,
        "execution": execution,
        "served_as": method.served_as,
    }
