"""What follows from ceilings is computed from all of a run's rows, and from no other run's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench import joined_records
from octavo.bench.derived import restated
from tests.bench import rows as made

SHAPE = (8192, 768, 3072)
ELEMENTS = 8192 * 768 + 768 * 3072 + 8192 * 3072
SLOW = {"kind": "ceiling", "name": "copy", "status": "measured", "per_s": 2e12}


def target(rate: float, gemms: float = 4.0, each: int = 4, elements: int = ELEMENTS) -> float:
    """ms: the products alone and casts at 1 / 1.12 of copying."""
    return gemms + 1e3 * 1.12 * each * elements / rate


def linears(**more: object) -> list[made.Row]:
    delayed, current, cached = "octavo-delayed", "octavo-current", "octavo-delayed-cached"
    rows = [made.linear("gemms", 4.0), made.linear("bf16", 8.0)]
    rows += [made.linear(name, 5.0, recipe=name.split("-")[1], **more) for name in (delayed, current, cached)]
    return rows


def test_a_faster_copy_lowers_targets_and_shares_that_were_recorded() -> None:
    fast = made.cast("copy", 1.0) | {"per_s": 4e12, "bytes": 1 << 28}
    rows = [SLOW, fast, made.cast("delayed", 1.9) | {"per_s": 3.8e12}, *linears(target_ms=99.0)]
    *_, cast, _, bf16, delayed, current, cached = restated(rows)
    assert cast["of_copy"] == pytest.approx(0.95)
    assert delayed["target_ms"] == pytest.approx(target(4e12))
    assert current["target_ms"] == pytest.approx(target(4e12, each=6))
    assert cached["target_ms"] == pytest.approx(target(4e12, elements=ELEMENTS - 768 * 3072))
    assert delayed["speedup"] == pytest.approx(8.0 / 5.0)
    assert "target_ms" not in bf16


def test_a_linear_is_compared_with_the_faster_of_two_measurements_of_bf16() -> None:
    for again, fastest in ((7.5, 7.5), (8.5, 8.0)):
        rows = restated([*linears(), made.linear("bf16-again", again)])
        (delayed,) = [row for row in rows if row["rival"] == "octavo-delayed"]
        assert delayed["speedup"] == pytest.approx(fastest / 5.0)


def test_without_a_ceiling_rows_keep_what_they_have() -> None:
    rows = [made.cast("delayed", 0.9), *linears(target_ms=99.0)]
    assert restated(rows)[0] == rows[0]
    assert {row.get("target_ms") for row in restated(rows)[3:]} == {99.0}


def test_figures_by_kernels_are_compared_with_those_by_kernels() -> None:
    kernels = [
        made.linear("gemms-kernels", 3.0, library="torch", method="sum of kernels"),
        made.linear("bf16-kernels", 6.0, method="sum of kernels"),
        made.linear("octavo-delayed-cached-kernels", 4.0, recipe="delayed", method="sum of kernels"),
        made.linear("te-delayed", 5.0, method="sum of kernels"),
    ]
    *_, own, peer = restated([SLOW, *linears(), *kernels])
    assert (own["speedup"], peer["speedup"]) == (pytest.approx(1.5), pytest.approx(1.2))
    assert own["target_ms"] == pytest.approx(target(2e12, gemms=3.0, elements=ELEMENTS - 768 * 3072))


@pytest.mark.parametrize("lacking", ["ms", "shape", "library", "rival", "recipe", "method", "status"])
def test_a_row_that_lacks_a_field_stands_in_nobody_s_way(lacking: str) -> None:
    rows = [SLOW, *linears()]
    damaged = [{key: value for key, value in rows[3].items() if key != lacking}]
    whole = restated([*rows[:3], *damaged, *rows[4:]])
    assert whole[4]["target_ms"] == pytest.approx(target(2e12, each=6))


def test_a_record_is_judged_by_its_own_ceilings(tmp_path: Path) -> None:
    """Sections are taken from two records, and the faster card of the one says nothing of the other's Linears."""
    fast = SLOW | {"per_s": 4e12}
    run = {"kind": "run", "device_name": "A"}
    for name, rows in {"a": [run, SLOW, *linears()], "b": [run, fast]}.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    joined = joined_records([tmp_path / "a", tmp_path / "b"])
    assert [row["per_s"] for row in joined if row["kind"] == "ceiling"] == [4e12]
    (delayed,) = [row for row in joined if row.get("rival") == "octavo-delayed"]
    assert delayed["target_ms"] == pytest.approx(target(2e12))
