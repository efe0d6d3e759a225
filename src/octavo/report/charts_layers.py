"""Where the error arises (a map of layers and methods), and amax and scale over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from octavo.report.figure import Chart, Control, Layout, Trace, axis, label, layout, line_mode, show, whole, wrapped
from octavo.report.methods import method, without_training
from octavo.report.record import Record, Row, number, text
from octavo.report.wording import Spread

_MOST_POINTS = 32_000  # over all curves of scales: about 0.8 MB of the page
_QUANTITIES = [
    ("output_sqnr_db", "SQNR of the output", "dB", 1, 1.0),
    ("input_sqnr_db", "SQNR of the input", "dB", 1, 1.0),
    ("weight_sqnr_db", "SQNR of the weight", "dB", 1, 1.0),
    ("underflow", "underflow", "%", 2, 100.0),
    ("saturation", "saturation", "%", 3, 100.0),
]
_CIVIDIS = "Cividis"
_OPERANDS = {"input": "input", "weight": "weight", "grad_output": "gradient of the output"}


def short_names(layers: list[str]) -> list[str]:
    """The names without the dotted parts that all of them begin with; unchanged when that would empty one."""
    parts = [name.split(".") for name in layers]
    shared = 0
    while all(len(part) > shared + 1 for part in parts) and len({part[shared] for part in parts}) == 1:
        shared += 1
    return [".".join(part[shared:]) for part in parts]


def shortened(name: str, most: int = 24) -> str:
    """``name`` with its middle left out when it is longer than ``most`` letters: both ends tell layers apart."""
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def _means(record: Record, key: str) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], list[Row]] = {}
    for row in record.all("layer_error"):
        found.setdefault((text(row, "method"), text(row, "layer")), []).append(row)
    means = {}
    for place, rows in found.items():
        value = Spread.of(number(row, key) for row in rows)
        if value is not None:
            means[place] = value.mean
    return means


def _map(values: list[list[float | None]], columns: list[str], rows: list[str], names: list[str], how: Any) -> Trace:
    key, _title, unit, digits, _factor = how
    return {
        "type": "heatmap",
        "z": values,
        "x": columns,
        "y": rows,
        "customdata": [[label(name)] * len(columns) for name in names],
        "texttemplate": f"%{{z:.{digits}f}}" if len(rows) <= 64 else "",
        "textfont": {"size": 11},
        "hoverongaps": False,
        "hovertemplate": f"%{{customdata}}<br>%{{x}}: %{{z:.{digits}f}} {unit}<extra></extra>",
        "colorscale": _CIVIDIS,
        "reversescale": unit == "%",
        "xgap": 1,
        "ygap": 1,
        "colorbar": {
            "title": {"text": unit, "side": "right"},
            "thickness": 10,
            "len": 1,
            "outlinewidth": 0,
            "tickfont": {"size": 11},
        },
        "meta": show(quantity=key),
    }


def layer_chart(record: Record) -> Chart | None:
    """A map of SQNR (or underflow, or saturation): layers downwards in the model's order, methods across."""
    rows = record.all("layer_error")
    layers = list(dict.fromkeys(text(row, "layer") for row in rows))
    labels = {text(row, "method"): text(row, "label") for row in record.all("ptq")}
    methods = sorted(record.methods("layer_error"), key=lambda name: method(name).order)
    columns = [wrapped(without_training(name, labels.get(name, "")).label, 16) for name in methods]
    short = [label(shortened(name)) for name in short_names(layers)] if layers else []
    traces, choices = [], []
    for how in _QUANTITIES:
        key, title, unit, digits, factor = how
        means = _means(record, key)
        if not means or (unit == "%" and not any(means.values())):
            continue
        values = [
            [
                None if (value := means.get((name, layer))) is None else round(factor * value, digits + 2)
                for name in methods
            ]
            for layer in layers
        ]
        traces.append(_map(values, columns, short, layers, how))
        choices.append((key, f"{title}, {unit}"))
    if not traces:
        return None
    y = axis(autorange="reversed", showgrid=False, tickfont={"size": 11 if len(layers) <= 64 else 9}, dtick=1)
    x = axis(side="top", showgrid=False, tickfont={"size": 11})
    return Chart(
        "layers",
        "Error by layer",
        f"A map of {len(layers)} layers and {len(methods)} methods, coloured by signal to quantization noise.",
        traces,
        layout(x, y),
        [Control("quantity", "Show", choices, [choices[0][0]])],
        min(1400, 110 + (24 if len(layers) <= 24 else 18) * len(layers)),
        "Darker is worse. 20 dB is an error of 10 % (root mean square), 30 dB one of 3 %.",
    )


