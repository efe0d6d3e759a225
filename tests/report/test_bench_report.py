from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import plotly.offline
import pytest
from rich.console import Console
from tests.bench import rows as made
from tests.report import check_page

from octavo.bench import with_targets
from octavo.report import bench_charts, bench_tables
from octavo.report.bench_fitting import fitted, kept_columns
from octavo.report.bench_page import build_bench, render_bench
from octavo.report.bench_rivals import best_peer, look
from octavo.report.bench_sections import TERMS, bench_sections, sections_table, sentences, verdict_words
from octavo.report.bench_targets import targets_table, unmeasured
from octavo.report.bench_terminal import bench_summary
from octavo.report.record import Record
from octavo.report.tables import Table

SHAPE = "8192 × 768 × 3072"
SOURCE = Path(__file__).resolve().parents[2] / "src"


def whole() -> list[dict[str, Any]]:
    return with_targets(made.whole())


def cells(table: Table) -> dict[str, dict[str, str]]:
    names = [column.name for column in table.columns]
    rows = [[cell.text.replace("\u00a0", " ") for cell in row] for row in table.rows]
    return {row[0]: dict(zip(names, row, strict=True)) for row in rows}


@pytest.mark.parametrize(
    ("key", "label", "color"),
    [
        ("bf16", "BF16", "@ink"),
        ("bf16-compiled-captured", "BF16, compiled, step captured", "@ink"),
        ("octavo-rowwise-cached", "Octavo row-wise, weight cached", "@green"),
        ("octavo-delayed-compiled", "Octavo delayed, compiled", "@blue"),
        ("te-block", "TE block", "@grey"),
        ("torchao-tensorwise", "torchao tensor-wise", "@orange"),
        ("gemms", "three FP8 products alone", "@yellow"),
    ],
)
def test_a_rival_has_one_name_and_one_colour(key: str, label: str, color: str) -> None:
    assert (look(key).label, look(key).color) == (label, color)


def test_a_linear_stands_beside_bf16_the_best_peer_and_its_target() -> None:
    table = bench_tables.linear_table(Record(whole()), SHAPE)
    rows = cells(table)
    delayed = rows["Octavo delayed"]
    assert delayed["Speed BF16 = 1"] == "1.60×"
    assert delayed["Speed best peer = 1"] == "1.20×"  # 6.0 of TE delayed over 5.0
    assert delayed["Target ms"] == "5.50"
    assert [row[place].tone for row in table.rows for place in [5] if row[0].text.startswith("Octavo")] == [
        "good",
        "bad",
    ]
    assert "TE block" not in rows
    assert table.notes == ["TE block: failed: RuntimeError: no kernel image"]


def test_a_figure_of_another_method_is_marked_and_not_compared() -> None:
    kernels = made.linear("te-delayed", 6.0, method="sum of kernels")
    table = bench_tables.linear_table(
        Record([made.linear("bf16", 8.0), made.linear("octavo-delayed", 5.0), kernels]), SHAPE
    )
    rows = cells(table)
    assert rows["TE delayed"]["Device time ms"] == "6.00 †"
    assert "Speed best peer = 1" not in rows["Octavo delayed"] or rows["Octavo delayed"]["Speed best peer = 1"] == "—"
    assert any("could not be captured" in note for note in table.notes)


def test_the_best_peer_is_the_fastest_of_them() -> None:
    peers = [made.linear("te-delayed", 6.0), made.linear("torchao-rowwise-compiled", 5.0), made.linear("bf16", 1.0)]
    best = best_peer(peers, "ms")
    assert best is not None
    assert best["rival"] == "torchao-rowwise-compiled"
    assert best_peer([made.linear("bf16", 1.0)], "ms") is None


def test_steps_show_ratios_to_bf16_eager_and_compiled_and_drift() -> None:
    rows = cells(bench_tables.steps_table(Record(whole()), "vit"))
    octavo = rows["Octavo delayed, compiled"]
    assert octavo["Speed BF16 = 1"] == "1.49×"
    assert octavo["Speed BF16 compiled = 1"] == "1.23×"
    assert octavo["Speed best peer = 1"] == "1.67×"
    assert octavo["Peak memory GiB"] == "15.00"
    assert rows["BF16, compiled (at the end)"]["Time ms"] == "88.0"
    notes = [note.replace("\u00a0", " ") for note in bench_tables.steps_table(Record(whole()), "vit").notes]
    assert "BF16, compiled, measured again at the end: 2.3 % slower (drift)." in notes  # 88 against 86


