from __future__ import annotations

import pytest
from tests.report import rows as fictional

from octavo.report import facts, tables
from octavo.report.record import Record


def cells(table: tables.Table, row: int) -> dict[str, str]:
    names = [column.name for column in table.columns]
    return {name: cell.text.replace("\u00a0", " ") for name, cell in zip(names, table.rows[row], strict=True)}


def test_emulated_times_are_marked_and_quality_is_not() -> None:
    table = tables.ptq_table(Record(fictional.study(steps=12)))
    rowwise = next(cells(table, i) for i in range(len(table.rows)) if table.rows[i][0].text == "FP8 row-wise")
    assert {name for name, text in rowwise.items() if "\u2020" in text} == {
        "First token",
        "Prefill tokens/s",
        "Decode tokens/s",
    }
    assert tables.EMULATED_NOTE in table.notes
    assert not any("\u2020" in text for text in cells(table, 0).values())


def test_native_times_are_not_marked() -> None:
    table = tables.finetune_table(Record(fictional.study(native=True, steps=12)))
    assert not any("\u2020" in cell.text for row in table.rows for cell in row)
    assert tables.EMULATED_NOTE not in table.notes


def test_a_column_that_nobody_filled_is_left_out() -> None:
    on_cpu = tables.finetune_table(Record(fictional.study(steps=12)))
    on_gpu = tables.finetune_table(Record(fictional.study(native=True, steps=12)))
    assert "Peak memory" not in [column.title for column in on_cpu.columns]
    assert "Peak memory" in [column.title for column in on_gpu.columns]


@pytest.mark.parametrize(
    ("held", "verdict"), [(True, "\u2713 held"), (False, "\u2717 not held"), (None, "? cannot be answered here")]
)
def test_a_claim_has_one_of_three_verdicts(held: bool | None, verdict: str) -> None:
    row = {"kind": "claim", "claim": "c", "claimed": "1", "measured": "2", "source": "s", "held": held, "why": None}
    assert cells(tables.claims_table(Record([row])), 0) == {
        "Claim": "c",
        "Verdict": verdict,
        "Claimed": "1",
        "Measured here": "2",
        "Why": "\u2014",
        "Source": "s",
    }


def test_the_worst_layers_come_first() -> None:
    rows = [
        {"kind": "layer_error", "method": method, "layer": name, "output_sqnr_db": value}
        for method, name, value in (
            ("rowwise", "a", 30.0),
            ("rowwise", "b", 12.25),
            ("mxfp8", "b", 13.0),
            ("rowwise", "c", 26.0),
            ("mxfp8", "c", 25.0),
            ("rowwise", "d", None),
            ("int4", "e", 1.0),
        )
    ]
    table = tables.worst_layers_table(Record(rows), num_layers=2)
    found = [[cell.text for cell in row[:3]] for row in table.rows]
    assert found == [["b", "FP8 row-wise", "12.2"], ["c", "MXFP8", "25.0"]]


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (2.0**-9, "0.001953 = 2\u207b\u2079"),
        (1.75 * 2.0**8, "448"),
        (2.0**-126, "1.175e\u221238 = 2\u207b\u00b9\u00b2\u2076"),
        (65504.0, "65,504"),
    ],
)
def test_limits_that_are_powers_of_two_say_so(value: float, written: str) -> None:
    assert facts.limit(value) == written


def test_the_command_is_quoted_for_a_shell() -> None:
    assert facts.command_line(Record(fictional.run_rows(False))) == "octavo study --preset tiny --out 'a folder'"


def test_the_hash_of_the_data_is_shown_in_full() -> None:
    table = facts.data_table(Record(fictional.run_rows(False)))
    assert ["SHA-256", "00ff" * 16] in [[cell.text for cell in row] for row in table.rows]
