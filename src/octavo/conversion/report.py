"""ConversionReport: what was converted, what was not and why. Data first; printed, a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from octavo.conversion.gain import EMULATED
from octavo.kernels.scaled_mm import device_reasons

# Of a model without parameters.
NO_DEVICE = "no device"


@dataclass(frozen=True)
class LayerReport:
    """One layer that holds a matrix.

    Attributes:
        name: qualified name in the model.
        kind: its class before.
        in_features, out_features: of the matrix.
        converted: whether it runs in FP8 now (or would, in a dry run).
        recipe: of the layer, as text; empty if not converted.
        reason: why it was skipped, or a remark; may be empty.
        expected_gain: speed of forward and backward over bf16 on an H200 with many tokens, by `octavo.conversion.gain`;
            NaN under a recipe that is emulated on every device, or whose cost has no model.
        no_gain: why `expected_gain` is NaN; empty if it is a number.
    """

    name: str
    kind: str
    in_features: int
    out_features: int
    converted: bool
    recipe: str
    reason: str
    expected_gain: float
    no_gain: str = ""


@dataclass(frozen=True)
class StructureReport:
    """An MLP, a normalisation before linear layers, or the loss of a language model.

    Attributes:
        name: qualified name in the model, of the MLP, of the normalisation, or of the model whose loss it is.
        kind: its class before.
        parts: names of what is computed as one: of an MLP layers and activation, and none if its class is not known;
            of a normalisation the layers behind, of a model "loss".
        fused: whether it is computed as one now (or would be, in a dry run).
        reason: why it is not; empty if it is.
    """

    name: str
    kind: str
    parts: tuple[str, ...]
    fused: bool
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """Outcome of `octavo.convert`.

    Attributes:
        layers: all layers that were looked at, in the order of the model.
        unmatched: patterns of `include`, `exclude` and the recipe's overrides that matched no such layer.
        remarks: what else was done or seen.
        dry_run: nothing was changed.
        device: of the model's parameters.
        structures: MLPs and normalisations that were looked at, in the order of the model; then losses.
        frozen: how many layers the model has that `octavo.freeze` made, which stay as they are.
    """

    layers: tuple[LayerReport, ...]
    unmatched: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    dry_run: bool = False
    device: str = field(default="cpu")
    structures: tuple[StructureReport, ...] = ()
    frozen: int = 0

    @property
    def converted(self) -> list[LayerReport]:
        """Layers that run in FP8."""
        return [layer for layer in self.layers if layer.converted]

    @property
    def skipped(self) -> list[LayerReport]:
        """Layers that stay in high precision, each with its reason."""
        return [layer for layer in self.layers if not layer.converted]

    @property
    def fused(self) -> list[StructureReport]:
        """Structures that are computed as one."""
        return [structure for structure in self.structures if structure.fused]

    @property
    def unfused(self) -> list[StructureReport]:
        """Structures whose parts run one by one, each with its reason."""
        return [structure for structure in self.structures if not structure.fused]

    @property
    def warnings(self) -> list[str]:
        """What the user most likely did not intend."""
        found = []
        if not self.converted:
            says_why = self.layers and not self.frozen
            found.append("NOTHING WAS CONVERTED" + ("" if says_why else f": {no_layers(self.frozen)}"))
        found += [f"the pattern {pattern!r} matched no linear layer" for pattern in self.unmatched]
        return found

    @property
    def _is_emulated(self) -> bool:
        return self.device != NO_DEVICE and bool(device_reasons(torch.device(self.device)))

    def __str__(self) -> str:
        head = ("layer", "kind", "in", "out", "FP8", "gain", "recipe, or why not")
        rows = [head]
        for layer in self.layers:
            gain = f"{layer.expected_gain:.2f}x" if layer.converted else ""
            if layer.converted and math.isnan(layer.expected_gain):
                gain = "emulated" if layer.no_gain == EMULATED else "unknown"
            remark = "; ".join(text for text in (layer.recipe, layer.reason) if text)
            size = str(layer.in_features), str(layer.out_features)
            rows.append((layer.name or "(root)", layer.kind, *size, "yes" if layer.converted else "no", gain, remark))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        done = "would be converted" if self.dry_run else "converted"
        lines.append(f"{len(self.converted)} of {len(self.layers)} layers {done}, on {self.device}.")
        if self.converted and self._is_emulated:
            lines.append("FP8 is emulated here, with the same numbers.")
        if self.converted:
            lines.append(
                "gain: estimated, not measured: how many times as fast as bf16, forward and backward, on an H200 with"
                " many tokens; below 1x is slower."
            )
        for why in dict.fromkeys(layer.no_gain for layer in self.converted if layer.no_gain not in ("", EMULATED)):
            lines.append(f"unknown: there is no model of what this recipe has, {why}: measure it.")
        lines += structure_lines(self.structures) + list(self.remarks)
        return "\n".join([f"! {warning}" for warning in self.warnings] + lines)


def no_layers(frozen: int) -> str:
    """Why a model has no linear layers left, if so many of them are frozen."""
    if not frozen:
        return "the model has no linear layers"
    many = f"{frozen} linear layers are" if frozen > 1 else "linear layer is"
    return f"its {many} frozen already: there is no way back from codes, build the model anew"


def structure_lines(structures: tuple[StructureReport, ...]) -> list[str]:
    """A line for those that are alike."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for one in structures:
        alike.setdefault((one.kind, one.parts, one.fused, one.reason), []).append(one.name or "root")
    lines = []
    for (kind, parts, fused, reason), names in alike.items():
        which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        what = f"{kind} with {', '.join(parts)}" if isinstance(parts, tuple) and parts else str(kind)
        if parts == ("loss",):
            what = f"the loss of {kind}, on a GPU"
        lines.append(f"{'fused' if fused else 'not fused'}: {what} ({which}){'' if fused else f': {reason}'}")
    return lines