def test_a_warm_up_that_does_not_tell_what_compiling_costs_is_a_dash_with_the_reason() -> None:
    table = bench_tables.steps_table(Record(whole()), "vit")
    warm = {name: row["Warm-up s"] for name, row in cells(table).items()}
    assert warm["Octavo delayed, compiled"] == warm["BF16"] == "20.0"
    assert warm["BF16, compiled (at the end)"] == warm["Octavo delayed, compiled, step captured"] == "—"
    assert any(note.startswith("Warm-up — of BF16, compiled at the end: bf16-compiled had") for note in table.notes)


def test_what_a_row_says_beside_its_figures_stands_below_the_table() -> None:
    noted = made.step("octavo-delayed-reduced", 60.0, peak_gib=None, note="no peak memory: counted too late")
    notes = bench_tables.steps_table(Record([made.step("bf16", 90.0), noted]), "vit").notes
    assert "Octavo delayed, compiled to reduce overhead: no peak memory: counted too late" in notes


def test_the_same_measured_twice_shows_the_noise() -> None:
    rows = [made.linear("bf16", 8.0), made.linear("bf16-again", 7.92)]
    note, _ = bench_tables.linear_table(Record(rows), SHAPE).notes
    assert note.replace("\u00a0", " ") == "The same twice: BF16 differs by −1.0 %, which is noise."


def test_casts_are_shares_of_copy() -> None:
    table = bench_tables.casts_table(Record(whole()))
    shown = [[cell.text.replace("\u00a0", " ") for cell in row] for row in table.rows]
    assert ["16384 × 8192", "delayed"] in [row[:2] for row in shown]
    assert "91 %" in shown[1]


def test_the_answer_says_how_many_targets_passed_and_names_each_that_was_missed() -> None:
    record = Record(whole())
    missed = [row for row in record.all("target") if row["verdict"] == "miss"]
    words = [sentence.text for sentence in sentences(record)]
    assert words[0] == verdict_words(record)
    assert re.match(r"Targets: \d+ passed, 1 missed, \d+ not measured here\.", words[0])
    assert len(words) == 1 + len(missed) == 2
    assert "Linear M 8192, K 768, N 3072, current: 5.8 ms, 1.036 of the 5.6 ms asked" in words[1]


