"""The page in a real browser. A missing browser skips these tests, and fails them where CI=true."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.report import check_page
from tests.report import rows as fictional

from octavo.report import build

pytestmark = pytest.mark.browser


def absent(reason: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI=true asks for it")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = check_page.find_chromium()
    if chromium is None:
        absent("no Chromium is installed (Debian: apt-get install chromium)")
    try:
        import playwright  # noqa: F401
    except ModuleNotFoundError:
        absent("playwright is not installed (pip install playwright)")
    with check_page.opened_browser(str(chromium)) as opened:
        yield opened


def page_of(rows: list[dict[str, Any]], folder: Path) -> Path:
    path = folder / "report.html"
    build(rows, path)
    return path


def test_every_chart_of_an_emulated_study_draws(browser: Any, tmp_path: Path) -> None:
    assert check_page.page_problems(browser, page_of(fictional.study(), tmp_path)) == []


def test_every_chart_of_a_native_study_draws(browser: Any, tmp_path: Path) -> None:
    rows = fictional.study(native=True, num_seeds=1, steps=200)
    assert check_page.view_problems(browser, page_of(rows, tmp_path), 400, "light", check_page.ALL_CHARTS) == []


def test_texts_of_the_record_run_nothing_and_fetch_nothing(browser: Any, tmp_path: Path) -> None:
    path = page_of(fictional.hostile(), tmp_path)
    assert check_page.view_problems(browser, path, 400, "dark", check_page.ALL_CHARTS) == []


@pytest.mark.parametrize("rows", [fictional.interrupted(), []], ids=["interrupted", "empty"])
def test_a_partial_study_has_a_page(browser: Any, tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert check_page.view_problems(browser, page_of(rows, tmp_path), 400, "light", frozenset()) == []


def test_the_report_of_the_study_that_just_ran(browser: Any) -> None:
    """The page that OCTAVO_REPORT names: `./dev ci` sets it to the report of its short study."""
    path = os.environ.get("OCTAVO_REPORT")
    if not path:
        pytest.skip("OCTAVO_REPORT names no page")
    assert check_page.page_problems(browser, Path(path)) == []


BROKEN = {
    "a chart that fails to draw": (
        'return Plotly.react("chart-" + name',
        'if (name === "loss") return; return Plotly.react("chart-" + name',
        "chart loss",
    ),
    "a script error": (
        "const root =",
        "setTimeout(() => { throw new Error('broken'); }); const root =",
        "script error: broken",
    ),
    "a warning": ("const root =", "console.warn('beware'); const root =", "console warning: beware"),
    "a page that is too wide": ("</main>", "<p style='width:3000px'>wide</p></main>", "pixels wide"),
    "a picture from elsewhere": (
        "</main>",
        "<img src='https://example.org/a.png' alt=''></main>",
        "https://example.org/a.png",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_the_check_sees(browser: Any, tmp_path: Path, how: str) -> None:
    path = page_of(fictional.interrupted(), tmp_path)
    old, new, said = BROKEN[how]
    whole = path.read_text(encoding="utf-8")
    assert old in whole
    path.write_text(whole.replace(old, new), encoding="utf-8")
    problems = check_page.view_problems(browser, path, 400, "light", frozenset())
    assert any(said in problem for problem in problems), problems
