from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo.conversion import convert
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling
from octavo.runtime import update_scales
from octavo.study.checkpoint import Checkpoint, load_weights
from octavo.study.evaluation import Evaluator
from octavo.study.model import ModelShape, build_model
from octavo.study.progress import Stop, StudyInterrupted
from octavo.study.tokens import Batches
from octavo.study.training import BEST, Precision, Trainer, TrainingPlan

CPU = torch.device("cpu")
SHAPE = ModelShape(layers=2, width=32, heads=2, context=16, vocab_size=64, dropout=0.1)
STREAM = (torch.arange(3000) * 7 % 61).int()
PLAN = TrainingPlan(steps=12, learning_rate=3e-3, warmup=3, evaluate_every=4, log_every=3)


class StopAfter:
    """A progress that asks for a stop after some steps."""

    def __init__(self, stop: Stop, steps: int) -> None:
        self.stop, self.left = stop, steps

    def started(self, name: str) -> None: ...

    def phase(self, name: str, total: int, unit: str) -> None: ...

    def advance(self, amount: int, text: str) -> None:
        self.left -= amount
        self.stop.requested = self.left <= 0

    def finished(self, name: str, seconds: float) -> None: ...


def trainer(folder: Path, plan: TrainingPlan = PLAN, recipe: Recipe | None = None) -> Trainer:
    model = build_model(SHAPE, 0)
    if recipe is not None:
        convert(model, recipe=recipe, exclude=["lm_head"], filter="all")
    evaluator = Evaluator(stream=STREAM, context=16, batch_size=8, device=CPU, max_tokens=320)
    precision = Precision(method="m", after_backward=(lambda model: None) if recipe is None else update_scales)
    batches = Batches(STREAM, 4, 16, seed=5, device=CPU)
    return Trainer(model, plan, batches, evaluator, phase="p", precision=precision, folder=folder)


def losses(rows: list[dict[str, object]]) -> list[object]:
    return [(row["kind"], row["step"], row["loss"]) for row in rows]


@pytest.mark.parametrize(
    "recipe", [None, DelayedScaling(amax_history_len=4), CurrentScaling(), RowwiseScaling(), BlockScaling()]
)
@pytest.mark.parametrize("stop_at", [1, 7])
def test_a_run_that_was_stopped_and_resumed_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, recipe: Recipe | None, stop_at: int
) -> None:
    whole = trainer(tmp_path / "whole", recipe=recipe)
    expected = whole.run()
    stop = Stop()
    with pytest.raises(StudyInterrupted):
        trainer(tmp_path / "parts", recipe=recipe).run(StopAfter(stop, stop_at), stop)
    again = trainer(tmp_path / "parts", recipe=recipe)
    torch.manual_seed(99)  # what a new process would not share
    result = again.run()
    assert losses(result.rows) == losses(expected.rows)
    assert result.best_loss == expected.best_loss
    for mine, other in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert mine.equal(other)
    assert Checkpoint.latest(tmp_path / "parts") is None  # nothing but the best is left


def test_the_best_weights_on_validation_are_kept(tmp_path: Path) -> None:
    rising = TrainingPlan(steps=12, learning_rate=3e-3, warmup=3, evaluate_every=2)
    run = trainer(tmp_path, rising)
    result = run.run()
    validations = [row["loss"] for row in result.rows if row["kind"] == "validation"]
    assert result.best_loss == min(validations)
    best = build_model(SHAPE, 1)
    load_weights(best, tmp_path / BEST)
    assert run.validate(best, run.forward_context).loss == min(validations)


def test_training_learns(tmp_path: Path) -> None:
    plan = TrainingPlan(steps=60, learning_rate=1e-2, warmup=5, evaluate_every=60)
    result = trainer(tmp_path, plan).run()
    assert result.best_loss < 0.5 * math.log(61)  # the stream is deterministic; knowing nothing costs ln 61


def test_fp16_trains_under_a_loss_scaler_that_is_saved(tmp_path: Path) -> None:
    plan = TrainingPlan(steps=8, learning_rate=3e-3, warmup=2, evaluate_every=8, dtype=torch.float16)
    run = trainer(tmp_path / "a", plan)
    assert run.scaler.is_enabled()
    expected = run.run()
    assert all(math.isfinite(row["loss"]) for row in expected.rows)
    stop = Stop()
    with pytest.raises(StudyInterrupted):
        trainer(tmp_path / "b", plan).run(StopAfter(stop, 3), stop)
    assert losses(trainer(tmp_path / "b", plan).run().rows) == losses(expected.rows)


def test_an_overflow_in_fp16_skips_the_step_and_halves_the_scale(tmp_path: Path) -> None:
    plan = TrainingPlan(steps=1, learning_rate=1.0, warmup=0, evaluate_every=9, dtype=torch.float16)
    run = trainer(tmp_path, plan)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    run.train_steps(1)
    assert run.scaler.get_scale() == 2.0**39
    assert all(old.equal(new) for old, new in zip(before, run.model.parameters(), strict=True))


def test_decay_is_for_matrices_alone(tmp_path: Path) -> None:
    groups = trainer(tmp_path).optimizer.param_groups
    assert all(parameter.dim() >= 2 for parameter in groups[0]["params"])
    assert all(parameter.dim() < 2 for parameter in groups[1]["params"])
    assert (groups[0]["weight_decay"], groups[1]["weight_decay"]) == (0.1, 0.0)


def test_the_schedule_warms_up_and_ends_at_its_share() -> None:
    plan = TrainingPlan(steps=100, learning_rate=1.0, warmup=10, evaluate_every=1)
    rates = [plan.rate(step) for step in range(100)]
    assert rates[:3] == [0.1, 0.2, pytest.approx(0.3)]
    assert max(rates) == rates[9] == 1.0
    assert all(a >= b for a, b in itertools.pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    stop = Stop()
    with pytest.raises(StudyInterrupted):
        trainer(tmp_path).run(StopAfter(stop, 2), stop)
    other = TrainingPlan(steps=13, learning_rate=3e-3, warmup=3, evaluate_every=4, log_every=3)
    with pytest.raises(ValueError, match="holds a checkpoint of another plan"):
        trainer(tmp_path, other).run()


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.run()
    with pytest.raises(ValueError, match=r"does not fit the model: missing \['weight', 'bias'\]"):
        load_weights(nn.Linear(3, 3), tmp_path / BEST)