def printed(rows: list[dict[str, Any]], width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(bench_summary(rows, width))
    console.file.close()
    return console.export_text()


def test_the_terminal_ends_with_the_targets() -> None:
    text = printed(whole())
    order = ["Ceilings of the device", "Casts", f"M × K × N = {SHAPE}", "Host time", "ViT-Huge", "Targets"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert text.rstrip().endswith("not measured here.")
    assert "tests hold it: tests/functional/test_compile.py" in text


@pytest.mark.parametrize("width", [80, 100])
def test_a_target_is_a_line_with_its_verdict_and_below_what_was_measured(width: int) -> None:
    text = printed(whole(), width)
    lines = [line.rstrip() for line in text.splitlines()]
    judged = [row for row in whole() if row["kind"] == "target" and row["verdict"] in ("pass", "miss")]
    assert len(judged) > 5
    for row in judged:
        mark = {"pass": "✓ pass", "miss": "✗ miss"}[row["verdict"]]
        place = lines.index(f"{mark} {row['what']}: {row['target']}")
        assert lines[place + 1].startswith(f"       {row['measured'][:20]}")


def test_of_targets_that_were_not_measured_a_line_a_section_says_why() -> None:
    lines = [line.rstrip() for line in printed(whole(), 120).splitlines()]
    rows = [row for row in whole() if row["kind"] == "target"]
    other = {row["section"] for row in rows if row["verdict"] == "not measured"}
    found = unmeasured(Record(whole()))
    assert len(found) == len(other) > 3
    assert all(line in lines or len(line) > 120 for line in found)
    assert "host, 2: not asked for in this run" in found
    block = [line for line in found if line.startswith("linear")]
    assert "te-block: RuntimeError: no kernel image (1)" in block[0]
    told = next(line for line in lines if line.startswith("· told"))
    assert told == "· told ViT-Huge, largest batch in 20 GiB: told"


def test_the_page_s_targets_are_those_that_were_judged() -> None:
    table = targets_table(Record(whole()))
    assert {row[3].text for row in table.rows} == {"pass", "miss", "reported"}
    assert len(table.notes) == len(unmeasured(Record(whole())))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_in_a_narrow_terminal_columns_go_and_no_figure_or_name_is_cut(width: int) -> None:
    text = printed(whole(), width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    assert "for want of width: a wider terminal" in " ".join(text.split())
    for figure in ("1.49×", "70.0", "88.0", "117", "0.100"):
        assert figure in text, figure
    for word in ("captured", "compiled", "delayed,", "products"):
        assert re.search(rf"\b{word}", text), word


def test_without_a_width_every_column_is_there_and_every_row_is_one_line() -> None:
    table = bench_tables.steps_table(Record(whole()), "vit")
    shown, said = fitted(table, None)
    assert said == []
    assert len(shown.columns) == len(table.columns)
    name = "Octavo delayed, compiled, step captured"
    console = Console(width=1000, record=True, file=io.StringIO())
    console.print(shown)
    assert any(line.strip().startswith(name) for line in console.export_text().splitlines())


def test_columns_go_in_their_order_until_the_others_fit() -> None:
    assert kept_columns([10, 5, 5, 5], [2, 1], None) == [0, 1, 2, 3]
    assert kept_columns([10, 5, 5, 5], [2, 1], 33) == [0, 1, 2, 3]
    assert kept_columns([10, 5, 5, 5], [2, 1], 32) == [0, 1, 3]
    assert kept_columns([10, 5, 5, 5], [2, 1], 25) == [0, 3]
    assert kept_columns([10, 5, 5, 5], [2, 1], 1) == [0, 3]


def test_the_time_of_sections_and_what_it_went_into_is_shown() -> None:
    assert "Time: casts 12.5 s, steps 12.5 s." in printed(whole()).replace("\u00a0", " ")
    spent = {"spent": {"te": 2.0, "torchao": 9.25, "copy": 0.0, "broken": None}}
    table = sections_table(Record([made.section("linear") | spent, made.section("steps")]))
    shown = cells(table)
    assert shown["linear"]["Spent on"] == "torchao 9.25 s, te 2.00 s"
    assert shown["steps"]["Spent on"] == "—"


def test_the_ceilings_of_copying_say_how_much_was_copied() -> None:
    small = {"kind": "ceiling", "name": "copy", "shape": [64 << 20], "per_s": 3e12, "unit": "B/s"}
    table = bench_tables.ceilings_table(Record([*made.whole(), small]))
    shown = [cell.text.replace("\u00a0", " ") for row in table.rows for cell in row]
    assert {"1.00 GiB", "64.0 MiB"} <= set(shown)


def test_where_fp8_is_emulated_the_terminal_says_so_first_and_judges_nothing() -> None:
    text = printed(with_targets([made.run(native=False), *made.whole()[1:]]))
    assert text.startswith("! A processor has no FP8 units")
    assert "Verdict" not in text
    assert "ViT-Huge, in a small form" in text


def test_where_fp8_is_emulated_there_are_wall_times_and_nothing_that_compares() -> None:
    emulated = Record(with_targets([made.run(native=False), *made.whole()[1:]]))
    sections = {section.name: section for section in bench_sections(emulated)}
    columns = [column for section in sections.values() for table in section.tables for column in table.columns]
    assert {"Wall time", "Time", "Forward and backward"} <= {column.title for column in columns}
    for gone in ("BF16 = 1", "best peer = 1", "Of copy", "Of ceiling", "Target", "Device time", "TFLOP/s"):
        assert not [column for column in columns if gone in (column.title, column.unit)], gone
    for name in ("targets", "ceilings"):
        assert sections[name].tables == []
        assert "nothing is compared with a ceiling or a target" in sections[name].absent
    drawn = [chart for section in sections.values() for chart in section.charts]
    assert [chart.name for chart in drawn] == ["linear", "host", "steps"]
    assert not [trace["text"] for chart in drawn for trace in chart.traces if "×" in trace["text"][0]]
    assert [sentence.text for sentence in sentences(emulated)] == ["No target is judged where FP8 is emulated."]


def test_a_chart_keeps_the_words_that_tell_rivals_apart() -> None:
    names = ["octavo-delayed-compiled", "octavo-delayed-reduced", "octavo-delayed-lean-reduced"]
    chart = bench_charts.steps_chart(Record([made.step(name, 60.0) for name in names]))
    assert chart is not None
    shown = {trace["y"][0].replace("<br>", " ") for trace in chart.traces}
    assert shown == {look(name).label for name in names}


def test_the_terms_are_sorted_and_cover_what_tables_say() -> None:
    names = [name for name, _ in TERMS]
    assert names == sorted(set(names), key=str.lower)
    said = " ".join(names).lower()
    record = Record(whole())
    columns = {
        column.name.lower() for section in bench_sections(record) for t in section.tables for column in t.columns
    }
    for term in ("warm-up", "peak memory", "target", "rate", "host time", "best peer = 1", "fp8 layers"):
        assert any(term in column for column in columns), term
        assert term in said, term
    for word in ("compiled", "graphed", "captured", "weight cached", "lean", "drift", "tensor-wise"):
        assert word in said, word


def test_every_section_has_a_chart_or_a_table() -> None:
    filled = {section.name: section for section in bench_sections(Record(whole()))}
    assert not [name for name, section in filled.items() if section.absent]
    assert [len(filled[name].charts) for name in ("casts", "linear", "host", "steps")] == [1, 1, 1, 1]
    empty = bench_sections(Record([]))
    assert {section.name for section in empty if not section.absent} == set()


def test_bars_of_what_was_emulated_are_hatched_and_bf16_s_are_not() -> None:
    chart = bench_charts.linear_chart(Record([made.run(native=False), *made.whole()[1:]]))
    assert chart is not None
    shapes = {trace["y"][0]: trace["marker"]["pattern"]["shape"] for trace in chart.traces}
    assert (shapes["BF16"], shapes["Octavo delayed"]) == ("", "/")


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in made.whole()} | {"target"}))
def test_any_one_kind_may_be_all_there_is_or_all_that_lacks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")
    rows = whole()
    assert "<h1>" in render_bench([row for row in rows if row["kind"] == kind])
    assert "<h1>" in render_bench([row for row in rows if row["kind"] != kind])


