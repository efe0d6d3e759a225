"""Numbers as a reader meets them: rounded to what they can bear, always with their unit.

Spread is the sample standard deviation over seeds (n - 1 in the denominator), written ``mean ± deviation``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SPACE = "\u00a0"  # a space that does not break between a figure and its unit
MINUS = "\u2212"
TIMES = "\u00d7"
ABSENT = "\u2014"


@dataclass(frozen=True)
class Spread:
    """The mean of ``count`` values and their sample standard deviation (None for a single value)."""

    mean: float
    deviation: float | None
    count: int

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread | None:
        """Mean and deviation of the values that are there; None when none is."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def decimals(value: float, digits: int) -> str:
    """``value`` with ``digits`` decimals, thousands separated, a real minus sign, and no minus zero."""
    written = f"{value:,.{digits}f}"
    if float(written.replace(",", "")) == 0:
        written = written.lstrip("-")
    return written.replace("-", MINUS)


def significant(value: float, digits: int = 3) -> str:
    """``value`` with about ``digits`` significant digits, never in exponent form between 1e-4 and 1e7."""
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if exponent < -4 or exponent >= 7:
        return f"{value:.{digits - 1}e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e").replace("-", MINUS)
    return decimals(value, max(0, digits - 1 - exponent))


def percent(value: float, digits: int = 2, signed: bool = True) -> str:
    """``value`` per cent; with a sign unless it rounds to zero or ``signed`` is False."""
    written = decimals(value, digits)
    plus = "+" if signed and value > 0 and written.strip("0.") else ""
    return f"{plus}{written}{SPACE}%"


def ratio(value: float) -> str:
    """A factor: ``1.83×``."""
    return f"{significant(value)}{TIMES}"


def size(num_bytes: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= factor:
            return f"{significant(num_bytes / factor)}{SPACE}{unit}"
    return f"{decimals(num_bytes, 0)}{SPACE}B"


def duration(seconds: float) -> str:
    """Seconds in µs, ms, s, min or h."""
    if abs(seconds) >= 5400:
        return f"{significant(seconds / 3600)}{SPACE}h"
    if abs(seconds) >= 120:
        return f"{significant(seconds / 60)}{SPACE}min"
    if abs(seconds) >= 1 or seconds == 0:
        return f"{significant(seconds)}{SPACE}s"
    if abs(seconds) >= 1e-3:
        return f"{significant(seconds * 1e3)}{SPACE}ms"
    return f"{significant(seconds * 1e6)}{SPACE}µs"


def rate(per_second: float) -> str:
    """A number of things a second, three significant digits, thousands separated."""
    exponent = math.floor(math.log10(abs(per_second))) if per_second else 0
    return significant(round(per_second, 2 - exponent) if exponent > 2 else per_second)


def spread(value: Spread | None, write: Callable[[float], str]) -> str:
    """``mean ± deviation`` by ``write``; the mean alone for a single value; a dash for none."""
    if value is None:
        return ABSENT
    if value.deviation is None:
        return write(value.mean)
    written, deviation = write(value.mean), write(value.deviation).lstrip("+")
    head, gap, unit = written.rpartition(SPACE)
    if gap and deviation.endswith(gap + unit):  # 1.20 ± 0.05 % rather than 1.20 % ± 0.05 %
        return f"{head} ± {deviation}"
    return f"{written} ± {deviation}"


def optional(value: float | None, write: Callable[[float], str]) -> str:
    """``value`` by ``write``, a dash when there is none."""
    return ABSENT if value is None else write(value)


def enumeration(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
