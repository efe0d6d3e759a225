"""`octavo.count_gemms`: the proof that FP8 is on."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch

_NOTHING_COUNTED = (
    ": no Octavo layer under a recipe ran here in eager code: convert the model, or give a recipe (compiled code and"
    " replays of CUDA graphs are not counted)"
)


class GemmCount:
    """Matrix products by layer, product and precision: what `octavo.count_gemms` says of them.

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
        """Products in high precision of layers under a recipe; those of layers without one are not counted."""
        return sum(n for (_, _, precision), n in self.entries.items() if precision == "high precision")

    def by_layer(self) -> dict[str, dict[str, int]]:
        """{layer: {"fprop fp8": 1, …}}."""
        table: dict[str, dict[str, int]] = {}
        for (layer, gemm, precision), n in self.entries.items():
            table.setdefault(layer, {})[f"{gemm} {precision}"] = n
        return table

    def __str__(self) -> str:
        why = "" if self.entries else _NOTHING_COUNTED
        lines = [f"{self.fp8} FP8 products, {self.high_precision} in high precision{why}"]
        for layer, counts in self.by_layer().items():
            lines.append(f"  {layer}: " + ", ".join(f"{what} x{n}" for what, n in counts.items()))
        return "\n".join(lines)


class _Current(threading.local):
    count: GemmCount | None = None


_CURRENT = _Current()


class count_gemms:
    """Context: counts the matrix products of Octavo's linear layers under a recipe, in eager code.

        with octavo.count_gemms() as n:
            model(x).sum().backward()
        print(n)

    One is counted for each product that is computed in a call of a layer: fprop y = x w^T, dgrad dx = dy w and wgrad
    dw = dy^T x. A gradient that nobody needs costs no product. A `GroupedLinear` has one an expert (`<name>.expert0`),
    also of experts without a token, and with sizes on the device of all experts if one needs it; a `LayerNormMLP` has
    those of `<name>.fc1` and `<name>.fc2`; an `LMHead` one a chunk of tokens, all three in the forward unless it
    recomputes; a frozen layer fprops alone. Names are those that `octavo.convert` and `octavo.freeze` give; layers
    without one share that of their class.

        fp8             codes multiplied on FP8 units
        fp8 emulated    the same codes, multiplied otherwise where there is no such unit for them
        high precision  a dgrad or wgrad that the recipe of the layer keeps out of FP8

    Not counted: layers that run wholly in high precision (no recipe, an override to None, `autocast(enabled=False)`),
    layers of torch's, the products of attention, and `octavo.scaled_mm`.

    A product counts in the innermost context of the thread in which its forward ran, those of the backward too, also if
    that runs later or in another thread. What `octavo.checkpoint` recomputes counts there again: two fprops. What
    `torch.utils.checkpoint` recomputes counts if the thread that recomputes it is inside a context. That is the
    caller's on a CPU; on a GPU autograd's own, which never is: with `use_reentrant=True` dgrads and wgrads are missing
    then.

    Compiled code runs no Python to count with, and nothing of it is counted: 0 there says nothing. Nor is the replay of
    a CUDA graph; a module of `octavo.make_graphed_callables` runs its layers instead, and is counted.
    """

    def __init__(self) -> None:
        self._outer: list[GemmCount | None] = []

    def __enter__(self) -> GemmCount:
        self._outer.append(_CURRENT.count)
        _CURRENT.count = GemmCount()
        return _CURRENT.count

    def __exit__(self, *error: Any) -> None:
        _CURRENT.count = self._outer.pop()


class counting_with:
    """Context: products are counted by `count`, or by nobody if it is None: of a recompute, who counted its forward."""

    def __init__(self, count: GemmCount | None) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._count, _CURRENT.count = _CURRENT.count, self._count

    def __exit__(self, *error: Any) -> None:
        self._count, _CURRENT.count = _CURRENT.count, self._count


def current_count() -> GemmCount | None:
    """The counter in force in this thread."""
    if torch.compiler.is_compiling():
        return None
    return _CURRENT.count
