"""Every recipe trains the study's model, and its perplexity on held-out text is compared with BF16's.

    python benchmarks/check_recipes.py --out build/check_recipes.jsonl

Each recipe has the same seeds, and with a seed the same initial weights and batches. A recipe passes if the mean of its
perplexities over the seeds lies within 1 % of BF16's mean. So must `bf16_perturbed`, BF16 from slightly other initial
weights: where that one moves as far, the steps are too few, or the rate too high, to tell a recipe from noise. And a
model that has not learned more than how often each token comes, which `unigram` is the perplexity of, shows little of
any recipe.

One JSON line a run (hardware, versions, commit), written as soon as it is there, and one a recipe at the end. Exit
status 1 if a recipe or a run failed.

Processes may share the work: give each its `--recipes` and its file, then compare with `--join FILES`. `--table FILES`
prints the table of the documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
# ruff: noqa: E402, T201

import torch
from benchmarks.check_kernels import Checks, environment
from benchmarks.recipe_runs import NAMES, PRESET, Extent, train
from benchmarks.recipe_table import BASELINE, joined, read, table
from benchmarks.training_curves import CURVE, SEEDS

# A third of the study's rate: at that one BF16's own seeds lie 12 % apart after 300 steps, at this one half a per cent
# after 2000 (`benchmarks/LOG.md`).
RATE = CURVE.learning_rate
EXTENTS = {
    "cpu": Extent(steps=PRESET.steps, batch=PRESET.batch_size, learning_rate=RATE, validation_tokens=16_384),
    "cuda": Extent(steps=2000, batch=CURVE.batch_size, learning_rate=RATE, validation_tokens=None),
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/check_recipes.jsonl"))
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME",
                        help=f"among {', '.join(NAMES)} (default: all)")  # fmt: skip
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=_count, help="default: 2000, on a CPU the study's 800")
    parser.add_argument("--batch", type=_count, help="sequences a step (default: 16, on a CPU 4)")
    parser.add_argument("--learning-rate", type=float, help=f"its largest (default: {RATE})")
    parser.add_argument("--seconds", type=float, default=900, help="start no run after this long (default 900)")
    parser.add_argument("--device", choices=tuple(EXTENTS), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--alone", action="store_true", help="nothing else runs on this machine: times count")
    parser.add_argument("--commit", help="for the record, where git does not know it")
    parser.add_argument("--join", nargs="+", type=Path, metavar="FILE", help="compare runs of these files into --out")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE", help="print a table of these files")
    return parser.parse_args(arguments)


def _count(text: str) -> int:
    """An integer of 1 or more: without a step there is no perplexity to compare."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of 1 or more")
    return int(text)


def run(options: argparse.Namespace) -> Checks:
    """The runs asked for, BF16's first; in the file as they come."""
    asked = {key: getattr(options, key) for key in ("steps", "batch", "learning_rate")}
    given = {key: value for key, value in asked.items() if value is not None}
    extent = dataclasses.replace(EXTENTS[options.device], **given)
    if options.device == "cpu" and PRESET.threads is not None:
        torch.set_num_threads(PRESET.threads)
    about: dict[str, Any] = dataclasses.asdict(extent) | {"measured_alone": options.alone}
    checks = Checks(environment(options.commit, options.device) | about, options.seconds, options.out)
    for recipe in sorted(options.recipes, key=lambda name: name != BASELINE):
        for seed in options.seeds:
            training = functools.partial(train, recipe, seed, extent, options.device)
            checks.run("run", training, recipe=recipe, seed=seed)
    return checks


def main(arguments: list[str] | None = None) -> int:
    """Run, join or print."""
    options = parsed(arguments)
    if options.table:
        print(table(read(options.table)))
        return 0
    if options.device == "cuda" and not options.join and not torch.cuda.is_available():
        print("no CUDA device: use --device cpu", file=sys.stderr)
        return 2
    checks = Checks({}, 0) if options.join else run(options)
    checks.records = joined(read(options.join) if options.join else checks.records)
    checks.write(options.out)
    for row in checks.records:
        if row["check"] == "recipe":
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['recipe']:<30} perplexity {row['perplexity']:.3f}  "
                  f"of bf16's {row['ratio']:.5f}  bf16's seeds apart {row['bf16_spread']:.4f}")  # fmt: skip
    failed = sum(row["ok"] is False for row in checks.records)
    print(f"{len(checks.records)} rows, {failed} failed; {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