def thinned(points: list[tuple[float, float | None, float | None]], most: int) -> list[tuple[float, ...]]:
    """At most ``most`` of the (step, amax, scale) points, evenly spaced; of each stretch the one of largest amax."""
    known = [(step, amax or 0.0, scale or 0.0) for step, amax, scale in sorted(points, key=lambda point: point[0])]
    if len(known) <= most:
        return list(known)
    bounds = [round(index * len(known) / most) for index in range(most + 1)]
    return [max(known[low:high], key=lambda point: point[1]) for low, high in pairwise(bounds)]


def _log_value(value: float) -> float | None:
    return float(f"{value:.3g}") if value > 0 else None


def _scale_traces(points: list[tuple[float, ...]], name: str, layer: str, operand: str) -> list[Trace]:
    look = method(name)
    traces = []
    for panel, place, quantity in ((1, "y", "amax"), (2, "y2", "scale")):
        traces.append(
            {
                "type": "scatter",
                "mode": line_mode(len(points)),
                "x": [whole(point[0]) for point in points],
                "y": [_log_value(point[panel]) for point in points],
                "yaxis": place,
                "name": label(look.label),
                "legendgroup": look.label,
                "line": {"color": look.color, "width": 1.8, "dash": look.dash, "shape": "hv"},
                "hovertemplate": f"{label(look.label)}<br>step %{{x}}: {quantity} %{{y:.3g}}<extra></extra>",
                "meta": show(layer=layer, operand=operand),
            }
        )
    return traces


def _scale_layout() -> Layout:
    power = {"type": "log", "tickformat": "~g", "nticks": 3}
    return layout(
        axis("Step", rangemode="tozero", anchor="y2"),
        axis("amax (log)", domain=[0.54, 1], **power),
        yaxis2=axis("scale (log)", domain=[0, 0.46], **power),
        hovermode="closest",
    )


def scale_chart(record: Record) -> Chart | None:
    """The amax and the scale against the step for one layer and operand at a time, a line for each method; one seed."""
    rows = record.all("scale_history")
    seed = text(rows[0], "seed") if rows else ""
    found: dict[tuple[str, str, str], list[tuple[float, float | None, float | None]]] = {}
    for row in rows:
        step = number(row, "step")
        if step is not None and text(row, "seed") == seed:
            place = (text(row, "layer"), text(row, "operand"), text(row, "method"))
            found.setdefault(place, []).append((step, number(row, "amax"), number(row, "scale")))
    if not found:
        return None
    most = max(40, min(240, _MOST_POINTS // len(found)))
    traces = []
    for (layer, operand, name), points in sorted(found.items(), key=lambda item: method(item[0][2]).order):
        traces += _scale_traces(thinned(points, most), name, layer, operand)
    layers = list(dict.fromkeys(layer for layer, _, _ in found))
    operands = list(dict.fromkeys(operand for _, operand, _ in found))
    dropped = any(len(points) > most for points in found.values())
    note = f"Seed {seed}." if seed else ""
    if dropped:
        note += f" Each curve is thinned to {most} points; the largest amax of every stretch is kept."
    return Chart(
        "scales",
        "amax and scale over time",
        "For one layer and operand at a time: amax above, the scale that was used below, against the step.",
        traces,
        _scale_layout(),
        [
            Control("layer", "Layer", list(zip(layers, short_names(layers), strict=True)), [layers[0]]),
            Control("operand", "Operand", [(name, _OPERANDS.get(name, name)) for name in operands], [operands[0]]),
        ],
        480,
        note.strip(),
    )
