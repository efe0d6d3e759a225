"""A GPT of twelve layers over 500 steps of real text: bf16 and FP8, from TransformerLayers and from `transformers`.

    python benchmarks/check_gpt.py --out build/check_gpt.jsonl

    layers          twelve `octavo.TransformerLayer`
    transformers    `GPT2LMHeadModel`, its FP8 by `octavo.convert`

Both are trained in bf16 and with each recipe from three seeds, every step but the first few as one CUDA graph. The text
is the study's. FP8 is to lie within seed noise: the mean of its final losses (each over the last 50 steps) is no
further from bf16's mean than bf16's own finals lie apart. Losses are recorded seed by seed.

One JSON line a run; exit status 1 if a check failed, 2 without a CUDA device (`--device cpu --small` tries the script).
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, T201

import torch
from benchmarks.check_kernels import Checks, environment
from benchmarks.training_model import RECIPES, Build, Mode, Setting, Training, batches_of
from torch import Tensor, nn

import octavo
from octavo.study.model import ModelShape

Result = dict[str, Any]
SEEDS = (0, 1, 2)
LAST = 50
GPT = Setting(
    shape=ModelShape(layers=12, width=512, heads=8, context=256, vocab_size=4096),
    batch_size=16,
    learning_rate=6e-4,
    warm_up=50,
    steps=500,
)
SMALL = Setting(shape=ModelShape(layers=2, width=64, heads=2, context=32, vocab_size=4096), batch_size=2, steps=60)


class OfTransformerLayers(nn.Module):
    """Embeddings, TransformerLayers, a norm and a head tied to the token embedding."""

    def __init__(self, shape: ModelShape) -> None:
        """Build and initialise as GPT-2."""
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocab_size, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(
            octavo.TransformerLayer(shape.width, 4 * shape.width, shape.heads, attn_input_format="bshd")
            for _ in range(shape.layers)
        )
        self.norm = octavo.LayerNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)
        self.lm_head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_a_branch = name.endswith((".proj.weight", "fc2_weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if ends_a_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        x = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


class OfTransformers(nn.Module):
    """GPT-2 as `transformers` has it, without dropout."""

    def __init__(self, shape: ModelShape) -> None:
        """Build; its own initialisation."""
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape.vocab_size, n_positions=shape.context, n_embd=shape.width, n_layer=shape.layers,
            n_head=shape.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        self.inner = GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        logits: Tensor = self.inner(tokens, use_cache=False).logits
        return logits


MODELS: dict[str, type[nn.Module]] = {"layers": OfTransformerLayers, "transformers": OfTransformers}


def builder(model: str) -> Build:
    """A model from a seed; no other random state is touched."""

    def build(shape: ModelShape, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MODELS[model](shape)

    return build


class Finals:
    """Trainings, and their final losses by (model, recipe): one a seed."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.setting, self.device = setting, device
        self.finals: dict[tuple[str, str], list[float]] = {}

    def train(self, model: str, recipe: str, seed: int) -> Result:
        """One training; its curve for the record."""
        setting, mode = self.setting, "captured" if self.device == "cuda" else "eager"
        batches = batches_of(setting, seed, self.device)
        how: Mode = mode  # type: ignore[assignment]
        training = Training(RECIPES.get(recipe), how, setting, seed, self.device, builder(model))
        for step in range(setting.steps):
            training.step(*batches(step))
        losses = training.losses.cpu()
        final = float(losses[-LAST:].double().mean())
        self.finals.setdefault((model, recipe), []).append(final)
        curve = [round(value, 4) for value in losses[24::25].tolist()]
        return {"ok": bool(losses.isfinite().all()), "final": round(final, 5), "every_25th": curve}

    def within_noise(self, model: str, recipe: str) -> Result:
        """The means over seeds, against the spread of bf16's."""
        own, reference = self.finals[model, recipe], self.finals[model, "bf16"]
        apart = sum(own) / len(own) - sum(reference) / len(reference)
        band = max(reference) - min(reference)
        by_seed = [round(a - b, 5) for a, b in zip(own, reference, strict=False)]
        complete = len(own) == len(reference) == len(SEEDS)
        return {"ok": complete and abs(apart) <= band, "difference": round(apart, 5), "band": round(band, 5),
                "by_seed": by_seed}  # fmt: skip


def main() -> int:
    """Train what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_gpt.jsonl"))
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: both)")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["delayed", "current"])
    parser.add_argument("--seconds", type=float, default=400, help="start no training after this long (default 400)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="two small layers, 60 steps")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing to check", file=sys.stderr)
        return 2
    on_gpu = options.device == "cuda"
    about = environment(options.commit) if on_gpu else {"hardware": "CPU", "torch": torch.__version__}
    checks = Checks(about, options.seconds)
    finals = Finals(SMALL if options.small else GPT, options.device)
    for model in options.only:
        for seed in SEEDS:
            for recipe in ("bf16", *options.recipes):
                call = functools.partial(finals.train, model, recipe, seed)
                checks.run("curve", call, model=model, recipe=recipe, seed=seed)
        for recipe in options.recipes:
            verdict = functools.partial(finals.within_noise, model, recipe)
            checks.run("within noise", verdict, model=model, recipe=recipe)
        checks.write(options.out)
    print(f"{len(checks.records)} checks, {checks.failed} failed; {options.out}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
