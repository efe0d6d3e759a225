"""Charts of quality: perplexity by method without training, and the gap to 16 bits after fine-tuning."""

from __future__ import annotations

from octavo.report.analysis import BOUND_PERCENT, PtqResult, finetune_results, ptq_results
from octavo.report.figure import Chart, Control, Trace, axis, label, layout, show
from octavo.report.record import Record
from octavo.report.wording import Spread, decimals, percent, spread

_ROW_HEIGHT = 38


def bar(result_label: str, color: str, value: Spread, written: str, hatched: bool) -> Trace:
    """One horizontal bar with its figure beside it; hatched means that the arithmetic was emulated."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [label(result_label)],
        "x": [value.mean],
        "text": [label(written)],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"{label(result_label)}: {label(written)}<extra></extra>",
        "marker": {
            "color": color,
            "line": {"color": "@ink", "width": 0.5},
            "pattern": {"shape": "/" if hatched else "", "fgcolor": "@panel", "size": 7, "solidity": 0.35},
        },
        "width": [0.66],
        "showlegend": False,
    }


def room_for_text(values: list[float]) -> list[float]:
    """The range of a bar axis that holds zero, every bar, and the figure written beside the longest."""
    low, high = min([0.0, *values]), max([0.0, *values])
    width = (high - low) or 1.0
    return [low - (0.28 * width if low < 0 else 0.0), high + 0.28 * width]


def _family_traces(results: list[PtqResult]) -> list[Trace]:
    traces = []
    for result in results:
        for quantity, value, written in (
            ("change", result.change_percent, spread(result.change_percent, percent)),
            ("perplexity", result.perplexity, spread(result.perplexity, lambda number: decimals(number, 2))),
        ):
            if value is None or (quantity == "change" and result.method.family == "16-bit"):
                continue
            trace = bar(result.method.label, result.method.color, value, written, False)
            traces.append({**trace, "meta": show(quantity=quantity)})
    return traces


def ptq_chart(record: Record) -> Chart | None:
    """Perplexity by method without training: bars of the change against 16 bits, or of perplexity itself."""
    results = [result for result in ptq_results(record) if result.perplexity is not None]
    traces = _family_traces(results)
    if not traces:
        return None
    changes = [result.change_percent.mean for result in results if result.change_percent is not None]
    perplexities = [result.perplexity.mean for result in results if result.perplexity is not None]
    has_changes = any(result.change_percent for result in results if result.method.family != "16-bit")
    x = axis("Perplexity against 16 bits, %", range=room_for_text(changes), zeroline=True)
    other = {"xaxis.title.text": "Perplexity", "xaxis.range": room_for_text(perplexities)}
    quantity = Control(
        "quantity",
        "Show",
        [("change", "change against 16 bits"), ("perplexity", "perplexity")],
        ["change" if has_changes else "perplexity"],
        layouts={
            "change": {"xaxis.title.text": x["title"]["text"], "xaxis.range": x["range"]},
            "perplexity": other,
        },
    )
    words = "; ".join(f"{r.method.label} {spread(r.change_percent, percent)}" for r in results if r.change_percent)
    return Chart(
        "ptq",
        "Perplexity by method, without training",
        f"Change of perplexity against 16 bits: {words}." if words else "Perplexity by method.",
        traces,
        layout(x, axis(autorange="reversed", ticklabelstandoff=6), bargap=0.3),
        [quantity],
        _ROW_HEIGHT * len(results) + 90,
    )


def gap_chart(record: Record) -> Chart | None:
    """The gap to 16 bits after fine-tuning: a bar for the mean, a dot for each seed, a band for the bound."""
    results = [result for result in finetune_results(record) if result.gap_percent is not None]
    traces: list[Trace] = []
    values = [BOUND_PERCENT, -BOUND_PERCENT]
    for result in results:
        assert result.gap_percent is not None
        written = spread(result.gap_percent, percent)
        values += [gap for _, gap in result.gap_by_seed]
        seeds = [f"seed {label(seed)}: {percent(gap)}" for seed, gap in result.gap_by_seed]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": [gap for _, gap in result.gap_by_seed],
                "y": [label(result.method.label)] * len(result.gap_by_seed),
                "text": seeds,
                "hovertemplate": "%{y}, %{text}<extra></extra>",
                "marker": {"color": result.method.color, "size": 9, "opacity": 0.75, "line": {"color": "@ink", "width": 1}},
                "showlegend": False,
            }
        )
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [result.gap_percent.mean],
                "y": [label(result.method.label)],
                "text": [label(written)],
                "textposition": "top center",
                "hovertemplate": "%{y}, mean: %{text}<extra></extra>",
                "marker": {"symbol": "line-ns-open", "size": 20, "color": "@ink", "line": {"width": 3}},
                "showlegend": False,
            }
        )
    if not traces:
        return None
    reach = 1.15 * max(abs(value) for value in values)
    band = {
        "type": "rect",
        "xref": "x",
        "yref": "paper",
        "x0": -BOUND_PERCENT,
        "x1": BOUND_PERCENT,
        "y0": 0,
        "y1": 1,
        "fillcolor": "@band",
        "line": {"width": 0},
        "layer": "below",
    }
    x = axis("Perplexity against BF16 fine-tuned, %", range=[-reach, reach], zeroline=True, zerolinewidth=2)
    words = "; ".join(f"{r.method.label} {spread(r.gap_percent, percent)}" for r in results)
    return Chart(
        "gap",
        "Gap to BF16 after fine-tuning",
        f"Gap to BF16 fine-tuned for the same steps: {words}. The band is {BOUND_PERCENT} % to either side.",
        traces,
        layout(x, axis(autorange="reversed", ticklabelstandoff=6), shapes=[band]),
        [],
        64 * len(results) + 90,
    )
