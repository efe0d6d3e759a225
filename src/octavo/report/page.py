"""The page: one HTML file that works offline, with its style, its script and plotly.js inside.

A Content-Security-Policy in the file forbids every network request, so nothing can be fetched even by mistake. All text
from the rows is escaped by jinja2; figures travel as JSON in which ``<`` is written ``\\u003c``.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from octavo.report.extras import require
from octavo.report.figure import Chart
from octavo.report.glossary import TERMS
from octavo.report.headline import emulation_banner, missing, sentences, tiles
from octavo.report.record import Record, number, text
from octavo.report.sections import sections


def _asset(name: str) -> str:
    return (resources.files("octavo.report") / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> Any:
    jinja2 = require("jinja2", "the report's page")
    strict = jinja2.StrictUndefined
    environment = jinja2.Environment(autoescape=True, undefined=strict, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_asset("page.html.j2"))


def _json(value: Any) -> str:
    """JSON that can stand inside a script element; NaN and inf raise ValueError."""
    written = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _title(record: Record) -> str:
    preset = text(record.last("model"), "preset") or text(record.last("run"), "preset")
    return f"What FP8 does to the model {preset}" if preset else "What FP8 does to this model"


def _subtitle(record: Record) -> str:
    run, model, data = record.last("run"), record.last("model"), record.last("data")
    parameters = number(model, "parameters")
    parts = [
        f"{parameters / 1e6:,.1f} million parameters" if parameters else "",
        f"text: {text(data, 'name')}" if text(data, "name") else "",
        text(run, "device_name"),
        text(run, "date")[:10],
        f"Octavo {text(run, 'octavo_version')}" if text(run, "octavo_version") else "",
    ]
    return " · ".join(part for part in parts if part)


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """The page as a text. Raises ModuleNotFoundError that names the extra when plotly or jinja2 is absent."""
    plotly_js: str = require("plotly.offline", "the report's page").get_plotlyjs()
    record = Record(rows)
    parts = sections(record)
    charts: list[Chart] = [chart for section in parts for chart in section.charts]
    page: str = _template().render(
        title=_title(record),
        subtitle=_subtitle(record),
        sentences=sentences(record),
        tiles=tiles(record),
        banner=emulation_banner(record),
        missing=missing(record),
        sections=parts,
        terms=TERMS,
        style=_asset("page.css"),
        script=_asset("page.js"),
        plotly_js=plotly_js if charts else "",
        figures=_json({chart.name: chart.payload() for chart in charts}),
    )
    return page


def build(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Write the report of ``rows`` to ``path``: one self-contained HTML file.

    Rows that are missing (a partial study) are named on the page. The file is written under a temporary name beside
    ``path`` and then renamed, so a reader never meets half a page. Raises ModuleNotFoundError when the ``study`` extra
    is absent, and OSError when the folder cannot be written.
    """
    path = Path(path)
    page = render(rows)
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
