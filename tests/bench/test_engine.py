from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench import BenchSettings, joined_records, run_bench, with_targets
from octavo.bench.cases import linear as linear_case
from octavo.bench.cuda_graphs import KernelTimer
from octavo.bench.deadline import Deadline
from octavo.bench.record import BenchRecord
from octavo.bench.rivals import Built, Rival, plain
from octavo.bench.session import Session
from octavo.bench.timing import Call, Measure, WallTimer
from octavo.report.record import read_jsonl

Row = dict[str, Any]


def bench(tmp_path: Path, *only: str, **more: Any) -> list[Row]:
    return run_bench(BenchSettings(out=tmp_path, device="cpu", only=only, **more), command=["octavo", "bench"])


def of_kind(rows: list[Row], kind: str, **fields: Any) -> list[Row]:
    return [row for row in rows if row["kind"] == kind and all(row.get(key) == value for key, value in fields.items())]


def test_a_run_on_a_cpu_measures_every_section_and_judges_nothing(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    rows = bench(tmp_path, "ceilings", "casts", "linear", "host")
    assert rows == list(read_jsonl(tmp_path / "record.jsonl")[0])
    assert rows[0]["kind"] == "run"
    assert rows[0]["native_fp8"] is False
    assert [row["name"] for row in of_kind(rows, "section", status="done")] == ["ceilings", "casts", "linear", "host"]
    for kind in ("ceiling", "cast", "linear", "host"):
        assert of_kind(rows, kind, status="measured"), kind
    for row in of_kind(rows, "linear", status="measured"):
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"], row
        assert row["method"] == "wall"
    assert {row["verdict"] for row in of_kind(rows, "target")} == {"not measured"}
    assert torch.get_num_threads() == threads


def test_peers_are_imported_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setitem(run_bench.__globals__, "peer_reason", lambda library, device: seen.append(library))
    monkeypatch.setitem(run_bench.__globals__["CASES"], "host", lambda session: seen.append("host"))
    bench(tmp_path, "host")
    assert seen == ["te", "torchao", "host"]


def test_ratios_and_targets_come_from_the_run_itself(tmp_path: Path) -> None:
    rows = bench(tmp_path, "linear")
    # Measured where it is needed, asked for or not; the fastest counts.
    copy = max(row["per_s"] for row in of_kind(rows, "ceiling", name="copy"))
    measured = {row["rival"]: row for row in of_kind(rows, "linear", status="measured")}
    delayed, current = measured["octavo-delayed"], measured["octavo-current"]
    m, k, n = delayed["shape"]
    elements = m * k + k * n + m * n
    gemms = measured["gemms"]["ms"] / 1e3
    assert delayed["target_ms"] == pytest.approx(1e3 * (gemms + 1.12 * 4 * elements / copy), rel=1e-5)
    assert current["target_ms"] == pytest.approx(1e3 * (gemms + 1.12 * 6 * elements / copy), rel=1e-5)
    cached = measured["octavo-delayed-cached"]["target_ms"]
    assert cached == pytest.approx(1e3 * (gemms + 1.12 * 4 * (elements - k * n) / copy), rel=1e-5)
    reference = min(measured[name]["ms"] for name in ("bf16", "bf16-again"))
    assert delayed["speedup"] == pytest.approx(reference / delayed["ms"], rel=1e-4)
    assert "target_ms" not in measured["bf16"]


@pytest.mark.slow
def test_steps_of_every_model_that_can_be_built_here(tmp_path: Path) -> None:
    rows = bench(tmp_path, "steps", models=("gpt2", "vit"), variants=("bf16", "octavo-delayed", "te-delayed"))
    gpt2 = of_kind(rows, "step", model="gpt2")
    assert [(row["rival"], row["repeat"], row["status"]) for row in gpt2] == [
        ("bf16", False, "measured"),
        ("octavo-delayed", False, "measured"),
        ("te-delayed", False, "skipped"),
        ("bf16", True, "measured"),
    ]
    assert gpt2[1]["converted"] == 4
    assert gpt2[0]["per_s"] == pytest.approx(16 / gpt2[0]["ms"] * 1e3, rel=1e-3)  # one sample of 16 tokens a step
    vit = of_kind(rows, "step", model="vit")
    assert len(vit) == 4


def test_what_a_rival_raises_is_a_row_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(linear: object) -> None:
        raise RuntimeError("no kernel\nimage")

    rivals = [Rival("te-delayed", "te", "delayed", broken), Rival("bf16", "torch", "", plain)]  # type: ignore[arg-type]
    monkeypatch.setattr(linear_case, "linear_rivals", lambda device: rivals)
    rows = bench(tmp_path, "linear")
    (failed,) = of_kind(rows, "linear", rival="te-delayed")
    assert (failed["status"], failed["reason"]) == ("failed", "RuntimeError: no kernel image")
    assert of_kind(rows, "linear", rival="bf16")[0]["status"] == "measured"
    assert of_kind(rows, "section")[0]["status"] == "done"


def test_a_section_that_fails_says_so_and_the_next_one_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: Session) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setitem(run_bench.__globals__["CASES"], "casts", broken)
    rows = bench(tmp_path, "casts", "host")
    casts, host = of_kind(rows, "section")
    assert (casts["status"], casts["reason"]) == ("failed", "out of memory")
    assert host["status"] == "done"


