"""One training loop for every precision: AdamW, warm-up and cosine, clipping, validation, the best weights kept.

Weights are fp32 masters; the forward runs under autocast in BF16 or FP16 (with a loss scaler), and layers that
`octavo.convert` changed run in FP8 inside it. The loop reads nothing from the device except when it logs, so a GPU is
never waited for. Batches, dropout and schedule depend on seed and step alone: stopping and resuming changes no bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from octavo.study.checkpoint import Checkpoint, discard, load_tensors, own_tensors, save_weights
from octavo.study.evaluation import Evaluation, Evaluator
from octavo.study.half_precision import half_products
from octavo.study.progress import Progress, SilentProgress, Stop, StudyInterrupted
from octavo.study.record import Row, clean
from octavo.study.tokens import Batches

BEST = "best.safetensors"
_CHECKPOINT_SECONDS = 60.0  # between checkpoints nobody asked for; an interruption always writes one


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How to train; steps count optimizer steps."""

    steps: int
    learning_rate: float
    warmup: int
    evaluate_every: int
    log_every: int = 1
    final_share: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    keep_best: bool = True

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine down to `final_share` of the peak."""
        warmup = min(self.warmup, self.steps // 2)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final_share + (1.0 - self.final_share) * cosine)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What differs between methods: the name in the record, what follows the backward pass, what watches a step.

    `watching(model, step)` surrounds forward and backward; the rows it gives are complete at its exit.
    """

    method: str
    after_backward: Callable[[nn.Module], None] = field(default=lambda model: None)
    watching: Callable[[nn.Module, int], AbstractContextManager[list[Row]]] = field(
        default=lambda model, step: nullcontext([])
    )


@dataclass(frozen=True)
class TrainingResult:
    """What a training run gave: its rows, the best validation loss, and the speed (median over logged intervals)."""

    rows: list[Row]
    best_loss: float
    steps: int
    steps_per_s: float | None
    peak_memory_bytes: int | None


