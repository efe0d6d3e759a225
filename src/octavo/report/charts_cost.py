"""Bars of speed and of memory. A hatched bar was emulated: it is no speed of its format."""

from __future__ import annotations

from collections.abc import Callable

from octavo.report.analysis import factor, finetune_results, ptq_baseline, ptq_results
from octavo.report.charts_quality import bar
from octavo.report.figure import Chart, Control, Trace, axis, layout, show
from octavo.report.methods import Method
from octavo.report.record import Record
from octavo.report.wording import Spread, rate, ratio, significant, size

Bar = tuple[Method, Spread | None, str]  # method, value, execution
Quantity = tuple[str, str, str, list[Bar], Callable[[float], str], float]  # key, choice, axis, bars, words, unit


def _written(value: Spread, words: str, baseline: Spread | None, method: Method, execution: str) -> str:
    if "emulated" in execution:
        return f"{words}, emulated"
    against = factor(value, baseline)
    return words if against is None or method.family == "16-bit" else f"{words} ({ratio(against)})"


def _bars_chart(name: str, title: str, quantities: list[Quantity], timed: bool, note: str) -> Chart | None:
    traces: list[Trace] = []
    choices, layouts, tallest = [], {}, 0
    for key, choice, unit_title, bars, words, unit in quantities:
        known = [(look, value, execution) for look, value, execution in bars if value is not None]
        if not known:
            continue
        baseline = next((value for look, value, _ in known if look.family == "16-bit"), None)
        for look, value, execution in known:
            executed = execution if timed else ""
            written = _written(value, words(value.mean), baseline, look, executed)
            scaled = Spread(value.mean / unit, None, value.count)
            trace = bar(look.label, look.color, scaled, written, "emulated" in executed)
            traces.append({**trace, "meta": show(quantity=key)})
        choices.append((key, choice))
        layouts[key] = {"xaxis.title.text": unit_title}
        tallest = max(tallest, len(known))
    if not choices:
        return None
    x = axis(nticks=5, separatethousands=True)
    return Chart(
        name,
        title,
        f"Bars by method: {', '.join(choice for _, choice in choices)}.",
        traces,
        layout(x, axis(autorange="reversed", ticklabelstandoff=6)),
        [Control("quantity", "Show", choices, [choices[0][0]], layouts=layouts)],
        38 * tallest + 90,
        note,
    )


def speed_chart(record: Record) -> Chart | None:
    """Speed by method: decoding, prefill, time to the first token, steps of training."""
    ptq, tuned = ptq_results(record), finetune_results(record)
    emulated = any("emulated" in execution for execution in [r.execution for r in ptq] + [r.execution for r in tuned])
    note = (
        "Hatched: emulated, so the bar is the speed of the emulation and no speed of that format." if emulated else ""
    )
    quantities: list[Quantity] = [
        ("decode", "decoding", "Tokens/s", [(r.method, r.decode, r.execution) for r in ptq], rate, 1.0),
        ("prefill", "prefill", "Tokens/s", [(r.method, r.prefill, r.execution) for r in ptq], rate, 1.0),
        (
            "ttft",
            "time to the first token",
            "Milliseconds (less is better)",
            [(r.method, r.ttft_s, r.execution) for r in ptq],
            lambda seconds: f"{significant(seconds * 1e3)} ms",
            1e-3,
        ),
        ("train", "fine-tuning", "Steps/s", [(r.method, r.steps_per_s, r.execution) for r in tuned], rate, 1.0),
    ]
    return _bars_chart("speed", "Speed", quantities, True, note)


def memory_chart(record: Record) -> Chart | None:
    """Memory by method: weights of the Linear layers, the whole model, the peak of fine-tuning."""
    ptq, tuned = ptq_results(record), finetune_results(record)
    mib = float(2**20)
    quantities: list[Quantity] = [
        ("weights", "weights of Linear layers", "MiB", [(r.method, r.weight_bytes, "") for r in ptq], size, mib),
        ("model", "whole model", "MiB", [(r.method, r.model_bytes, "") for r in ptq], size, mib),
        ("peak", "peak while fine-tuning", "MiB", [(r.method, r.peak_memory, "") for r in tuned], size, mib),
    ]
    return _bars_chart("memory", "Memory", quantities, False, "")


def cost_summary(record: Record) -> str:
    """One sentence below the heading: what the bars are measured against."""
    baseline = ptq_baseline(ptq_results(record))
    if baseline is None:
        return "Nothing in 16 bits to compare with."
    return f"In brackets: the ratio to {baseline.method.label}; none where a time is that of an emulation."
