"""Rules by which served models are judged: prefill against BF16, what an article expects of it, and what is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from octavo.bench.judging import MISS, NOT_MEASURED, PASS, REPORTED, Row, Verdict
from octavo.bench.roofline import Ceilings, ceilings_of
from octavo.bench.serving_measures import DECODE, FIRST_TOKEN, LOADING, PREFILL, REPLAYED
from octavo.bench.serving_rivals import CONVERTED

_PRODUCT_SHAPE = (8192, 768, 3072)


def _of(rows: Sequence[Row], model: str, phase: str, graph: str | None) -> list[Row]:
    found = [row for row in rows if row["kind"] == "inference" and row.get("model") == model]
    return [row for row in found if row.get("phase") == phase and graph in (None, row.get("graph"))]


def _pairs(rows: Sequence[Row], model: str, phase: str, graph: str) -> list[tuple[Row, Row]]:
    """Of each form that was measured: BF16, and the fastest of Octavo's."""
    measured = [row for row in _of(rows, model, phase, graph) if row["status"] == "measured"]
    pairs = []
    for reference in (row for row in measured if row["rival"] == "bf16"):
        alike = [row for row in measured if _size(row) == _size(reference) and row["library"] == "octavo"]
        if alike:
            pairs.append((reference, min(alike, key=lambda row: float(row["ms"]))))
    return pairs


def _size(row: Row) -> tuple[int, int]:
    return row["batch"], row["tokens"]


def _lacking(rows: Sequence[Row], model: str, phase: str, graph: str) -> Verdict:
    """Why there is no pair: what the phase's rows say, or those of the model."""
    of_model = [row for row in rows if row["kind"] == "inference" and row.get("model") == model]
    said = [row for row in (*_of(rows, model, phase, graph), *of_model) if row["status"] != "measured"]
    own = [row for row in said if row.get("library") in ("octavo", "torch", None)]
    if own:
        return Verdict("", NOT_MEASURED, f"{own[0].get('rival') or phase}: {own[0]['reason']}")
    return Verdict("", NOT_MEASURED, "the section inference was not asked for in this run")


def _words(pair: tuple[Row, Row]) -> str:
    reference, own = pair
    speed = reference["ms"] / own["ms"]
    return f"{own['batch']} x {own['tokens']} {speed:.3f}x ({own['ms']:.4g} against {reference['ms']:.4g} ms)"


@dataclass(frozen=True)
class PrefillSpeed:
    """Octavo's fastest scheme reads prompts `least` times as fast as BF16, in every form that was measured."""

    section: ClassVar[str] = "inference"
    model: str
    least: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """By the device's time; the other rivals are named."""
        pairs = _pairs(rows, self.model, PREFILL, REPLAYED)
        if not pairs:
            return _lacking(rows, self.model, PREFILL, REPLAYED)
        passed = all(reference["ms"] / own["ms"] >= self.least for reference, own in pairs)
        named = []
        for reference, own in pairs:
            others = [
                f"{row['rival']} {reference['ms'] / row['ms']:.3f}x"
                for row in _of(rows, self.model, PREFILL, REPLAYED)
                if row["status"] == "measured" and _size(row) == _size(own) and row not in (reference, own)
            ]
            named.append(f"{own['batch']} x {own['tokens']}: {', '.join([own['rival'], *others])}")
        return Verdict("; ".join(map(_words, pairs)), PASS if passed else MISS, "; ".join(named))


@dataclass(frozen=True)
class PrefillExpected:
    """Whether prefill is as much faster as was expected elsewhere: told, with the reason.

    The reason is reckoned from the run: with its products at FP8's rate and casts at the rate of copying, and all else
    as long as it takes in BF16, a prefill of T ms takes T - P16 + P8 + C, and is no faster than that.
    """

    section: ClassVar[str] = "inference"
    model: str
    expected: float

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Each form, and how far it could come."""
        pairs = _pairs(rows, self.model, PREFILL, REPLAYED)
        if not pairs:
            return _lacking(rows, self.model, PREFILL, REPLAYED)
        held = all(reference["ms"] / own["ms"] >= self.expected for reference, own in pairs)
        rates = product_rates(rows)
        reasons = [reason for pair in pairs if (reason := _reach(*pair, rates))]
        words = f"{'held' if held else 'not held'}: {'; '.join(map(_words, pairs))}"
        return Verdict(words, REPORTED, "; ".join(reasons) or "the ceilings were not measured in this run")


def product_rates(rows: Sequence[Row]) -> Ceilings:
    """The ceilings of a run, those of products at GPT-2's own size where they were measured there."""
    own = [row for row in rows if row["kind"] != "ceiling" or row.get("shape") == list(_PRODUCT_SHAPE)]
    small, every = ceilings_of(own), ceilings_of(rows)
    return Ceilings(
        copy=every.copy,
        bf16=small.bf16 or every.bf16,
        fp8_tensor=small.fp8_tensor or every.fp8_tensor,
        fp8_row=small.fp8_row or every.fp8_row,
    )


def _reach(reference: Row, own: Row, rates: Ceilings) -> str:
    """How fast a prefill in FP8 could be at most, and why."""
    fp8, bf16, copy = rates.of_products(own["products"]), rates.bf16, rates.copy
    if not fp8 or not bf16 or not copy:
        return ""
    before, after = (1e3 * reference["linear_flops"] / rate for rate in (bf16, fp8))
    casts, whole = 1e3 * own["cast_bytes"] / copy, float(reference["ms"])
    reach = whole / (whole - before + after + casts)
    beyond = ", the rest by fusing" if own["rival"].endswith(f"-{CONVERTED}") else ""
    return (
        f"{own['batch']} x {own['tokens']}: products take {before:.3g} of {whole:.3g} ms at BF16's ceiling of"
        f" matrices of this size ({bf16 / 1e12:.0f} TFLOP/s), {after:.3g} at FP8's ({fp8 / 1e12:.0f}), casts"
        f" {casts:.3g}: no more than {reach:.2f}x by FP8 alone{beyond}"
    )


@dataclass(frozen=True)
class ServedTold:
    """Decoding, the first token and loading of a model: told."""

    section: ClassVar[str] = "inference"
    model: str

    def __call__(self, rows: Sequence[Row]) -> Verdict:
        """Octavo's fastest beside BF16, of each form."""
        words = []
        for phase, graph in ((DECODE, REPLAYED), (FIRST_TOKEN, REPLAYED), (FIRST_TOKEN, ""), (LOADING, "")):
            for reference, own in _pairs(rows, self.model, phase, graph):
                size = f" of {own['batch']}" if phase == DECODE else ""
                how = f", {'replayed' if graph else 'eager'}" if phase == FIRST_TOKEN else ""
                speed = reference["ms"] / own["ms"]
                words.append(f"{phase}{size}{how} {speed:.3f}x ({own['ms']:.4g} against {reference['ms']:.4g} ms)")
        if not words:
            return _lacking(rows, self.model, DECODE, REPLAYED)
        sizes = {
            row["rival"]: f"{row['rival']} {row['weight_bytes'] / 1e9:.3g} GB" for phase in (DECODE, LOADING)
            for row in _of(rows, self.model, phase, None)
            if row["status"] == "measured" and row["rival"] in ("bf16", "octavo-rowwise")
        }  # fmt: skip
        return Verdict("; ".join(words), REPORTED, ", ".join(sizes.values()))
