"""Look at a report in Chromium: ``python tests/report/check_page.py REPORT.html [--partial]``.

Every chart must have drawn something that can be seen, at every choice of its controls; no label may be cut off or lie
on another; nothing may be logged as a warning or an error; nothing may be requested but the file itself; and the page
may not be wider than the window, at 1280 and at 400 pixels, in light and in dark. Exits with 0, or with 1 and the list
of what is wrong.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ALL_CHARTS = frozenset({"ptq", "loss", "gap", "layers", "scales", "speed", "memory"})
VIEWS = ((1280, "light"), (400, "dark"))
MOST_CHOICES = 6  # of one control: layers are many and alike
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# What one chart shows: marks with an extent, labels outside of the drawing, labels that lie on their neighbours.
LOOK = """
(name) => {
  const plot = document.getElementById("chart-" + name);
  const frame = plot.getBoundingClientRect();
  const marks = [...plot.querySelectorAll(
    ".scatterlayer path.js-line, .scatterlayer .points path, .barlayer .point path, .heatmaplayer image")]
    .map((mark) => mark.getBoundingClientRect())
    .filter((box) => box.width + box.height > 0.5 && box.right > frame.left && box.left < frame.right
                  && box.bottom > frame.top && box.top < frame.bottom);
  const points = (plot.data || []).reduce((sum, trace) => sum + ((trace.x || []).length), 0);
  const texts = [...plot.querySelectorAll("svg text")].filter((text) => text.textContent.trim());
  const cut = texts.filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width > 0 && (box.left < frame.left - 1.5 || box.right > frame.right + 1.5
                          || box.top < frame.top - 1.5 || box.bottom > frame.bottom + 1.5);
  }).map((text) => text.textContent);
  const overlaps = [];
  for (const kind of [".xtick text", ".ytick text", ".y2tick text", ".legendtext", ".bartext"]) {
    const boxes = [...plot.querySelectorAll(kind)].map((text) => [text.textContent, text.getBoundingClientRect()]);
    boxes.forEach(([first, a], index) => boxes.slice(index + 1).forEach(([second, b]) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 2 && down > 3) overlaps.push(first + " / " + second);
    }));
  }
  return {width: frame.width, height: frame.height, marks: marks.length, points, cut, overlaps};
}
"""


def find_chromium() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)


@contextmanager
def opened_browser(path: str) -> Iterator[Any]:
    """A headless Chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


def _chart_problems(page: Any, name: str, choice: str) -> list[str]:
    seen = page.evaluate(LOOK, name)
    where = f"chart {name}{f' ({choice})' if choice else ''}"
    problems = []
    if seen["width"] < 200 or seen["height"] < 100:
        problems.append(f"{where} is {seen['width']:.0f} x {seen['height']:.0f} pixels")
    if not seen["points"] or not seen["marks"]:
        problems.append(f"{where} drew {seen['marks']} marks of {seen['points']} points")
    problems += [f"{where}: label cut off: {words}" for words in seen["cut"]]
    problems += [f"{where}: labels overlap: {words}" for words in seen["overlaps"]]
    return problems


def _control_problems(page: Any, name: str) -> list[str]:
    """Try the choices of every control of a chart, one at a time, and put each back."""
    problems = []
    for select in page.query_selector_all(f'select[data-chart="{name}"]'):
        values = select.evaluate("(select) => [...select.options].map((option) => option.value)")
        chosen = select.evaluate("(select) => select.value")
        for value in [*values[:MOST_CHOICES], chosen]:
            select.select_option(value)
            page.wait_for_selector("html[data-charts=drawn]", state="attached")
            problems += _chart_problems(page, name, value)
    boxes = page.query_selector_all(f'input[type=checkbox][data-chart="{name}"]')
    for box in boxes if len(boxes) > 1 else []:
        box.uncheck()
        page.wait_for_selector("html[data-charts=drawn]", state="attached")
        problems += _chart_problems(page, name, f"without {box.get_attribute('value')}")
        box.check()
    return problems


def view_problems(browser: Any, path: Path, width: int, scheme: str, expected: frozenset[str]) -> list[str]:
    """What is wrong with the page in one window: an empty list when nothing is."""
    problems: list[str] = []
    address = path.resolve().as_uri()
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    page.on("console", lambda said: problems.append(f"console {said.type}: {said.text}"))
    page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url == address or request.url.startswith(("data:", "blob:"))
            else problems.append(f"network request: {request.url[:200]}")
        ),
    )
    try:
        page.goto(address)
        page.wait_for_selector("html[data-charts=drawn]", state="attached", timeout=60_000)
        names = page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.id.slice('chart-'.length))")
        problems += [f"no chart {name}" for name in sorted(expected - set(names))]
        for name in names:
            problems += _chart_problems(page, name, "")
            problems += _control_problems(page, name)
        whole = page.evaluate("[document.documentElement.scrollWidth, document.body.scrollWidth, window.innerWidth]")
        if max(whole[:2]) > whole[2]:
            problems.append(f"the page is {max(whole[:2])} pixels wide in a window of {whole[2]}")
        if page.evaluate("window.attacked === true"):
            problems.append("a text of the record ran as a script")
    finally:
        context.close()
    return [f"{width} px, {scheme}: {problem}" for problem in problems]


def page_problems(browser: Any, path: Path, expected: frozenset[str] = ALL_CHARTS) -> list[str]:
    """What is wrong with the page in all views."""
    return [problem for width, scheme in VIEWS for problem in view_problems(browser, path, width, scheme, expected)]


def main(arguments: list[str]) -> int:
    partial = "--partial" in arguments
    paths = [Path(argument) for argument in arguments if argument != "--partial"]
    chromium = find_chromium()
    if len(paths) != 1 or not paths[0].is_file() or chromium is None:
        need = "no Chromium is installed" if chromium is None else "give the path of one report"
        print(f"{need}\nusage: check_page.py REPORT.html [--partial]", file=sys.stderr)
        return 2
    with opened_browser(chromium) as browser:
        problems = page_problems(browser, paths[0], frozenset() if partial else ALL_CHARTS)
    print(
        "\n".join(problems) if problems else f"{paths[0]}: every chart drew, nothing was logged, nothing was requested"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
