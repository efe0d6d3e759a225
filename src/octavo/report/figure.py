"""A chart as data: what plotly.js draws, with the controls around it.

Traces and layouts are plain dictionaries in plotly's schema, so that rows become a page without NumPy or PyTorch.
Colours are tokens (``@ink``, ``@blue``) that the page replaces by its light or dark palette. A trace with
``meta = {"show": {control: [choices]}}`` is drawn only while every control that it names is on one of those choices.
A layout of bars with ``meta = {"least": value}`` has an axis that reaches at least
so far.
"""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]
Layout = dict[str, Any]


@dataclass(frozen=True)
class Control:
    """A choice of one (``kind`` "select") or of several (``kind`` "check") among (value, label) pairs.

    ``chosen`` are the values at first; ``layouts`` are changes to the layout that a choice brings.
    """

    name: str
    label: str
    choices: list[tuple[str, str]]
    chosen: list[str]
    kind: str = "select"
    layouts: dict[str, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class Chart:
    """One chart. ``summary`` is what a reader who cannot see it is told; ``height`` is in CSS pixels."""

    name: str
    title: str
    summary: str
    traces: list[Trace]
    layout: Layout
    controls: list[Control] = field(default_factory=list)
    height: int = 420
    note: str = ""

    def payload(self) -> dict[str, Any]:
        """What the page's script needs, as JSON-able data."""
        layouts = {control.name: control.layouts for control in self.controls if control.layouts}
        return {"data": self.traces, "layout": self.layout, "layouts": layouts}


def label(words: str) -> str:
    """``words`` as plotly shows them: plotly reads a few HTML tags in its texts, so they are escaped."""
    return html.escape(words, quote=False)


def wrapped(words: str, width: int = 20) -> str:
    """``words`` on at most two lines of ``width`` letters, as plotly shows them; the rest is an ellipsis."""
    lines = textwrap.wrap(words, width, max_lines=2, placeholder=" …")
    return "<br>".join(label(line) for line in lines)


def axis(title: str = "", **more: Any) -> Layout:
    """An axis with a quiet grid that makes room for its own labels."""
    quiet = {"gridcolor": "@grid", "linecolor": "@axis", "zerolinecolor": "@axis", "automargin": True}
    return {**quiet, "title": {"text": label(title), "standoff": 8, "font": {"size": 13}}, **more}


def layout(x: Layout, y: Layout, **more: Any) -> Layout:
    """The layout all charts share: no background of their own, legend above, ink from the page."""
    return {
        "paper_bgcolor": "@clear",
        "plot_bgcolor": "@clear",
        "font": {"color": "@ink", "family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 8, "r": 16, "t": 8, "b": 8},
        "hoverlabel": {"bgcolor": "@panel", "bordercolor": "@axis", "font": {"color": "@ink"}},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "itemwidth": 40},
        "xaxis": x,
        "yaxis": y,
        **more,
    }


def whole(step: float) -> int | float:
    """``step`` as an integer if it is one, which is shorter in the page."""
    return int(step) if step == int(step) else step


def line_mode(num_points: int) -> str:
    """A line; with markers where there are so few points that a line may not be seen (one point draws none)."""
    return "lines" if num_points > 2 else "lines+markers"


def show(**choices: str | list[str]) -> dict[str, Any]:
    """The ``meta`` of a trace that is drawn only for these choices of the chart's controls."""
    return {"show": {name: [value] if isinstance(value, str) else value for name, value in choices.items()}}
