from __future__ import annotations

from typing import Any

from octavo.study.claims import claim_rows
from octavo.study.format_rows import cast_rows, format_rows


def ptq(method: str, perplexity: float, execution: str, prefill: float, decode: float) -> dict[str, Any]:
    return {
        "kind": "ptq",
        "method": method,
        "perplexity": perplexity,
        "execution": execution,
        "prefill_tokens_per_s": prefill,
        "decode_tokens_per_s": decode,
    }


def tuned(method: str, perplexity: float, accuracy: float) -> dict[str, Any]:
    return {"kind": "finetune", "method": method, "perplexity": perplexity, "accuracy": accuracy}


def held(rows: list[dict[str, Any]]) -> dict[str, bool | None]:
    return {row["claim"].split()[0] + " " + row["claimed"]: row["held"] for row in claim_rows(rows)}


GOOD = [
    ptq("bf16", 20.0, "high precision", 100.0, 10.0),
    ptq("rowwise", 20.5, "native", 190.0, 18.5),
    tuned("bf16", 19.0, 0.40),
    tuned("delayed", 19.1, 0.395),
    tuned("current", 19.05, 0.40),
]


def test_what_is_measured_within_the_claims_is_held() -> None:
    assert held(GOOD) == {
        "Accuracy 1–2 %": True,
        "Perplexity less than 0.5": True,
        "Tokens 1.8×": True,
        "Perplexity within 3 % of 16 bits": True,
        "Perplexity within 1 % of 16 bits": True,
    }


def test_what_is_not_is_not() -> None:
    bad = [
        ptq("bf16", 20.0, "high precision", 100.0, 10.0),
        ptq("rowwise", 20.7, "native", 190.0, 17.0),
        tuned("bf16", 19.0, 0.40),
        tuned("delayed", 19.6, 0.39),
    ]
    assert set(held(bad).values()) == {False}


def test_differences_have_the_sign_that_the_report_has() -> None:
    better = [ptq("bf16", 20.0, "high precision", 1.0, 1.0), ptq("rowwise", 19.9, "emulated", 1.0, 1.0)]
    better += [tuned("bf16", 19.0, 0.40), tuned("delayed", 18.9, 0.404), tuned("current", 19.0, 0.404)]
    measured = [row["measured"] for row in claim_rows(better)]
    assert measured == ["−1.00 % (delayed, the most)", "0.000 (current, the most)", "", "−0.50 %", measured[-1]]
    assert measured[-1] == "delayed −0.53 %, current 0.00 %"


def test_emulated_speed_and_missing_phases_answer_nothing() -> None:
    emulated = [ptq("bf16", 20.0, "high precision", 1.0, 1.0), ptq("rowwise", 20.0, "emulated", 9.0, 9.0)]
    assert held(emulated)["Tokens 1.8×"] is None
    assert set(held([]).values()) == {None}
    assert all(row["why"] for row in claim_rows([]))


def test_the_tables_of_formats_come_from_the_library() -> None:
    rows = {row["name"]: row for row in format_rows()}
    assert (rows["E4M3"]["max"], rows["E4M3"]["smallest_subnormal"]) == (448.0, 2.0**-9)
    assert (rows["E5M2"]["max"], rows["E5M2"]["smallest_subnormal"]) == (57344.0, 2.0**-16)
    assert rows["bf16"]["smallest_subnormal"] == 2.0**-133
    casts = {row["value"]: row for row in cast_rows()}
    assert (casts["465"]["e4m3"], casts["465"]["e5m2"]) == ("448", "448")
    assert casts["1e-08"]["e4m3"] == "0"
    assert casts["17.3"]["bf16"] == "17.25"
