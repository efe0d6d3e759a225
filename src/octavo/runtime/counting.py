"""`octavo.count_gemms`: the proof that FP8 is on."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch


class GemmCount:
    """Matrix products by layer, product and precision.

    Attributes:
        entries: counts of (layer, "fprop" | "dgrad" | "wgrad", "fp8" | "fp8 emulated" | "high precision").
    """

    def __init__(self) -> None:
        self.entries: Counter[tuple[str, str, str]] = Counter()

    def add(self, layer: str, gemm: str, precision: str) -> None:
        """Count one product."""
        self.entries[layer, gemm, precision] += 1

    @property
    def fp8(self) -> int:
        """Products in FP8, native or emulated."""
        return sum(n for (_, _, precision), n in self.entries.items() if precision.startswith("fp8"))

    @property
    def high_precision(self) -> int:
        """Products of Octavo's layers that ran in high precision."""
        return sum(n for (_, _, precision), n in self.entries.items() if precision == "high precision")

    def by_layer(self) -> dict[str, dict[str, int]]:
        """{layer: {"fprop fp8": 1, …}}."""
        table: dict[str, dict[str, int]] = {}
        for (layer, gemm, precision), n in self.entries.items():
            table.setdefault(layer, {})[f"{gemm} {precision}"] = n
        return table

    def __str__(self) -> str:
        lines = [f"{self.fp8} FP8 products, {self.high_precision} in high precision"]
        for layer, counts in self.by_layer().items():
            lines.append(f"  {layer}: " + ", ".join(f"{what} x{n}" for what, n in counts.items()))
        return "\n".join(lines)


class _Current(threading.local):
    count: GemmCount | None = None


_CURRENT = _Current()


class count_gemms:
    """Context: counts the products of Octavo's layers, those of a backward included whose forward ran inside.

        with octavo.count_gemms() as n:
            model(x).sum().backward()
        print(n)

    Eager code only: compiled code runs no Python to count with.
    """

    def __init__(self) -> None:
        self._outer: list[GemmCount | None] = []

    def __enter__(self) -> GemmCount:
        self._outer.append(_CURRENT.count)
        _CURRENT.count = GemmCount()
        return _CURRENT.count

    def __exit__(self, *error: Any) -> None:
        _CURRENT.count = self._outer.pop()


def current_count() -> GemmCount | None:
    """The counter in force in this thread."""
    if torch.compiler.is_compiling():
        return None
    return _CURRENT.count