class Trainer:
    """Trains `model` in place; `run` starts or goes on from the newest checkpoint in `folder`."""

    def __init__(
        self,
        model: nn.Module,
        plan: TrainingPlan,
        batches: Batches,
        validate: Evaluator,
        *,
        phase: str,
        precision: Precision,
        folder: Path,
    ) -> None:
        """Nothing runs yet; `folder` is where checkpoints and the best weights go."""
        self.model, self.plan, self.batches, self.validate = model, plan, batches, validate
        self.phase, self.precision, self.folder = phase, precision, folder
        self.device = batches.device
        self.optimizer = _optimizer(model, plan)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=plan.dtype is torch.float16)
        self.rows: list[Row] = []
        self.best_loss = math.inf
        self.step = 0
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._clock = time.perf_counter()
        self._clock_step = 0
        self._speeds: list[float] = []

    def run(self, progress: Progress | None = None, stop: Stop | None = None) -> TrainingResult:
        """Train to the last step. Raises StudyInterrupted, with a checkpoint written, when `stop` is set."""
        progress, stop = progress or SilentProgress(), stop or Stop()
        self._restore()
        if self.step == 0:
            torch.manual_seed(self.plan.seed)  # dropout: the same masks for every precision
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.model.train()
        saved_at = time.monotonic()
        self._start_clock()
        while self.step < self.plan.steps:
            self._train_step()
            done = self.step == self.plan.steps
            if done or self.step % self.plan.log_every == 0:
                self._log()
            if done or self.step % self.plan.evaluate_every == 0:
                self._validate_now()
            progress.advance(1, self._status())
            if stop.requested and not done:
                self._checkpoint()
                raise StudyInterrupted
            if not done and time.monotonic() - saved_at > _CHECKPOINT_SECONDS:
                self._checkpoint()
                saved_at = time.monotonic()
                self._start_clock()
        discard(self.folder)
        return self._result()

    def train_steps(self, count: int) -> None:
        """Run some steps and wait for their losses, without validation: for timing."""
        self.model.train()
        for _ in range(count):
            self._train_step()
        self._log()

    def _train_step(self) -> None:
        plan = self.plan
        inputs, targets = self.batches(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = plan.rate(self.step)
        with self.precision.watching(self.model, self.step) as watched:
            with self.forward_context():
                logits = self.model(inputs)
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1))
            self.scaler.scale(loss).backward()
        self.rows.extend(watched)
        self.precision.after_backward(self.model)
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), plan.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self._pending.append((self.step, loss.detach(), norm.detach()))
        self.step += 1

    def forward_context(self) -> AbstractContextManager[None]:
        """What surrounds each forward pass, in training and in validation."""
        return training_context(self.device, self.plan.dtype)

    def _log(self) -> None:
        """Read the losses since the last log from the device, and take the time."""
        steps, losses, norms = zip(*self._pending, strict=True)
        values = torch.stack(losses).tolist(), torch.stack(norms).tolist()
        elapsed = time.perf_counter() - self._clock
        speed = (self.step - self._clock_step) / elapsed
        self._speeds.append(speed)
        for step, loss, norm in zip(steps, *values, strict=True):
            self.rows.append(
                {
                    "kind": "train_step",
                    "phase": self.phase,
                    "method": self.precision.method,
                    "seed": self.plan.seed,
                    "step": step,
                    "loss": loss,
                    "lr": self.plan.rate(step),
                    "grad_norm": norm,
                    "tokens_per_s": speed * self.batches.batch_size * self.batches.context,
                }
            )
        self._pending.clear()
        self._start_clock()

    def _start_clock(self) -> None:
        self._clock, self._clock_step = time.perf_counter(), self.step

    def _validate_now(self) -> Evaluation:
        if self._pending:
            self._log()
        result = self.validate(self.model, self.forward_context)
        self.rows.append(validation_row(self.phase, self.precision.method, self.plan.seed, self.step, result))
        if result.loss < self.best_loss:
            self.best_loss = result.loss
            if self.plan.keep_best:
                save_weights(self.model, self.folder / BEST)
        self._start_clock()
        return result

    def _status(self) -> str:
        losses = [row["loss"] for row in self.rows[-20:] if row["kind"] == "train_step"]
        return f"loss {losses[-1]:.3f}" if losses else ""

    def _checkpoint(self) -> None:
        if self._pending:
            self._log()
        tensors: dict[str, Any] = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            tensors["random_cuda"] = torch.cuda.get_rng_state(self.device)
        state = {"rows": self.rows, "best_loss": self.best_loss, "plan": _plan_json(self.plan)}
        Checkpoint(self.step, own_tensors(self.model), tensors, clean(state)).save(self.folder)

    def _restore(self) -> None:
        """Go on from the newest checkpoint, if there is one made by this plan."""
        checkpoint = Checkpoint.latest(self.folder)
        if checkpoint is None:
            return
        if checkpoint.state["plan"] != _plan_json(self.plan):
            raise ValueError(
                f"{self.folder} holds a checkpoint of another plan ({checkpoint.state['plan']}) than asked for "
                f"({_plan_json(self.plan)}); resume with the same settings or choose another --out"
            )
        load_tensors(self.model, checkpoint.model, str(self.folder))
        self.optimizer.load_state_dict(checkpoint.optimizer["optimizer"])
        self.scaler.load_state_dict(checkpoint.optimizer["scaler"])
        torch.set_rng_state(checkpoint.optimizer["random"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint.optimizer["random_cuda"], self.device)
        self.step = checkpoint.step
        self.rows = checkpoint.state["rows"]
        best = checkpoint.state["best_loss"]
        self.best_loss = math.inf if best is None else best

    def _result(self) -> TrainingResult:
        speeds = sorted(self._speeds)
        return TrainingResult(
            rows=self.rows,
            best_loss=self.best_loss,
            steps=self.step,
            steps_per_s=speeds[len(speeds) // 2] if speeds else None,
            peak_memory_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )


@contextmanager
def training_context(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Autocast in a 16-bit dtype, with fast products on this device."""
    with torch.autocast(device.type, dtype=dtype), half_products(device, dtype):
        yield


def validation_row(phase: str, method: str, seed: int, step: int, result: Evaluation) -> Row:
    """A `validation` row."""
    return {
        "kind": "validation",
        "phase": phase,
        "method": method,
        "seed": seed,
        "step": step,
        "loss": result.loss,
        "perplexity": result.perplexity,
    }


def _optimizer(model: nn.Module, plan: TrainingPlan) -> torch.optim.Optimizer:
    """AdamW with decay on matrices only: vectors (norms, biases) have no scale to hold down."""
    matrices = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95), fused=True)


def _plan_json(plan: TrainingPlan) -> dict[str, Any]:
    return {**asdict(plan), "dtype": str(plan.dtype)}
