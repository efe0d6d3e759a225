"""Loss while training: by method and seed, and as a difference to BF16.

Training losses are means over windows of steps, because single steps differ more than methods do. The difference is
taken within a seed and at the same step: both saw the same data, so its noise cancels.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from octavo.report.analysis import baseline_key
from octavo.report.figure import Chart, Control, Trace, axis, label, layout, line_mode, show, whole
from octavo.report.methods import method
from octavo.report.record import Record, number, text

_WINDOWS = 60
_DIGITS = 5

Curve = list[tuple[float, float]]  # (step, loss)
CurveOf = dict[tuple[str, str, str, str], Curve]  # (phase, split, method, seed) -> curve

_VIEWS = {
    "baseline": ("training from scratch", "Loss, nats per token"),
    "finetune": ("fine-tuning", "Loss, nats per token"),
    "difference": ("fine-tuning, difference to BF16", "Loss minus that of BF16, nats per token"),
}


def curves(record: Record) -> CurveOf:
    """Every curve of loss against step, sorted by step."""
    found: CurveOf = {}
    for kind, split in (("train_step", "train"), ("validation", "validation")):
        for row in record.all(kind):
            step, loss = number(row, "step"), number(row, "loss")
            if step is not None and loss is not None:
                key = (text(row, "phase"), split, text(row, "method"), text(row, "seed"))
                found.setdefault(key, []).append((step, loss))
    return {key: sorted(points) for key, points in found.items()}


def window_means(points: Curve, width: int) -> Curve:
    """Means over windows of ``width`` steps, from the first one on, each placed at its window's last step."""
    windows: dict[int, list[tuple[float, float]]] = {}
    for step, loss in points:
        windows.setdefault(int((step - points[0][0]) // width), []).append((step, loss))
    return [
        (max(step for step, _ in inside), statistics.fmean(loss for _, loss in inside))
        for _, inside in sorted(windows.items())
    ]


def mean_curve(several: list[Curve]) -> Curve:
    """The mean over curves, at the steps that all of them have."""
    by_step = [dict(points) for points in several]
    common = set(by_step[0]).intersection(*by_step[1:])
    return [(step, statistics.fmean(points[step] for points in by_step)) for step in sorted(common)]


def difference_curve(points: Curve, baseline: Curve) -> Curve:
    """``points - baseline`` at the steps that both have."""
    reference = dict(baseline)
    return [(step, loss - reference[step]) for step, loss in points if step in reference]


def _smoothed(found: CurveOf, width_of: dict[str, int]) -> CurveOf:
    return {
        key: window_means(points, width_of[key[0]]) if key[1] == "train" else points for key, points in found.items()
    }


def _widths(found: CurveOf) -> dict[str, int]:
    last: dict[str, float] = {}
    for (phase, *_), points in found.items():
        last[phase] = max(last.get(phase, 1), points[-1][0])
    return {phase: max(1, math.ceil(steps / _WINDOWS)) for phase, steps in last.items()}


def _by_view(found: CurveOf, baseline: str) -> Iterator[tuple[str, str, str, dict[str, Curve]]]:
    """(view, split, method, curve by seed) of every view."""
    grouped: dict[tuple[str, str, str], dict[str, Curve]] = {}
    for (phase, split, name, seed), points in found.items():
        if phase not in ("baseline", "finetune"):
            continue
        grouped.setdefault((phase, split, name), {})[seed] = points
        reference = found.get((phase, split, baseline, seed))
        if phase == "finetune" and name != baseline and reference:
            difference = difference_curve(points, reference)
            if difference:
                grouped.setdefault(("difference", split, name), {})[seed] = difference
    for (view, split, name), by_seed in sorted(grouped.items(), key=lambda item: method(item[0][2]).order):
        yield view, split, name, by_seed


def _trace(view: str, split: str, name: str, points: Curve, seeds: str, hover: str) -> Trace:
    look = method(name)
    train = split == "train"
    return {
        "type": "scatter",
        "mode": line_mode(len(points)) if train else "lines+markers",
        "x": [whole(step) for step, _ in points],
        "y": [round(loss, _DIGITS) for _, loss in points],
        "name": label(look.label),
        "legendgroup": look.label,
        "opacity": 0.55 if train else 1,
        "line": {"color": look.color, "width": 1.2 if train else 2, "dash": "solid" if train else look.dash},
        "marker": {"symbol": look.symbol, "size": 6, "color": look.color},
        "hovertemplate": f"{label(look.label)}, {split}{hover}<br>step %{{x}}: %{{y:.4f}}<extra></extra>",
        "meta": show(view=view, split=split, seeds=seeds),
    }


def _controls(views: list[str], splits: list[str], several_seeds: bool, several_methods: bool) -> list[Control]:
    names = {"train": "training", "validation": "validation"}
    controls = [
        Control(
            "view",
            "Show",
            [(view, _VIEWS[view][0]) for view in views],
            ["finetune" if "finetune" in views and several_methods else views[0]],
            layouts={view: {"yaxis.title.text": _VIEWS[view][1]} for view in views},
        ),
        Control("split", "Loss", [(split, names[split]) for split in splits], splits, "check"),
    ]
    if several_seeds:
        controls.append(Control("seeds", "Seeds", [("mean", "mean"), ("each", "each one")], ["mean"]))
    return controls


def loss_chart(record: Record) -> Chart | None:
    """Curves of training and validation loss by method: from scratch, in fine-tuning, and against BF16."""
    found = curves(record)
    widths = _widths(found)
    baseline = next((key for key in ("bf16", "fp16") if key in record.methods("validation")), "")
    baseline = baseline_key(record, "finetune") or baseline or "bf16"
    traces: list[Trace] = []
    views: list[str] = []
    splits: list[str] = []
    seeds: set[str] = set()
    for view, split, name, by_seed in _by_view(_smoothed(found, widths), baseline):
        views.append(view)
        splits.append(split)
        seeds |= set(by_seed)
        traces.append(_trace(view, split, name, mean_curve(list(by_seed.values())), "mean", ""))
        if len(by_seed) > 1:
            traces += [
                _trace(view, split, name, points, "each", f", seed {label(seed)}") for seed, points in by_seed.items()
            ]
        else:
            traces[-1]["meta"] = show(view=view, split=split)
    traces = [trace for trace in traces if trace["x"]]
    if not traces:
        return None
    ordered = [view for view in _VIEWS if view in views]
    shown: list[str] = [split for split in ("train", "validation") if split in splits]
    width = {phase: steps for phase, steps in widths.items() if phase in ("baseline", "finetune")}
    windows = ", ".join(f"{steps} steps ({_VIEWS[phase][0]})" for phase, steps in width.items() if steps > 1)
    note = "Solid thin lines: training loss" + (f", means over windows of {windows}" if windows else "")
    return Chart(
        "loss",
        "Loss by method",
        "Curves of training and validation loss against the step, by method.",
        traces,
        layout(axis("Step", rangemode="tozero"), axis("Loss, nats per token"), hovermode="closest"),
        _controls(ordered, shown, len(seeds) > 1, len(record.methods("finetune")) > 1),
        430,
        f"{note}. Lines with markers: validation loss. Click a name in the legend to hide its curves.",
    )
