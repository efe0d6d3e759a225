from __future__ import annotations

from typing import Any

import pytest
from tests.report import rows as fictional

from octavo.report.headline import emulation_banner, missing, sentences, tiles
from octavo.report.record import Record

Row = dict[str, Any]


def plain(words: str) -> str:
    return words.replace("\u00a0", " ").replace("\u2212", "-").replace("\u00d7", "x")


def answers(rows: list[Row]) -> list[str]:
    return [plain(sentence.text) for sentence in sentences(Record(rows))]


def study_of(execution: str, after: float = 10.004) -> list[Row]:
    """Row-wise costs 1 % without training (20 to 20.2) and, by default, 0.04 % fine-tuned; half the memory."""
    quantized = {"kind": "ptq", "seed": 0, "execution": execution}
    tuned = {"kind": "finetune", "seed": 0, "execution": execution}
    speed = {"prefill_tokens_per_s": 1500.0, "decode_tokens_per_s": 130.0}
    return [
        {
            **quantized,
            "method": "bf16",
            "label": "BF16",
            "perplexity": 20.0,
            "weight_bytes": 2048,
            "execution": "high precision",
            "prefill_tokens_per_s": 1000.0,
            "decode_tokens_per_s": 100.0,
        },
        {**quantized, "method": "rowwise", "label": "FP8 row-wise", "perplexity": 20.2, "weight_bytes": 1024, **speed},
        {**quantized, "method": "int8", "label": "INT8", "perplexity": 20.3, "execution": "emulated"},
        {**tuned, "method": "bf16", "perplexity": 10.0, "execution": "high precision"},
        {**tuned, "method": "rowwise", "perplexity": after},
    ]


def test_the_answer_is_computed_from_the_rows() -> None:
    assert answers(study_of("native")) == [
        "FP8 row-wise costs +1.00 % perplexity without training, from 20.00 to 20.20 (one seed).",
        "For comparison, also without training: INT8 +1.50 %.",
        "Fine-tuned in FP8 for as many steps as BF16 and served in FP8, 1 of 1 lies within 1 % of BF16's perplexity: "
        "FP8 row-wise ends +0.04 % from it and recovers 96 % of its loss.",
        "The weights of the Linear layers take 1.00 KiB instead of 2.00 KiB (0.500x).",
        "Native speed against BF16: FP8 row-wise prefills at 1.50x and decodes at 1.30x.",
    ]


def test_an_emulated_study_claims_no_speed() -> None:
    said = answers(study_of("emulated"))
    assert said[-1] == "FP8 is emulated on this machine, so this study makes no claim about its speed."
    assert "1.30x" not in " ".join(said)
    assert [tile.value for tile in tiles(Record(study_of("emulated")))][-1] == "no claim"


@pytest.mark.parametrize(
    ("after", "tone", "words"),
    [
        (10.004, "good", "recovers 96 % of its loss"),
        (9.99, "good", "recovers all of its loss"),
        (10.1, "good", "recovers none of its loss"),
        (10.11, "bad", "0 of 1 lies within 1 %"),
    ],
)
def test_the_tone_follows_the_bound(after: float, tone: str, words: str) -> None:
    said = sentences(Record(study_of("native", after)))[2]
    assert said.tone == tone
    assert words in plain(said.text)


def test_a_gain_is_no_cost() -> None:
    rows = study_of("native")
    rows[1]["perplexity"] = 19.9
    assert answers(rows)[0].startswith("FP8 row-wise changes perplexity by -0.50 % without training")


def test_a_change_that_rounds_to_zero_is_called_small() -> None:
    rows = study_of("native")
    rows[1]["perplexity"] = 20.001
    assert answers(rows)[0].startswith("FP8 row-wise changes perplexity by less than 0.01 % without training")


def test_the_banner_names_what_was_emulated_and_only_that() -> None:
    banner = emulation_banner(Record([*study_of("native"), {"kind": "run", "device_name": "a GPU"}]))
    assert banner.startswith("Emulated on a GPU: INT8. ")
    assert "row-wise" not in banner


def test_the_banner_of_an_emulated_study_says_that_it_is_no_speed() -> None:
    assert "these figures are no speed of FP8" in emulation_banner(Record(study_of("emulated")))


def test_no_banner_where_all_is_native() -> None:
    rows = [row for row in study_of("native") if row["method"] != "int8"]
    assert emulation_banner(Record(rows)) == ""


def test_a_complete_record_lacks_nothing() -> None:
    assert missing(Record(fictional.study(steps=12))) == []


@pytest.mark.parametrize("kind", ["run", "data", "model", "ptq", "finetune", "claim", "validation", "scale_history"])
def test_a_missing_kind_is_named_and_nothing_else(kind: str) -> None:
    rows = [row for row in fictional.study(steps=12) if row["kind"] != kind]
    assert len(missing(Record(rows))) == 1


def test_a_skipped_phase_is_named_with_its_reason() -> None:
    rows = [*fictional.study(steps=12), {"kind": "phase", "name": "te", "status": "skipped", "note": "not installed"}]
    assert missing(Record(rows)) == ["phase te: skipped (not installed)"]


def test_nothing_is_said_about_an_empty_record_but_that_it_is_empty() -> None:
    assert all("not in this record" in said for said in answers([]))
    assert tiles(Record([])) == []
