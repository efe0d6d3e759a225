"""The charts of a bench: bars of time by rival, of casts against copying, and of training steps."""

from __future__ import annotations

import textwrap

from octavo.report.bench_rivals import grouped, look, measured, model_name
from octavo.report.charts_quality import bar
from octavo.report.figure import Chart, Control, Layout, Trace, axis, layout, show
from octavo.report.figure import label as escaped
from octavo.report.record import Record, Row, number, text
from octavo.report.wording import Spread, decimals, percent, ratio, significant

_BAR, _ROOM = 46, 90  # CSS pixels of a bar, with a name of up to three lines, and of what surrounds the bars
_LETTERS = 20


def _is_emulated(record: Record) -> bool:
    return record.last("run").get("native_fp8") is False


def _lines(words: str) -> str:
    """A name on as many lines as it takes, as plotly shows it: what tells two rivals apart stands at the end."""
    return "<br>".join(escaped(line) for line in textwrap.wrap(words, _LETTERS))


def _chart(name: str, title: str, traces: list[Trace], controls: list[Control], tallest: int, unit: str) -> Chart:
    x: Layout = axis(unit, nticks=5, separatethousands=True)
    words = ", ".join(label for control in controls for _, label in control.choices)
    return Chart(
        name,
        title,
        f"Bars by rival: {words}.",
        traces,
        layout(x, axis(autorange="reversed", ticklabelstandoff=6)),
        controls,
        _BAR * tallest + _ROOM,
    )


def _bars(rows: list[Row], key: str, words: dict[str, str], hatched: bool, **chosen: str) -> list[Trace]:
    traces = []
    for rival, written in words.items():
        row = next(row for row in rows if text(row, "rival") == rival)
        value, own = number(row, key), look(rival)
        if value is not None:
            fp8 = text(row, "library") != "torch"
            trace = bar(own.label, own.color, Spread(value, None, 1), written, hatched and fp8)
            traces.append({**trace, "y": [_lines(own.label)], "meta": show(**chosen)})
    return traces


def linear_chart(record: Record) -> Chart | None:
    """Device time of one Linear, a choice of shape."""
    traces: list[Trace] = []
    choices, tallest = [], 0
    for shape, group in grouped(measured(record.all("linear"), "ms")).items():
        words = {}
        for row in group:
            speed = number(row, "speedup")
            silent = speed is None or text(row, "rival") == "bf16" or _is_emulated(record)
            against = "" if silent or speed is None else f" ({ratio(speed)})"
            words[text(row, "rival")] = f"{significant(number(row, 'ms') or 0.0)} ms{against}"
        traces += _bars(group, "ms", words, _is_emulated(record), shape=shape)
        choices.append((shape, shape))
        tallest = max(tallest, len(words))
    if not traces:
        return None
    control = Control("shape", "M × K × N", choices, [choices[0][0]])
    return _chart("linear", "One Linear, forward and backward", traces, [control], tallest, "ms (less is better)")


def casts_chart(record: Record) -> Chart | None:
    """Casts as a share of the rate of copying, a choice of shape."""
    traces: list[Trace] = []
    choices, tallest = [], 0
    for shape, group in grouped(measured(record.all("cast"), "of_copy")).items():
        for row in group:
            name = text(row, "name")
            own = look(name if name.startswith("copy") else f"octavo-{name.partition(' ')[0]}")
            label = own.label if name.startswith("copy") else name.replace("rowwise", "row-wise")
            share = 100 * (number(row, "of_copy") or 0.0)
            written = percent(share, 0, signed=False)
            trace = bar(label, own.color, Spread(share, None, 1), written, _is_emulated(record))
            traces.append({**trace, "y": [_lines(label)], "meta": show(shape=shape)})
        choices.append((shape, shape))
        tallest = max(tallest, len(group))
    if not traces:
        return None
    control = Control("shape", "Shape", choices, [choices[0][0]])
    return _chart("casts", "Casts to both layouts", traces, [control], tallest, "% of copy's rate (more is better)")


def host_chart(record: Record) -> Chart | None:
    """Host time, forward or forward with backward."""
    traces: list[Trace] = []
    choices, tallest = [], 0
    groups = grouped(measured(record.all("host"), "us"), by="pass")
    for which, group in sorted(groups.items(), key=lambda pair: -len(pair[0])):
        words = {}
        for row in group:
            against = number(row, "ratio")
            silent = against is None or text(row, "rival") == "bf16" or _is_emulated(record)
            shown = "" if silent or against is None else f" ({ratio(against)})"
            words[text(row, "rival")] = f"{decimals(number(row, 'us') or 0.0, 0)} µs{shown}"
        traces += _bars(group, "us", words, False, which=which)
        choices.append((which, which.replace("+", " and ")))
        tallest = max(tallest, len(words))
    if not traces:
        return None
    control = Control("which", "Show", choices, [choices[0][0]])
    return _chart("host", "Host time of a small Linear", traces, [control], tallest, "µs (less is better)")


def steps_chart(record: Record) -> Chart | None:
    """Training steps: time or peak memory, a choice of model."""
    traces: list[Trace] = []
    models: list[tuple[str, str]] = []
    layouts: dict[str, Layout] = {}
    tallest = 0
    quantities = [
        ("ms", "time", "ms", "ms (less is better)"),
        ("peak_gib", "peak memory", "GiB", "GiB (less is better)"),
    ]
    known = []
    for model, group in grouped(
        [row for row in record.all("step") if row.get("repeat") is not True], by="model"
    ).items():
        drawn = 0
        for key, choice, unit, title in quantities:
            rows = measured(group, key)
            words = {text(row, "rival"): f"{significant(number(row, key) or 0.0)} {unit}" for row in rows}
            traces += _bars(rows, key, words, _is_emulated(record), model=model, quantity=key)
            drawn = max(drawn, len(words))
            if words and key not in layouts:
                layouts[key] = {"xaxis.title.text": title}
                known.append((key, choice))
        if drawn:
            models.append((model, model_name(model)))
            tallest = max(tallest, drawn)
    if not traces:
        return None
    controls = [
        Control("model", "Model", models, [models[0][0]]),
        Control("quantity", "Show", known, [known[0][0]], layouts=layouts),
    ]
    return _chart("steps", "Whole training steps", traces, controls, tallest, "")
