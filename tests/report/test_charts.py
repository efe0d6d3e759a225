"""Charts as data: plotly itself accepts them, and they show what the rows hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from plotly import graph_objects
from tests.report import rows as fictional

from octavo.report.charts_cost import memory_chart, speed_chart
from octavo.report.charts_layers import layer_chart, scale_chart, short_names, thinned
from octavo.report.charts_quality import gap_chart, ptq_chart
from octavo.report.charts_training import difference_curve, loss_chart, mean_curve, window_means
from octavo.report.figure import Chart
from octavo.report.record import Record
from octavo.report.sections import sections


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    return [chart for section in sections(Record(rows)) for chart in section.charts]


def painted(value: Any) -> Any:
    """With a real colour for each token, as the page's script does."""
    if isinstance(value, str):
        return "#123456" if value.startswith("@") else value
    if isinstance(value, list):
        return [painted(item) for item in value]
    if isinstance(value, dict):
        return {key: painted(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize(
    "rows", [fictional.study(steps=24), fictional.study(native=True, steps=24), fictional.interrupted()]
)
def test_plotly_knows_every_property(rows: list[dict[str, Any]]) -> None:
    drawn = charts(rows)
    assert drawn
    for chart in drawn:
        payload = painted(chart.payload())
        figure = graph_objects.Figure(data=payload["data"], layout=payload["layout"])
        for choices in payload["layouts"].values():
            for changes in choices.values():
                figure.update_layout({path.replace(".", "_"): value for path, value in changes.items()})
        assert len(figure.data) == len(chart.traces)


@pytest.mark.parametrize("rows", [fictional.study(steps=24), fictional.study(native=True, num_seeds=1, steps=24)])
def test_every_choice_shows_something_and_every_trace_can_be_shown(rows: list[dict[str, Any]]) -> None:
    for chart in charts(rows):
        offered = {control.name: {value for value, _ in control.choices} for control in chart.controls}
        wanted = [trace.get("meta", {}).get("show", {}) for trace in chart.traces]
        for name, values in offered.items():
            assert values == {value for show in wanted for value in show.get(name, values)}, (chart.name, name)
        for show in wanted:
            assert all(set(allowed) <= offered[name] for name, allowed in show.items()), chart.name


def test_all_charts_of_a_complete_study() -> None:
    assert [chart.name for chart in charts(fictional.study(steps=24))] == [
        "ptq",
        "loss",
        "gap",
        "layers",
        "scales",
        "speed",
        "memory",
    ]


@pytest.mark.parametrize(
    "make",
    [ptq_chart, gap_chart, loss_chart, layer_chart, scale_chart, speed_chart, memory_chart],
    ids=lambda f: f.__name__,
)
def test_no_rows_no_chart(make: Any) -> None:
    assert make(Record([])) is None


def test_bars_are_hatched_where_and_only_where_a_time_was_emulated() -> None:
    record = Record(fictional.study(native=True, steps=12))
    speed, memory = speed_chart(record), memory_chart(record)
    assert speed is not None
    assert memory is not None

    def hatched(chart: Chart, quantity: str) -> set[str]:
        shown = [trace for trace in chart.traces if trace["meta"]["show"]["quantity"] == [quantity]]
        return {trace["y"][0] for trace in shown if trace["marker"]["pattern"]["shape"]}

    assert hatched(speed, "decode") == {"FP8 block 128", "MXFP8", "INT8", "INT4 weights"}
    assert hatched(speed, "train") == set()
    assert hatched(memory, "weights") == set()
    emulated = [t for t in speed.traces if t["marker"]["pattern"]["shape"]]
    assert all("emulated" in trace["text"][0] and "\u00d7" not in trace["text"][0] for trace in emulated)


def test_windows_end_where_their_last_step_is() -> None:
    points = [(float(step), float(step)) for step in range(1, 8)]
    # windows of 3 steps: (1, 2, 3), (4, 5, 6) and what is left, (7)
    assert window_means(points, 3) == [(3.0, 2.0), (6.0, 5.0), (7.0, 7.0)]


def test_windows_start_with_the_first_step() -> None:
    assert window_means([(0.0, 1.0), (1.0, 3.0), (2.0, 9.0)], 2) == [(1.0, 2.0), (2.0, 9.0)]


def test_the_mean_over_seeds_uses_the_steps_that_all_have() -> None:
    assert mean_curve([[(1, 2.0), (2, 3.0)], [(2, 5.0), (3, 9.0)]]) == [(2, 4.0)]


def test_a_difference_is_taken_at_the_same_step() -> None:
    assert difference_curve([(1, 3.5), (2, 3.0)], [(2, 2.0), (3, 9.0)]) == [(2, 1.0)]


def test_the_difference_to_bf16_cancels_what_the_data_did() -> None:
    rows = [
        {
            "kind": "validation",
            "phase": "finetune",
            "method": name,
            "seed": seed,
            "step": step,
            "loss": 3 + step + seed + more,
        }
        for name, more in (("bf16", 0.0), ("rowwise", 0.25))
        for seed in (0, 1)
        for step in (1, 2)
    ]
    chart = loss_chart(Record(rows))
    assert chart is not None
    shown = [t["y"] for t in chart.traces if t["meta"]["show"]["view"] == ["difference"]]
    assert shown == [[0.25, 0.25]] * 3  # the mean, and each of two seeds


def test_thinning_keeps_the_spike() -> None:
    points = [(float(step), 1.0 if step != 57 else 90.0, 0.5 if step != 57 else 0.7) for step in range(100)]
    kept = thinned(points, 10)
    assert len(kept) == 10
    assert (57.0, 90.0, 0.7) in kept
    assert thinned(points, 100) == points


def test_a_single_step_is_drawn_as_a_point() -> None:
    row = {"kind": "scale_history", "method": "delayed", "seed": 0, "layer": "a", "operand": "input"}
    one = scale_chart(Record([{**row, "step": 1, "amax": 2.0, "scale": 0.5}]))
    many = scale_chart(Record([{**row, "step": step, "amax": 2.0, "scale": 0.5} for step in range(3)]))
    assert one is not None
    assert many is not None
    assert {trace["mode"] for trace in one.traces} == {"lines+markers"}
    assert {trace["mode"] for trace in many.traces} == {"lines"}


def test_layers_keep_what_tells_them_apart() -> None:
    assert short_names(["model.h.0.fc", "model.h.1.fc"]) == ["0.fc", "1.fc"]
    assert short_names(["model.fc"]) == ["fc"]
    assert short_names(["a.b", "c.b"]) == ["a.b", "c.b"]


def test_a_payload_is_json_without_nan() -> None:
    for chart in charts(fictional.hostile()):
        json.dumps(chart.payload(), allow_nan=False)


def test_texts_cannot_be_markup_in_a_chart() -> None:
    for chart in charts(fictional.hostile()):
        shown = [{key: value for key, value in trace.items() if key != "meta"} for trace in chart.traces]
        assert "<img" not in json.dumps(shown)
