"""One training of the study's model by a recipe, and its perplexity on held-out text; parts of `check_recipes.py`.

Model, data, order of batches, loop and evaluation are the study's. A seed decides initial weights and order: recipes of
one seed differ in nothing but the recipe. The held-out text is read in the recipe's own precision.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.recipe_table import BASELINE
from benchmarks.training_model import RECIPES as COMMON
from benchmarks.training_model import token_streams
from torch import nn

import octavo
from octavo.recipes import (
    CurrentScaling,
    CustomRecipe,
    MXFP8Scaling,
    QuantizeSpec,
    Recipe,
    RowwiseScaling,
    StaticScaling,
)
from octavo.runtime import GemmCount
from octavo.study.evaluation import Evaluator
from octavo.study.finetune_phase import products_of_a_step
from octavo.study.model import build_model
from octavo.study.settings import PRESETS
from octavo.study.tokens import Batches, TokenData, evaluation_windows
from octavo.study.training import Precision, Trainer, TrainingPlan, TrainingResult

Result = dict[str, Any]
STATIC = "static"
PRESET = PRESETS["tiny"]
HEAD = "lm_head"
LAST = 10  # losses in the mean that a row calls the final one
CALIBRATION_BATCHES = 8


def _row(format: str) -> QuantizeSpec:
    return QuantizeSpec(format=format, granularity="row", power_of_two=True)


CUSTOM = CustomRecipe(
    fprop_input=_row("E4M3"),
    fprop_weight=_row("E4M3"),
    dgrad_grad_output=QuantizeSpec(format="E5M2"),
    dgrad_weight=QuantizeSpec(format="E4M3"),
    wgrad_grad_output=None,
    wgrad_input=None,
)
RECIPES: dict[str, Recipe] = {
    **COMMON,
    "rowwise_high_precision_wgrad": RowwiseScaling(high_precision_wgrad=True),
    "mxfp8": MXFP8Scaling(),
    "custom": CUSTOM,
    "current_stochastic": CurrentScaling(grad_output_rounding="stochastic"),
}
# BF16 from slightly other weights: how far a perplexity moves that no recipe touched.
CONTROL = "bf16_perturbed"
PERTURBATION = 0.026  # of each weight, the error of a cast to E4M3
NAMES = (BASELINE, CONTROL, *RECIPES, STATIC)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much a run trains on, how fast, and what it reads afterwards; `validation_tokens` None is the whole split."""

    steps: int
    batch: int
    learning_rate: float
    validation_tokens: int | None

    @property
    def calibrated_after(self) -> int:
        """Steps in BF16 before static scales are calibrated: a quarter, at least one."""
        return max(1, self.steps // 4)


def train(recipe: str, seed: int, extent: Extent, device: str) -> Result:
    """One training, evaluated; the row's figures."""
    model = build_model(PRESET.shape, seed).to(device)
    torch.manual_seed(seed)  # stochastic rounding draws from here, and the perturbation
    if recipe == CONTROL:
        perturb(model)
    note = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(model, recipe, seed, extent, device, Path(folder))
        if recipe in RECIPES:
            converted(model, RECIPES[recipe])
        elif recipe == STATIC:
            note = calibrated(trainer, extent)
        result = trainer.run()
    return figures(trainer, result) | ({} if note is None else {"note": note})


def trainer_of(model: nn.Module, recipe: str, seed: int, extent: Extent, device: str, folder: Path) -> Trainer:
    """The study's loop; validation after the last step only."""
    where, data, shape = torch.device(device), token_streams(PRESET.tokenizer_vocabulary), PRESET.shape
    plan = TrainingPlan(
        steps=extent.steps,
        learning_rate=extent.learning_rate,
        warmup=PRESET.warmup,
        evaluate_every=extent.steps,
        # A log waits for the device.
        log_every=10 if where.type == "cuda" else 1,
        seed=seed,
        keep_best=False,
    )
    validate = Evaluator(
        stream=data.validation,
        context=shape.context,
        batch_size=PRESET.evaluation_batch,
        device=where,
        max_tokens=extent.validation_tokens,
    )
    batches = Batches(data.train, extent.batch, shape.context, seed, where)
    delayed = recipe in RECIPES and RECIPES[recipe].delayed is not None
    precision = Precision(method=recipe, after_backward=octavo.update_scales) if delayed else Precision(method=recipe)
    return Trainer(model, plan, batches, validate, phase="recipes", precision=precision, folder=folder)


def converted(model: nn.Module, recipe: Recipe) -> None:
    """All linear layers but the head."""
    found = octavo.convert(model, recipe, exclude=[HEAD], filter="all").converted
    assert len(found) == 4 * PRESET.shape.layers, "all linear layers of the blocks run in FP8"


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Each element of each matrix times a draw of N(1, PERTURBATION²)."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(1 + PERTURBATION * torch.randn_like(parameter))


def calibrated(trainer: Trainer, extent: Extent) -> str:
    """Train a little in BF16, then give each layer a static scale for its input; what was done, for the row.

    Before training, activations are an order of magnitude smaller than soon after: scales of then would saturate.
    """
    trainer.train_steps(extent.calibrated_after)
    batches = [trainer.batches(trainer.step + ahead)[0] for ahead in range(CALIBRATION_BATCHES)]
    with trainer.forward_context():
        scales = octavo.calibrate(trainer.model, batches)
    scales.pop(HEAD, None)
    overrides = {f"^{re.escape(name)}$": StaticScaling(input_scale=scale) for name, scale in scales.items()}
    converted(trainer.model, StaticScaling(input_scale=max(scales.values()), overrides=overrides))
    return f"input scales calibrated on {CALIBRATION_BATCHES} batches after {extent.calibrated_after} steps in BF16"


def figures(trainer: Trainer, result: TrainingResult) -> Result:
    """What a run gave; tokens/s from the median step, or ten of them."""
    validation = result.rows[-1]
    losses = [row["loss"] for row in result.rows if row["kind"] == "train_step"]
    tokens = trainer.batches.batch_size * trainer.batches.context
    count = products_of_a_step(trainer)
    final = sum(losses[-LAST:]) / len(losses[-LAST:])
    return {
        "ok": final == final and validation["perplexity"] < float("inf"),
        "device": trainer.device.type,
        "execution": execution(count),
        "products": products(count),
        "train_loss": round(final, 5),
        "perplexity": validation["perplexity"],
        "unigram": unigram(token_streams(PRESET.tokenizer_vocabulary), trainer.validate),
        "tokens_per_s": None if result.steps_per_s is None else round(result.steps_per_s * tokens, 1),
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def unigram(data: TokenData, validate: Evaluator) -> float:
    """The perplexity of the same text under the frequencies of tokens in the training split, a half added to each."""
    counts = torch.bincount(data.train.long(), minlength=PRESET.shape.vocab_size).double() + 0.5
    windows = evaluation_windows(data.validation, validate.context, validate.batch_size, validate.max_tokens)
    targets = torch.cat([targets.flatten() for _, targets in windows])
    return float((counts.sum() / counts).log()[targets].mean().exp())


def products(count: GemmCount) -> dict[str, str]:
    """What each of the three products ran as, as the library counted them; empty without layers of Octavo's."""
    found: dict[str, set[str]] = {}
    for _, gemm, precision in count.entries:
        found.setdefault(gemm, set()).add(precision)
    return {gemm: " and ".join(sorted(precisions)) for gemm, precisions in sorted(found.items())}


def execution(count: GemmCount) -> str:
    """The same in words: native, emulated, high precision, or which product is which."""
    words = {"fp8": "native", "fp8 emulated": "emulated"}
    by_word: dict[str, list[str]] = {}
    for gemm, precision in products(count).items():
        by_word.setdefault(words.get(precision, precision), []).append(gemm)
    if not by_word:
        return "high precision"
    most = max(by_word, key=lambda word: len(by_word[word]))
    rest = [f"{gemm} {word}" for word, gemms in by_word.items() if word != most for gemm in gemms]
    return ", ".join([most, *rest])
