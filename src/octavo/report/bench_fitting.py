"""Tables that fit a width: numbers and names stay whole, and columns go instead, which is said.

Where there is no width, as in a file or a pipe, a table is as wide as its content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.report.extras import require
from octavo.report.tables import Column, Table
from octavo.report.terminal import _STYLE as STYLE
from octavo.report.wording import enumeration

_FOR = "the terminal summary"
# Of rich: a letter at either edge; between columns one of padding and one of the box.
_EDGES, _PADDING, _GAP = 1, 1, 2
# A column of words may wrap, to no less than this.
_WORDS = 18
# What goes first where there is too little room; what is not named here stays.
_EXPENDABLE = (
    "p10 – p90 ms",
    "FP8 layers",
    "Of ceiling",
    "Floor ms",
    "Model",
    "Batch",
    "Warm-up s",
    "Rate TFLOP/s",
    "Rate TB/s",
    "Of a copy of this",
    "Host time ms",
    "Rate",
    "Speed best peer = 1",
    "Target ms",
    "Speed BF16 compiled = 1",
    "Peak memory GiB",
    "Forward BF16 = 1",
    "Forward µs",
)


def kept_columns(widths: Sequence[int], expendable: Sequence[int], room: int | None, gap: int = _GAP) -> list[int]:
    """The places of the columns that fit into `room` letters, `expendable` ones going in their order until they do.

    Args:
        widths: the least of each column.
        expendable: places, the first to go first.
        room: letters, without the table's edges; None for as many as it takes.
        gap: letters between two columns.
    """
    kept = list(range(len(widths)))
    for place in expendable:
        if room is None or sum(widths[one] + gap for one in kept) <= room:
            break
        kept.remove(place)
    return kept


def fitted(table: Table, width: int | None) -> tuple[Any, list[str]]:
    """A rich table of `width` letters, or as wide as its content for None, and what to say of columns that went."""
    names = [column.name for column in table.columns]
    expendable = [names.index(name) for name in _EXPENDABLE if name in names]
    room = None if width is None else width - _EDGES
    kept = kept_columns([_least(table, place) for place in range(len(names))], expendable, room)
    widths = _shared(table, kept, room)
    text = require("rich.text", _FOR).Text
    shown = require("rich.table", _FOR).Table(
        title=text(table.caption, style="bold"),
        title_justify="left",
        box=require("rich.box", _FOR).SIMPLE_HEAD,
        padding=(0, _PADDING, 0, 0),
    )
    for place in kept:
        column = table.columns[place]
        justify = "right" if column.numeric else "left"
        shown.add_column(text(_heading(column)), justify=justify, width=widths[place], overflow="fold")
    for row in table.rows:
        shown.add_row(*(text(row[place].text, style=STYLE.get(row[place].tone, "")) for place in kept))
    gone = [_plain(table.columns[place]) for place in range(len(names)) if place not in kept]
    said = f"Without {enumeration(gone)}, for want of width: a wider terminal, a file or the page shows all columns."
    return shown, [said] if gone else []


def _heading(column: Column) -> str:
    return f"{column.title}\n{column.unit}" if column.unit else column.title


def _plain(column: Column) -> str:
    return f"{column.title} ({column.unit})" if column.unit else column.title


def _longest_word(words: str) -> int:
    # A space that does not break is none here: it keeps a figure and its unit together.
    return max((len(word) for word in words.replace("\n", " ").split(" ")), default=0)


def _natural(table: Table, place: int) -> int:
    """So wide that no cell wraps; headings wrap at words."""
    return max([_longest_word(_heading(table.columns[place])), *(len(row[place].text) for row in table.rows)])


def _least(table: Table, place: int) -> int:
    """Figures whole, and of words the longest."""
    natural = _natural(table, place)
    if table.columns[place].numeric:
        return natural
    words = [_longest_word(row[place].text) for row in table.rows]
    return max([_longest_word(_heading(table.columns[place])), *words, min(natural, _WORDS)])


def _shared(table: Table, kept: list[int], room: int | None) -> dict[int, int]:
    """The width of each column: its least, and what is left over to those of words, in their order."""
    if room is None:
        return {place: _natural(table, place) for place in kept}
    widths = {place: _least(table, place) for place in kept}
    left = room - sum(width + _GAP for width in widths.values())
    for place in kept:
        more = min(max(left, 0), _natural(table, place) - widths[place])
        widths[place] += more
        left -= more
    return widths
