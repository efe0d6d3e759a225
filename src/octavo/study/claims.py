"""What is commonly claimed of FP8, beside what this study measured: held, not held, or not to be answered here."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.report.wording import decimals
from octavo.study.record import Row

_COMMON = "commonly claimed of FP8 fine-tuning of GPT-2-sized models on Hopper"
_OWN = "Octavo's own bound"
_FP8_SERVED = ("tensor_static", "tensor_dynamic", "rowwise")
_SMALLEST_GAIN = 1.8


def claim_rows(rows: Sequence[Row]) -> list[Row]:
    """The `claim` rows that follow from the `ptq` and `finetune` rows of one run."""
    ptq = {row["method"]: row for row in rows if row["kind"] == "ptq" and row["perplexity"] is not None}
    tuned = {row["method"]: row for row in rows if row["kind"] == "finetune" and row["perplexity"] is not None}
    return [
        _accuracy(tuned),
        _perplexity(tuned),
        _speed(ptq),
        _quantized_bound(ptq),
        _tuned_bound(tuned),
    ]


def signed(value: float, digits: int) -> str:
    """A difference with its sign: a real minus as everywhere in the report, none where it rounds to zero."""
    written = decimals(value, digits)
    return f"+{written}" if value > 0 and written.strip("0.") else written


def _claim(claim: str, source: str, claimed: str, measured: str, held: bool | None, why: str) -> Row:
    return {
        "kind": "claim",
        "claim": claim,
        "source": source,
        "claimed": claimed,
        "measured": measured,
        "held": held,
        "why": why,
    }


def _half(rows: dict[str, Row]) -> Row | None:
    return rows.get("bf16") or rows.get("fp16")


def _fp8(rows: dict[str, Row]) -> dict[str, Row]:
    return {key: row for key, row in rows.items() if key not in ("bf16", "fp16")}


def _accuracy(tuned: dict[str, Row]) -> Row:
    claim, claimed = "Accuracy lost after fine-tuning in FP8", "1–2 %"
    base, others = _half(tuned), _fp8(tuned)
    if base is None or not others or not base["accuracy"]:
        return _claim(claim, _COMMON, claimed, "", None, "no fine-tuning in 16 bits and FP8 to compare")
    lost = {key: 100 * (1 - row["accuracy"] / base["accuracy"]) for key, row in others.items()}
    worst = max(lost, key=lambda key: lost[key])
    return _claim(
        claim,
        _COMMON,
        claimed,
        f"{signed(lost[worst], 2)} % ({worst}, the most)",
        lost[worst] <= 2.0,
        "next-token accuracy on the test split as served, relative to fine-tuning in 16 bits; held if at most 2 %",
    )


def _perplexity(tuned: dict[str, Row]) -> Row:
    claim, claimed = "Perplexity lost after fine-tuning in FP8", "less than 0.5"
    base, others = _half(tuned), _fp8(tuned)
    if base is None or not others:
        return _claim(claim, _COMMON, claimed, "", None, "no fine-tuning in 16 bits and FP8 to compare")
    worst = max(others, key=lambda key: others[key]["perplexity"])
    lost = others[worst]["perplexity"] - base["perplexity"]
    return _claim(
        claim,
        _COMMON,
        claimed,
        f"{signed(lost, 3)} ({worst}, the most)",
        lost < 0.5,
        f"test perplexity as served, against {base['perplexity']:.2f} of fine-tuning in 16 bits",
    )


def _speed(ptq: dict[str, Row]) -> Row:
    claim, claimed = "Tokens a second when serving in FP8", f"{_SMALLEST_GAIN}×"
    base = _half(ptq)
    native = {key: row for key, row in ptq.items() if key in _FP8_SERVED and row["execution"] == "native"}
    if base is None or not native:
        return _claim(
            claim, _COMMON, claimed, "", None, "FP8 products were emulated here, and emulated speed is no speed"
        )
    gains = {
        (key, what): row[f"{what}_tokens_per_s"] / base[f"{what}_tokens_per_s"]
        for key, row in native.items()
        for what in ("prefill", "decode")
    }
    best = {
        what: max((key for key in gains if key[1] == what), key=lambda key: gains[key])
        for what in ("prefill", "decode")
    }
    measured = ", ".join(f"{what} {gains[key]:.2f}× ({key[0]})" for what, key in best.items())
    return _claim(
        claim,
        _COMMON,
        claimed,
        measured,
        all(gains[key] >= _SMALLEST_GAIN for key in best.values()),
        "the fastest native FP8 method against 16 bits, each step run from Python; held if both reach it",
    )


def _quantized_bound(ptq: dict[str, Row]) -> Row:
    claim, claimed = "Perplexity of FP8 row-wise without training", "within 3 % of 16 bits"
    base, row = _half(ptq), ptq.get("rowwise")
    if base is None or row is None:
        return _claim(claim, _OWN, claimed, "", None, "the row-wise method did not run")
    change = 100 * (row["perplexity"] / base["perplexity"] - 1)
    return _claim(claim, _OWN, claimed, f"{signed(change, 2)} %", abs(change) <= 3.0, "test split")


def _tuned_bound(tuned: dict[str, Row]) -> Row:
    claim, claimed = "Perplexity after fine-tuning in FP8, each recipe", "within 1 % of 16 bits"
    base, others = _half(tuned), _fp8(tuned)
    if base is None or not others:
        return _claim(claim, _OWN, claimed, "", None, "no fine-tuning in 16 bits and FP8 to compare")
    gaps = {key: 100 * (row["perplexity"] / base["perplexity"] - 1) for key, row in others.items()}
    measured = ", ".join(f"{key} {signed(gap, 2)} %" for key, gap in gaps.items())
    return _claim(
        claim, _OWN, claimed, measured, all(abs(gap) <= 1.0 for gap in gaps.values()), "test split, as served"
    )