def test_a_row_may_lack_any_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")
    rows = whole()
    by_kind = {row["kind"]: row for row in rows}
    for kind, row in by_kind.items():
        for name in set(row) - {"kind"}:
            damaged = [
                {key: value for key, value in one.items() if key != name} if one["kind"] == kind else one
                for one in rows
            ]
            assert "<h1>" in render_bench(damaged), (kind, name)


def test_texts_of_the_rows_are_shown_and_never_run() -> None:
    attack = "</script><script>window.attacked = true</script>"
    rows = [row | {"reason": attack, "device_name": attack} for row in whole()]
    page = render_bench(rows)
    assert page.count("<script") == 3  # the figures, plotly.js and the page's own
    assert "window.attacked = true" in page


def test_the_page_replaces_the_old_one_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    build_bench(whole(), path)
    assert "What FP8 costs and gains here" in path.read_text(encoding="utf-8")
    path.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        build_bench(whole(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


def test_the_page_needs_no_torch(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(json.dumps(row) for row in whole()))
    code = f"""
import sys, types, pathlib
package = types.ModuleType("octavo"); package.__path__ = [{str(SOURCE / "octavo")!r}]
sys.modules.update({{"octavo": package, "torch": None, "numpy": None}})
from octavo.report.bench_fitting import fitted, kept_columns
from octavo.report.bench_page import build_bench
from octavo.report.record import read_jsonl
build_bench(read_jsonl(pathlib.Path({str(record)!r}))[0], pathlib.Path({str(tmp_path / "out.html")!r}))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "<h1>" in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.browser
def test_every_chart_draws_in_a_browser(tmp_path: Path) -> None:
    chromium = check_page.find_chromium()
    if chromium is None:
        pytest.skip("no Chromium is installed")
    pytest.importorskip("playwright")
    build_bench(whole(), tmp_path / "report.html")
    with check_page.opened_browser(chromium) as browser:
        expected = frozenset({"casts", "linear", "host", "steps"})
        assert check_page.page_problems(browser, tmp_path / "report.html", expected) == []


def test_a_layer_is_shown_with_wall_and_host_time_beside_bf16_and_the_best_peer() -> None:
    (section,) = [section for section in bench_sections(Record(whole())) if section.name == "layers"]
    (table,) = section.tables
    assert table.caption.startswith("Sequence × batch × hidden × ffn × heads = 1024 × 8 × 768 × 3072 × 12")
    cells = {row[0].text: [cell.text for cell in row] for row in table.rows}
    # 6 ms of BF16 and 8 of the peer, by 4; the host's 500 µs a ms.
    assert cells["Octavo delayed"][3:6] == ["1.50×", "2.00×", "2.00"]
    assert any("TE block, graphed" in note and "time limit" in note for note in table.notes)
