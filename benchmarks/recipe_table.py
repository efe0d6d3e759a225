"""Perplexities of recorded runs against BF16's, and the table of the documentation; parts of `check_recipes.py`.

Runs are compared only with those of the same machine, steps, batch and held-out text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

Result = dict[str, Any]
BASELINE = "bf16"  # the name under which runs without FP8 are recorded
BOUND = 0.01  # of the ratio of mean perplexities
_SAME = ("hardware", "steps", "batch", "learning_rate", "validation_tokens")
_OF_THE_RUN = ("torch", "cuda", "triton", "commit", "time")
_NONE = "—"
_LABELS = {
    "bf16": "BF16",
    "bf16_perturbed": "BF16, its first weights perturbed by 2.6 %, an error like E4M3's",
    "delayed": "`DelayedScaling(amax_history_len=16)`",
    "current": "`CurrentScaling()`",
    "rowwise": "`RowwiseScaling()`",
    "rowwise_high_precision_wgrad": "`RowwiseScaling(high_precision_wgrad=True)`",
    "block": "`BlockScaling()`",
    "mxfp8": "`MXFP8Scaling()`",
    "static": "`StaticScaling`, input scales calibrated",
    "custom": "`CustomRecipe`: output by row, input's gradient by tensor, weight's in BF16",
    "current_stochastic": '`CurrentScaling(grad_output_rounding="stochastic")`',
}


def read(paths: Iterable[Path]) -> list[Result]:
    """The runs of JSONL files; of two that are the same, the later one that came to a perplexity."""
    rows: dict[Any, Result] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row.get("check") != "run":
                continue
            key = (*_group(row), row["recipe"], row["seed"])
            if "perplexity" in row or key not in rows:
                rows[key] = row
    return list(rows.values())


def joined(rows: list[Result]) -> list[Result]:
    """Runs, each with its ratio to BF16's of the same seed, and then a summary of each recipe."""
    runs = [dict(row) for row in rows if row["check"] == "run"]
    summaries = []
    for group in groups(runs):
        for recipe, own in group.items():
            reference = _by_seed(group.get(BASELINE, []))
            for row in own:
                if "perplexity" in row and row["seed"] in reference:
                    row["against_bf16"] = row["perplexity"] / reference[row["seed"]]
            found = summary(_by_seed(own), reference)
            if found:
                about = {key: own[0].get(key) for key in (*_SAME, *_OF_THE_RUN)}
                summaries.append(about | {"check": "recipe", "recipe": recipe} | found)
    return runs + summaries


def groups(runs: list[Result]) -> list[dict[str, list[Result]]]:
    """Runs that may be compared, by recipe."""
    found: dict[Any, dict[str, list[Result]]] = {}
    for row in runs:
        found.setdefault(_group(row), {}).setdefault(row["recipe"], []).append(row)
    return list(found.values())


def summary(own: dict[int, float], reference: dict[int, float]) -> Result:
    """Means over the seeds that both have, from perplexities by seed; nothing without such seeds.

    `bf16_spread` is how far BF16's own seeds lie apart, of their mean.
    """
    seeds = sorted(own.keys() & reference.keys())
    if not seeds:
        return {}
    baseline = [reference[seed] for seed in seeds]
    mean, mean_of_baseline = fmean(own[seed] for seed in seeds), fmean(baseline)
    ratio = mean / mean_of_baseline
    return {
        "seeds": seeds,
        "perplexity": mean,
        "bf16_perplexity": mean_of_baseline,
        "ratio": ratio,
        "bf16_spread": (max(baseline) - min(baseline)) / mean_of_baseline,
        "ok": abs(ratio - 1) <= BOUND,
    }


def table(rows: list[Result]) -> str:
    """Markdown, one table a machine and extent.

    Speeds are those of runs that had the machine alone, if there are such: short ones have no table of their own.
    """
    done = [row for row in rows if "perplexity" in row]
    alone = {(row["hardware"], row["recipe"]): row for row in done if row["measured_alone"]}
    long = [group for group in groups(done) if not all(row["measured_alone"] for own in group.values() for row in own)]
    return "\n\n".join(_table(group, alone) for group in long or groups(done))


def _table(group: dict[str, list[Result]], alone: dict[tuple[str, str], Result]) -> str:
    reference = _by_seed(group.get(BASELINE, []))
    first = next(iter(group.values()))[0]
    seeds = {row["seed"] for own in group.values() for row in own}
    # All from one kind of run, so that they may be compared.
    of_alone = all((first["hardware"], recipe) in alone for recipe in group)
    speeds = {recipe: [alone[first["hardware"], recipe]] if of_alone else group[recipe] for recipe in group}
    columns = {
        "recipe": lambda recipe: _LABELS[recipe],
        f"perplexity, mean of {len(seeds)} seeds": lambda recipe: f"{fmean(_perplexities(group[recipe])):.2f}",
        "against BF16": lambda recipe: _against(group[recipe], recipe, reference),
        "tokens/s, alone" if of_alone else "tokens/s, other work beside it": (
            lambda recipe: _cell("tokens_per_s", speeds[recipe], median)
        ),
        "memory, MiB": lambda recipe: _cell("peak_memory_bytes", group[recipe], lambda bytes: max(bytes) / 2**20),
        "native or emulated": lambda recipe: " / ".join(sorted({row["execution"] for row in group[recipe]})),
    }
    recipes = sorted(group, key=list(_LABELS).index)
    cells = {title: [cell(recipe) for recipe in recipes] for title, cell in columns.items()}
    kept = [title for title, own in cells.items() if any(cell != _NONE for cell in own)]
    lines = [f"{first['hardware']}, {first['steps']} steps of {first['batch']} sequences:", ""]
    lines += [_line(kept), "|" + "---|" * len(kept)]
    return "\n".join([*lines, *(_line(row) for row in zip(*(cells[title] for title in kept), strict=True))])


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _perplexities(own: list[Result]) -> list[float]:
    return [row["perplexity"] for row in own]


def _against(own: list[Result], recipe: str, reference: dict[int, float]) -> str:
    found = summary(_by_seed(own), reference)
    return f"{100 * (found['ratio'] - 1):+.2f} %" if found and recipe != BASELINE else _NONE


def _cell(figure: str, own: list[Result], joined: Callable[[list[float]], float]) -> str:
    """A figure of some runs, if they have it."""
    values = [row[figure] for row in own if row[figure] is not None]
    return f"{joined(values):,.0f}" if values else _NONE


def _group(row: Result) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _SAME)


def _by_seed(runs: list[Result]) -> dict[int, float]:
    return {row["seed"]: row["perplexity"] for row in runs if "perplexity" in row}
