"""What follows from the rows: changes against 16 bits, gaps after fine-tuning, and the share recovered.

Formulas, for one seed s, always within that seed:

- change without training  ``c_s = 100 * (ppl_ptq / ppl_bf16 - 1)``  per cent
- gap after fine-tuning    ``g_s = 100 * (ppl_fp8 / ppl_bf16 - 1)``  per cent, both fine-tuned for the same steps, each
  as it is served
- share recovered          ``1 - mean(g) / mean(c)``, a ratio of means because a ratio for each seed divides by noise

A seed without its own 16-bit row gives no change: it is not compared with another seed's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.report.methods import Method, counterpart, method, without_training
from octavo.report.record import Record, Row, number, text
from octavo.report.wording import Spread

# Perplexities are compared on one finite test split: below this, in per cent, a loss is not told from rounding, and
# a share of it would be noise divided by noise.
SMALLEST_LOSS_TO_RECOVER = 0.05
BOUND_PERCENT = 1.0

NOTHING_LOST, WITHIN_SPREAD = "nothing lost", "within spread"
NO_LOSS_KNOWN, NO_GAP_KNOWN = "loss unknown", "gap unknown"
WHY_NO_SHARE = {
    NOTHING_LOST: f"without training, perplexity rose by less than {SMALLEST_LOSS_TO_RECOVER} %",
    WITHIN_SPREAD: "what was lost without training is within its own deviation over seeds",
    NO_LOSS_KNOWN: "no perplexity without training, of the way in which it is served",
    NO_GAP_KNOWN: "no fine-tuning in 16 bits with the same seed",
}


@dataclass(frozen=True)
class PtqResult:
    """One method that quantizes the finished model. Sizes in bytes, times in seconds, rates in tokens a second."""

    method: Method
    weights: str
    activations: str
    execution: str
    notes: tuple[str, ...]
    perplexity: Spread | None
    change_percent: Spread | None
    accuracy: Spread | None
    weight_bytes: Spread | None
    model_bytes: Spread | None
    load_s: Spread | None
    ttft_s: Spread | None
    prefill: Spread | None
    decode: Spread | None


@dataclass(frozen=True)
class FinetuneResult:
    """One method of fine-tuning. ``recovered`` is a share (0.92 is 92 %); ``recovered_why`` says why it is None."""

    method: Method
    execution: str
    served_as: str
    steps: Spread | None
    perplexity: Spread | None
    perplexity_bf16_serving: Spread | None
    gap_percent: Spread | None
    gap_by_seed: tuple[tuple[str, float], ...]
    gap_absolute: Spread | None
    change_before: Spread | None
    recovered: float | None
    recovered_why: str
    accuracy: Spread | None
    steps_per_s: Spread | None
    peak_memory: Spread | None

    @property
    def is_baseline(self) -> bool:
        """Whether this is the 16-bit fine-tuning that the others are compared with."""
        return self.method.family == "16-bit"


def _rows_of(record: Record, kind: str, key: str) -> list[Row]:
    return [row for row in record.all(kind) if text(row, "method") == key]


def _measure(rows: list[Row]) -> Callable[[str], Spread | None]:
    return lambda key: Spread.of(number(row, key) for row in rows)


def _joined(rows: list[Row], key: str) -> str:
    return ", ".join(dict.fromkeys(value for row in rows if (value := text(row, key))))


def baseline_key(record: Record, kind: str) -> str:
    """The method of ``kind`` that the others are compared with: ``bf16``, else ``fp16``, else none (empty)."""
    methods = record.methods(kind)
    return next((key for key in ("bf16", "fp16") if key in methods), "")


def _baseline_by_seed(record: Record, kind: str) -> dict[str, float]:
    rows = _rows_of(record, kind, baseline_key(record, kind))
    return {text(row, "seed"): value for row in rows if (value := number(row, "perplexity"))}


def _changes(rows: list[Row], baseline: dict[str, float]) -> list[tuple[str, float, float]]:
    """(seed, change in per cent, change in perplexity) for each row whose seed has a 16-bit row."""
    changes = []
    for row in rows:
        seed, value = text(row, "seed"), number(row, "perplexity")
        if value is not None and seed in baseline:
            changes.append((seed, 100 * (value / baseline[seed] - 1), value - baseline[seed]))
    return changes


def ptq_results(record: Record) -> list[PtqResult]:
    """The methods without training, 16 bits first, then FP8, then integers."""
    baseline = _baseline_by_seed(record, "ptq")
    results = []
    for key in record.methods("ptq"):
        rows = _rows_of(record, "ptq", key)
        of = _measure(rows)
        results.append(
            PtqResult(
                method=without_training(key, text(rows[0], "label")),
                weights=_joined(rows, "weights"),
                activations=_joined(rows, "activations"),
                execution=_joined(rows, "execution"),
                notes=tuple(dict.fromkeys(note for row in rows if (note := text(row, "note")))),
                perplexity=of("perplexity"),
                change_percent=Spread.of(change for _, change, _ in _changes(rows, baseline)),
                accuracy=of("accuracy"),
                weight_bytes=of("weight_bytes"),
                model_bytes=of("model_bytes"),
                load_s=of("load_s"),
                ttft_s=of("ttft_s"),
                prefill=of("prefill_tokens_per_s"),
                decode=of("decode_tokens_per_s"),
            )
        )
    return sorted(results, key=lambda result: result.method.order)


def ptq_baseline(results: list[PtqResult]) -> PtqResult | None:
    """The 16-bit row among ``results``."""
    return next((result for result in results if result.method.family == "16-bit"), None)


def _ptq_counterpart(results: list[PtqResult], key: str, served_as: str) -> PtqResult | None:
    quantized = [result for result in results if result.method.family != "16-bit"]
    for name in (served_as, key):
        for result in quantized:
            if name and name in (result.method.key, result.method.label):
                return result
    names = [counterpart(served_as), counterpart(key)]
    return next((r for name in names for r in quantized if name and counterpart(r.method.key) == name), None)


def _served(key: str, labels: dict[str, str]) -> str:
    known = labels.get(key)
    return known if known is not None else without_training(key).label if key else ""


def recovered_share(before: Spread | None, after: Spread | None) -> tuple[float | None, str]:
    """``1 - after / before`` from the means of two changes in per cent, or None and a key of WHY_NO_SHARE.

    There is no share where the loss is below ``SMALLEST_LOSS_TO_RECOVER`` or within its own spread over seeds.
    """
    if before is None:
        return None, NO_LOSS_KNOWN
    if after is None:
        return None, NO_GAP_KNOWN
    if before.mean < SMALLEST_LOSS_TO_RECOVER:
        return None, NOTHING_LOST
    if before.deviation is not None and before.mean <= before.deviation:
        return None, WITHIN_SPREAD
    return 1 - after.mean / before.mean, ""


def finetune_results(record: Record) -> list[FinetuneResult]:
    """The methods of fine-tuning, 16 bits first."""
    baseline = _baseline_by_seed(record, "finetune")
    ptq = ptq_results(record)
    labels = {result.method.key: result.method.label for result in ptq}
    results = []
    for key in record.methods("finetune"):
        rows = _rows_of(record, "finetune", key)
        of = _measure(rows)
        look = method(key)
        changes = [] if look.family == "16-bit" else _changes(rows, baseline)
        gap = Spread.of(change for _, change, _ in changes)
        before = None
        share, why = None, ""
        if look.family != "16-bit":
            found = _ptq_counterpart(ptq, key, text(rows[0], "served_as"))
            before = found.change_percent if found else None
            share, why = recovered_share(before, gap)
        results.append(
            FinetuneResult(
                method=look,
                execution=_joined(rows, "execution"),
                served_as=_served(_joined(rows, "served_as"), labels),
                steps=of("steps"),
                perplexity=of("perplexity"),
                perplexity_bf16_serving=of("perplexity_bf16_serving"),
                gap_percent=gap,
                gap_by_seed=tuple((seed, change) for seed, change, _ in changes),
                gap_absolute=Spread.of(change for _, _, change in changes),
                change_before=before,
                recovered=share,
                recovered_why=why,
                accuracy=of("accuracy"),
                steps_per_s=of("steps_per_s"),
                peak_memory=of("peak_memory_bytes"),
            )
        )
    return sorted(results, key=lambda result: result.method.order)


def factor(value: Spread | None, baseline: Spread | None) -> float | None:
    """``value / baseline`` of the means; None when either is missing or the baseline is zero."""
    if value is None or baseline is None or baseline.mean == 0:
        return None
    return value.mean / baseline.mean


def within_bound(change_percent: float) -> bool:
    """Whether a change is at most ``BOUND_PERCENT`` to either side, rounding of floats aside."""
    return round(abs(change_percent), 6) <= BOUND_PERCENT
