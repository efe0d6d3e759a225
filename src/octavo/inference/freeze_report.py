"""FreezeReport: what was frozen, what stays and why. The names of the frozen layers first; printed, a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from octavo.conversion.report import StructureReport, structure_lines


class LeftLayer(NamedTuple):
    """A linear layer that stays as it is: in high precision, or in FP8 by its recipe if it was converted before.

    Attributes:
        name: qualified name in the model.
        kind: its class.
        reason: why.
    """

    name: str
    kind: str
    reason: str


class FreezeReport(list[str]):
    """The qualified names of the layers that `octavo.freeze` replaced, in the order of the model.

    Args:
        frozen: (name, class that the layer had) of each.
        left: linear layers that stay as they are.
        scheme: of the frozen ones.
        structures: MLPs and normalisations that were looked at.

    Attributes:
        left: linear layers that stay as they are, each with its reason: in high precision, or, of those converted
            before, in FP8 as converted, which `octavo.unconvert` still turns back.
        structures: MLPs and normalisations, in the order of the model: whether each is computed as one, or why not.
    """

    def __init__(
        self,
        frozen: Iterable[tuple[str, str]],
        left: Iterable[LeftLayer],
        scheme: str,
        structures: Iterable[StructureReport] = (),
    ) -> None:
        kinds = dict(frozen)
        super().__init__(kinds)
        self.left, self.scheme, self.structures = tuple(left), scheme, tuple(structures)
        self._kinds = kinds

    def __str__(self) -> str:
        head = ("layer", "kind", "frozen", "scheme, or why not")
        rows = [head, *((name, self._kinds.get(name, ""), "yes", self.scheme) for name in self)]
        rows += [(layer.name or "(root)", layer.kind, "no", layer.reason) for layer in self.left]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        lines.append(f"{len(self)} of {len(self) + len(self.left)} layers frozen.")
        lines += structure_lines(self.structures)
        return "\n".join(lines)