def test_an_interruption_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(session: Session) -> None:
        session.measured({"kind": "host", "rival": "bf16"}, {"us": 1.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(run_bench.__globals__["CASES"], "host", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path, "host")
    rows, broken = read_jsonl(tmp_path / "record.jsonl")
    assert broken == 0
    assert [row["kind"] for row in rows] == ["run", "host", "section"]
    assert rows[-1]["status"] == "interrupted"


def test_what_the_time_limit_leaves_out_is_a_row(tmp_path: Path) -> None:
    rows = bench(tmp_path, "linear", time_limit_s=1e-6)
    (row,) = of_kind(rows, "linear")
    assert row["status"] == "skipped"
    assert "time limit" in row["reason"]


class RefusesToCapture:
    """A timer of graphs on a device that captures nothing."""

    method = "CUDA graph replay"
    asked = 0

    def prepare(self, calls: Sequence[Call]) -> Measure:
        self.asked += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_a_peer_that_cannot_be_captured_is_measured_by_its_kernels_and_so_are_its_rivals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's part is played: kernels are timed by the wall clock."""

    class Kernels(WallTimer):
        method = KernelTimer.method

    class Graphs(WallTimer):
        method = "CUDA graph replay"

    refuses = RefusesToCapture()
    session = Session(BenchSettings(out=tmp_path, device="cpu"), BenchRecord(tmp_path / "r.jsonl"), timer=Graphs())
    session.on_gpu = True
    monkeypatch.setattr(Session, "synchronise", lambda self: None)
    monkeypatch.setattr(Session, "release", lambda self: None)
    monkeypatch.setattr(linear_case, "KernelTimer", Kernels)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    real = linear_case._timer

    def timer(session: Session, key: str, *rest: Any) -> Any:
        if not key.startswith("te"):
            return real(session, key, *rest)
        session.timer, before = refuses, session.timer
        try:
            return real(session, key, *rest)
        finally:
            session.timer = before

    monkeypatch.setattr(linear_case, "_timer", timer)
    rivals = [Rival("bf16", "torch", "", plain), Rival("te-delayed", "te", "delayed", plain)]
    for _ in range(2):
        linear_case._measure_shape(session, (32, 16, 16), rivals)
    rows = session.record.rows
    methods = {row["rival"]: row["method"] for row in rows if row["status"] == "measured"}
    assert methods["te-delayed"] == methods["bf16-kernels"] == KernelTimer.method
    assert methods["bf16"] == "CUDA graph replay"
    assert "te-delayed-kernels" not in methods
    assert refuses.asked == 1  # at the second shape it is known


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_records_of_one_device_are_joined_section_by_section(tmp_path: Path) -> None:
    run = {"kind": "run", "device_name": "A"}
    copy = {"kind": "ceiling", "name": "copy", "per_s": 1}
    bf16 = {"kind": "ceiling", "name": "bf16", "per_s": 2}
    old, new = {"kind": "linear", "rival": "old"}, {"kind": "linear", "rival": "new"}
    vit, llama = {"kind": "step", "model": "vit", "rival": "a"}, {"kind": "step", "model": "llama", "rival": "b"}
    first = write(tmp_path / "a.jsonl", [run, copy, bf16, old, vit, {"kind": "target", "what": "x"}])
    second = write(tmp_path / "b.jsonl", [run | {"date": "later"}, copy | {"per_s": 3}, new, llama])
    joined = joined_records([first, second])
    assert joined[0]["date"] == "later"
    assert joined[1:] == [bf16, vit, copy | {"per_s": 3}, new, llama]  # no ratio spans two runs
    other = write(tmp_path / "c.jsonl", [run | {"device_name": "B"}])
    with pytest.raises(ValueError, match="different devices, which are not compared: A, B"):
        joined_records([first, other])


def test_targets_are_judged_anew(tmp_path: Path) -> None:
    rows = with_targets([{"kind": "run", "native_fp8": True}, {"kind": "target", "what": "of an older version"}])
    assert all(row.get("derivation") for row in rows if row["kind"] == "target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("kernels",)}, "--only names 'kernels', which is unknown; choose from ceilings"),
        ({"models": ()}, "--models names nothing"),
        ({"variants": ("fp8",)}, "--variants names 'fp8', which is unknown"),
        ({"device": "tpu"}, "device 'tpu' is unknown; choose cpu, cuda, or cuda:N"),
        ({"time_limit_s": 0.0}, "must be positive"),
        ({"memory_limit_gib": -1.0}, "must be positive"),
        ({"memory_limit_gib": float("nan")}, "positive and finite"),
    ],
)
def test_wrong_settings_are_refused_with_the_remedy(tmp_path: Path, changes: Row, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchSettings(**({"out": tmp_path, "device": "cpu"} | changes))


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device here; choose --device cpu"):
        BenchSettings(out=tmp_path, device="cuda")


def test_the_record_says_where_a_section_s_time_went(tmp_path: Path) -> None:
    rows = bench(tmp_path, "ceilings", "casts", "linear", "host")
    spent = {row["name"]: row["spent"] for row in of_kind(rows, "section")}
    assert {name: set(parts) for name, parts in spent.items()} == {
        "ceilings": {"copy", "products"},
        "casts": {"copy", "casts"},
        "linear": {"copy", "products alone", "torch", "octavo", "measuring"},
        "host": {"torch", "octavo", "measuring"},
    }
    for row in of_kind(rows, "section"):
        assert 0 < sum(row["spent"].values()) <= row["seconds"] + 0.01, row  # each is rounded to a millisecond


def test_a_layer_that_compiles_long_is_left_out_and_every_shape_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shape has its share of the time, and what the last layer of a library took tells whether another fits."""
    clock = [0.0]

    def compiled(linear: torch.nn.Linear) -> Built:
        clock[0] += 32.0
        return plain(linear)

    rivals = [
        Rival("bf16", "torch", "", plain),
        Rival("torchao-rowwise-compiled", "torchao", "rowwise", compiled),
        Rival("torchao-tensorwise-compiled", "torchao", "tensorwise", compiled),
    ]
    monkeypatch.setattr(linear_case, "linear_rivals", lambda device: rivals)
    monkeypatch.setattr(linear_case, "load_compiler", lambda device: None)
    monkeypatch.setattr(linear_case.time, "monotonic", lambda: clock[0])
    settings = BenchSettings(out=tmp_path, device="cpu")
    session = Session(settings, BenchRecord(settings.record_path), deadline=Deadline(110.0, lambda: clock[0]))
    session.shapes = session.shapes._replace(linears=((32, 16, 16), (32, 16, 32), (32, 32, 16)))
    linear_case.measure_linears(session)
    rows = of_kind(session.record.rows, "linear", rival="bf16")
    assert [row["status"] for row in rows] == ["measured"] * 3
    # 110 s: 3 of 5 parts are 66 s, of which the first takes 32 and leaves less than the second needs, 32 and 6 to
    # measure. 78 s are left for two shapes: 39 s each, of which one takes 32.
    found = {(tuple(row["shape"]), row["rival"]): row["status"] for row in session.record.rows if "rival" in row}
    for shape in session.shapes.linears:
        assert found[shape, "torchao-rowwise-compiled"] == "measured"
        assert found[shape, "torchao-tensorwise-compiled"] == "skipped"
    (built,) = {row["build_s"] for row in session.record.rows if row.get("recipe") == "rowwise" and "build_s" in row}
    assert built == 32.0


def test_the_deadline_is_shared_out_by_section(tmp_path: Path) -> None:
    """A case that does not fit is a row; one that does may begin."""
    settings = BenchSettings(out=tmp_path, device="cpu")
    session = Session(settings, BenchRecord(settings.record_path), deadline=Deadline(100.0, lambda: 0.0))
    assert session.fits({"kind": "a"}, 99.0)
    assert not session.fits({"kind": "a", "rival": "b"}, 101.0)
    (row,) = session.record.rows
    assert row["reason"] == "time limit: 100 s left for this section, about 101 s needed"
