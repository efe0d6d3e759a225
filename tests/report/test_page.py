from __future__ import annotations

import html.parser
import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import plotly.offline
import pytest
from tests.report import rows as fictional

from octavo.report import build
from octavo.report.__main__ import main
from octavo.report.page import render

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Outline(html.parser.HTMLParser):
    """Ids, texts, and every attribute that could fetch something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "data", "srcset", "poster", "action"):
                self.fetched.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize(
    "rows",
    [
        fictional.study(steps=12),
        fictional.study(native=True, num_seeds=1, steps=12),
        fictional.hostile(),
        fictional.interrupted(),
        [],
    ],
    ids=["cpu", "gpu", "hostile", "interrupted", "empty"],
)
def test_the_page_fetches_nothing_and_its_links_lead_somewhere(rows: list[dict[str, Any]]) -> None:
    outline = Outline(render(rows))
    assert len(set(outline.ids)) == len(outline.ids)
    for address in outline.fetched:
        assert address == "data:," or address[1:] in outline.ids, address
    assert "img" not in outline.tags


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in fictional.study(steps=12)}))
def test_any_one_kind_may_be_all_there_is_or_all_that_lacks(kind: str) -> None:
    rows = fictional.study(num_seeds=1, steps=12)
    assert "<h1>" in render([row for row in rows if row["kind"] == kind])
    assert "<h1>" in render([row for row in rows if row["kind"] != kind])


def test_a_row_may_lack_any_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotly.offline, "get_plotlyjs", lambda: "")  # 5 MB that hundreds of pages need not carry
    whole = fictional.study(num_seeds=1, steps=3)
    by_kind = {row["kind"]: row for row in whole}
    rows = [row for kind in by_kind for row in [row for row in whole if row["kind"] == kind][:12]]
    for kind, row in by_kind.items():
        for name in set(row) - {"kind"}:
            damaged = [
                {key: value for key, value in one.items() if key != name} if one["kind"] == kind else one
                for one in rows
            ]
            assert "<h1>" in render(damaged), (kind, name)
            assert "<h1>" in render([{**one, name: None} if one["kind"] == kind else one for one in rows]), (kind, name)


def test_text_of_the_rows_is_shown_and_never_run() -> None:
    outline = Outline(render(fictional.hostile()))
    # the figures, plotly.js and the page's own script; a text that escaped would add another
    assert outline.tags.count("script") == 3
    assert any("window.attacked = true" in text for text in outline.text)


def test_sections_come_in_the_order_in_which_a_reader_asks() -> None:
    titles = re.findall(r"<h2>(.*?)</h2>", render(fictional.study(steps=12)))
    assert titles == [
        "Quantized without training",
        "Training",
        "Fine-tuned in FP8",
        "What is commonly claimed",
        "Where the error arises",
        "amax and scale",
        "Speed and memory",
        "The formats",
        "What ran, and where",
        "Terms",
    ]


def test_a_partial_study_says_what_is_missing() -> None:
    page = render(fictional.interrupted())
    assert "This record is not complete." in page
    assert "The record has no rows of fine-tuning" in page
    assert "This record is not complete." not in render(fictional.study(steps=12))


def test_the_page_stays_below_six_megabytes(tmp_path: Path) -> None:
    build(fictional.study(native=True, num_seeds=3, steps=300), tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def test_a_failure_leaves_the_old_page_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        build(fictional.interrupted(), path)
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "old"


@pytest.mark.parametrize(("module", "use"), [("plotly", "build([], path)"), ("rich", "summary([])")])
def test_an_absent_library_is_named_with_its_extra(module: str, use: str) -> None:
    code = f"""
import sys, types, pathlib
package = types.ModuleType("octavo"); package.__path__ = [{str(SOURCE / "octavo")!r}]
sys.modules.update({{"octavo": package, {module!r}: None}})
from octavo.report import build, summary
path = pathlib.Path("never.html")
try:
    {use}
except ModuleNotFoundError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"needs {module}, which is not installed: pip install octavo[study]" in said


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text("\n".join(json.dumps(row) for row in fictional.interrupted()))
    code = f"""
import sys, types
package = types.ModuleType("octavo"); package.__path__ = [{str(SOURCE / "octavo")!r}]
sys.modules.update({{"octavo": package, "torch": None, "numpy": None}})
from octavo.report.__main__ import main
sys.exit(main([{str(record)!r}, {str(tmp_path / "out.html")!r}]))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "<h1>" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_rebuilding_leaves_out_the_half_line_of_an_interrupted_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, page = tmp_path / "record.jsonl", tmp_path / "report.html"
    record.write_text("\n".join(json.dumps(row) for row in fictional.interrupted()) + '\n{"kind": "ptq", "met')
    assert main([str(record), str(page)]) == 0
    assert "1 lines of" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == render(fictional.interrupted())


@pytest.mark.parametrize(("content", "said"), [(None, "No such file"), ("", "holds no row; give the record.jsonl")])
def test_rebuilding_from_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    record = tmp_path / "record.jsonl"
    if content is not None:
        record.write_text(content)
    assert main([str(record), str(tmp_path / "report.html")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def _luminance(color: str) -> float:
    channels = [int(color[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_the_contrast_that_wcag_asks_for() -> None:
    style = (resources.files("octavo.report") / "assets" / "page.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in style.split("@media")[:2])
    for palette in (light, {**light, **dark}):
        for ink in ("ink", "quiet", "good-ink", "bad-ink", "link"):
            for paper in ("paper", "panel"):
                bright, dim = sorted((_luminance(palette[ink]), _luminance(palette[paper])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (ink, paper)  # WCAG 2.1, 1.4.3, level AA
