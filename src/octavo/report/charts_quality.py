"""Charts of quality: perplexity by method without training, and the gap to 16 bits after fine-tuning."""

from __future__ import annotations

from octavo.report.analysis import BOUND_PERCENT, FinetuneResult, PtqResult, finetune_results, ptq_results
from octavo.report.figure import Chart, Control, Layout, Trace, axis, label, layout, show, wrapped
from octavo.report.record import Record
from octavo.report.wording import Spread, decimals, percent, spread

_ROW_HEIGHT = 38
_LEAST_PERCENT = 0.2  # the axis reaches at least this far, so that noise does not look like an effect


def bar(result_label: str, color: str, value: Spread, written: str, hatched: bool) -> Trace:
    """One horizontal bar with its figure beside it; hatched means that the arithmetic was emulated."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": [wrapped(result_label)],
        "x": [value.mean],
        "text": [label(written)],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": f"{label(result_label)}: {label(written)}<extra></extra>",
        "marker": {
            "color": color,
            "line": {"color": "@ink", "width": 0.5},
            "pattern": {"shape": "/" if hatched else "", "size": 7, "solidity": 0.35},
        },
        "width": [0.66],
        "showlegend": False,
    }


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
    has_changes = any(result.change_percent for result in results if result.method.family != "16-bit")
    change_title = "Change of perplexity, %"
    quantity = Control(
        "quantity",
        "Show",
        [("change", "change against 16 bits"), ("perplexity", "perplexity")],
        ["change" if has_changes else "perplexity"],
        layouts={
            "change": {"xaxis.title.text": change_title, "meta": {"least": _LEAST_PERCENT}},
            "perplexity": {"xaxis.title.text": "Perplexity", "meta": {"least": 0}},
        },
    )
    words = "; ".join(f"{r.method.label} {spread(r.change_percent, percent)}" for r in results if r.change_percent)
    return Chart(
        "ptq",
        "Perplexity by method, without training",
        f"Change of perplexity against 16 bits: {words}." if words else "Perplexity by method.",
        traces,
        layout(axis(change_title), axis(autorange="reversed", ticklabelstandoff=6)),
        [quantity],
        _ROW_HEIGHT * len(results) + 90,
    )


def _band() -> Layout:
    edges = {"x0": -BOUND_PERCENT, "x1": BOUND_PERCENT, "y0": 0, "y1": 1}
    look = {"fillcolor": "@band", "line": {"width": 0}, "layer": "below"}
    return {"type": "rect", "xref": "x", "yref": "paper", **edges, **look}


def _gap_traces(result: FinetuneResult, gap: Spread, place: int) -> list[Trace]:
    """Before (a ring), the way from there, every seed after (dots) and their mean (a line with its figure)."""
    look, traces = result.method, []
    shared = {"type": "scatter", "showlegend": False}
    before = result.change_before
    if before is not None:
        words = f"{label(look.label)}, without training: {label(spread(before, percent))}"
        traces.append(
            {
                **shared,
                "mode": "lines+markers",
                "x": [before.mean, gap.mean],
                "y": [place, place],
                "line": {"color": look.color, "width": 2, "dash": "dot"},
                "marker": {"symbol": "circle-open", "size": [11, 0], "color": look.color, "line": {"width": 2}},
                "hovertemplate": f"{words}<extra></extra>",
            }
        )
    seeds = [f"seed {label(seed)}: {percent(value)}" for seed, value in result.gap_by_seed]
    traces.append(
        {
            **shared,
            "mode": "markers",
            "x": [value for _, value in result.gap_by_seed],
            "y": [place] * len(seeds),
            "text": seeds,
            "hovertemplate": f"{label(look.label)}, %{{text}}<extra></extra>",
            "marker": {"color": look.color, "size": 10, "line": {"color": "@ink", "width": 1}},
        }
    )
    traces.append(
        {
            **shared,
            "mode": "text",
            "x": [gap.mean],
            "y": [place - 0.32],
            "text": [label(spread(gap, percent))],
            "hoverinfo": "skip",
        }
    )
    return traces


def gap_chart(record: Record) -> Chart | None:
    """The gap to BF16 after fine-tuning: a dot for each seed, a ring for the loss before, a band for the bound."""
    results = [(result, gap) for result in finetune_results(record) if (gap := result.gap_percent) is not None]
    if not results:
        return None
    traces: list[Trace] = []
    values = [BOUND_PERCENT]
    for place, (result, gap) in enumerate(results):
        traces += _gap_traces(result, gap, place)
        values += [abs(value) for _, value in result.gap_by_seed]
        values += [abs(result.change_before.mean)] if result.change_before else []
    reach = 1.15 * max(values)
    names = [wrapped(result.method.label) for result, _ in results]
    ticks: Layout = {"tickmode": "array", "tickvals": list(range(len(names))), "ticktext": names, "zeroline": False}
    x = axis("Perplexity against BF16, %", range=[-reach, reach], zeroline=True, zerolinewidth=2)
    words = "; ".join(f"{result.method.label} {spread(gap, percent)}" for result, gap in results)
    bound = percent(BOUND_PERCENT, 0, signed=False)
    return Chart(
        "gap",
        "Gap to BF16 after fine-tuning",
        f"Gap to BF16 fine-tuned for the same steps: {words}.",
        traces,
        layout(x, axis(range=[len(names) - 0.5, -0.6], ticklabelstandoff=6, **ticks), shapes=[_band()]),
        [],
        62 * len(names) + 80,
        f"Dots: fine-tuned, one for each seed. Rings: without training. The band is {bound} to either side of BF16.",
    )
