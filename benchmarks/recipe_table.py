"""Perplexities of recorded runs against BF16's, and the table of the documentation; parts of `check_recipes.py`.

Runs are compared only with those of the same machine, steps, batch and held-out text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, median
from typing import Any

Result = dict[str, Any]
BASELINE = "bf16"  # the name under which runs without FP8 are recorded
BOUND = 0.01  # of the ratio of mean perplexities
_SAME = ("hardware", "steps", "batch", "learning_rate", "validation_tokens")
_OF_THE_RUN = ("torch", "cuda", "triton", "commit", "time")
_LABELS = {
    "bf16": "BF16",
    "bf16_perturbed": "BF16, its first weights perturbed by 2.6 %",
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
    """Markdown, one table a machine and extent."""
    return "\n\n".join(_table(group) for group in groups([row for row in rows if "perplexity" in row]))


def _table(group: dict[str, list[Result]]) -> str:
    reference = _by_seed(group.get(BASELINE, []))
    first = next(iter(group.values()))[0]
    seeds = {row["seed"] for own in group.values() for row in own}
    lines = [
        f"{first['hardware']}, {first['steps']} steps of {first['batch']} sequences:",
        "",
        f"| recipe | perplexity, mean of {len(seeds)} seeds | against BF16 | tokens/s | memory | native or emulated |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in sorted(group, key=list(_LABELS).index):
        lines.append(_line(recipe, group[recipe], reference))
    return "\n".join(lines)


def _line(recipe: str, own: list[Result], reference: dict[int, float]) -> str:
    found = summary(_by_seed(own), reference)
    mean = fmean(row["perplexity"] for row in own)
    against = f"{100 * (found['ratio'] - 1):+.2f} %" if found and recipe != BASELINE else "—"
    speeds = [row["tokens_per_s"] for row in own if row["tokens_per_s"] is not None]
    memory = [row["peak_memory_bytes"] for row in own if row["peak_memory_bytes"] is not None]
    speed = f"{median(speeds):,.0f}" if speeds else "—"
    if speeds and not all(row["measured_alone"] for row in own):
        speed = f"about {speed}"
    cells = [
        _LABELS[recipe],
        f"{mean:.2f}",
        against,
        speed,
        f"{max(memory) / 2**20:,.0f} MiB" if memory else "—",
        " / ".join(sorted({row["execution"] for row in own})),
    ]
    return "| " + " | ".join(cells) + " |"


def _group(row: Result) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in _SAME)


def _by_seed(runs: list[Result]) -> dict[int, float]:
    return {row["seed"]: row["perplexity"] for row in runs if "perplexity" in row}
