"""The page of a bench: one HTML file that works offline, in the look of the study's and made of the same pieces."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.report.bench_sections import TERMS, bench_sections, emulated_words, sentences, tiles
from octavo.report.extras import require
from octavo.report.page import _asset as asset
from octavo.report.page import _json as embedded_json
from octavo.report.page import _template as template
from octavo.report.record import Record, text


def render_bench(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page as a text. Raises ModuleNotFoundError that names the extra when plotly or jinja2 is absent."""
    plotly_js: str = require("plotly.offline", "the bench's page").get_plotlyjs()
    record = Record(rows)
    parts = bench_sections(record)
    charts = [chart for section in parts for chart in section.charts]
    run = record.last("run")
    version = text(run, "octavo_version")
    about = [text(run, "device_name"), text(run, "date")[:10], f"Octavo {version}" if version else ""]
    page: str = template().render(
        title="What FP8 costs and gains here",
        subtitle=" · ".join(part for part in about if part),
        sentences=sentences(record),
        tiles=tiles(record),
        banner=emulated_words(record),
        missing=[],
        sections=parts,
        terms=TERMS,
        style=asset("page.css"),
        script=asset("page.js"),
        plotly_js=plotly_js if charts else "",
        figures=embedded_json({chart.name: chart.payload() for chart in charts}),
    )
    return page


def build_bench(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the page of `rows` to `path`, under a temporary name first.

    Raises ModuleNotFoundError when plotly or jinja2 is absent, and OSError when the folder cannot be written.
    """
    page = render_bench(rows)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(page)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
