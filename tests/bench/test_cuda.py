"""What only a GPU can show: graphs and kernel times measure the same work, and a captured step trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench import BenchSettings, run_bench
from octavo.bench.cases.steps import step_figures
from octavo.bench.cuda_graphs import CudaGraphs, KernelTimer, l2_bytes
from octavo.bench.models import CASES
from octavo.bench.record import BenchRecord
from octavo.bench.session import Session
from octavo.bench.timing import GraphTimer, interleaved
from octavo.bench.training import prepare_training
from octavo.bench.variants import parse_variant
from octavo.kernels.scaled_mm import blockwise

pytestmark = pytest.mark.gpu


def test_a_replay_does_the_work_and_both_methods_agree_on_its_time() -> None:
    # A copy of 256 MiB: one kernel of more than 0.05 ms, so that gaps and events are below a tenth of it.
    source = torch.randn(1 << 26, device="cuda")
    target = torch.zeros_like(source)
    graph = GraphTimer(CudaGraphs()).prepare([lambda: target.copy_(source)])
    target.zero_()
    timings = interleaved({"graph": graph}, 9) | interleaved(
        {"kernels": KernelTimer().prepare([lambda: target.copy_(source)])}, 5
    )
    assert torch.equal(source, target)
    assert timings["graph"].median == pytest.approx(timings["kernels"].median, rel=0.2)
    assert timings["graph"].median > 2 * source.nbytes / 20e12  # no card copies 20 TB/s


def test_ceilings_hold_block_products_and_no_copy_beside_a_cast_is_much_faster(tmp_path: Path) -> None:
    rows = run_bench(BenchSettings(out=tmp_path, device="cuda", quick=True, only=("ceilings", "casts")), command=[])
    if not blockwise.device_reasons(torch.device("cuda", 0)):
        blocks = [row for row in rows if row["kind"] == "ceiling" and row["name"] == "fp8_block"]
        assert [row["status"] for row in blocks] == ["measured"] * len(blocks)
    copies = [row["per_s"] for row in rows if row["kind"] == "ceiling" and row["name"] == "copy"]
    # The same matrices and the same call: 5 % is more than two medians of one run differ by (2 % were seen).
    assert max(row["per_s"] for row in rows if row["kind"] == "cast" and row["name"] == "copy") < 1.05 * max(copies)


def test_the_cache_has_a_size() -> None:
    assert l2_bytes(torch.device("cuda")) > 1 << 20


@pytest.mark.parametrize("key", ["bf16-captured", "octavo-delayed-captured"])
def test_a_captured_step_trains(key: str) -> None:
    pytest.importorskip("transformers")
    # Wide enough for FP8 to gain: narrower layers are left as they are on a GPU.
    small = {"vocabulary": 64, "width": 2048, "layers": 1, "heads": 16, "tokens": 64}
    case, device = replace(CASES["gpt2"], small=small), torch.device("cuda")
    training = prepare_training(case, parse_variant(key), small=True, samples=2, device=device, seed=0)
    training.step()
    first = float(training.loss())
    for _ in range(30):
        training.step()
    assert float(training.loss()) < first


def test_memory_is_that_of_one_model_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    settings = BenchSettings(out=tmp_path, device="cuda", quick=True)
    session = Session(settings, BenchRecord(settings.record_path))
    figures = [step_figures(session, CASES["gpt2"], parse_variant("bf16"), 2) for _ in range(2)]
    # The second model comes after the first is gone: the same peak but for what the allocator rounds.
    assert figures[1]["peak_gib"] == pytest.approx(figures[0]["peak_gib"], rel=0.02)


@pytest.mark.slow
def test_a_quick_run_measures_by_graphs(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = run_bench(
        BenchSettings(out=tmp_path, device="cuda", quick=True, only=("casts", "linear", "host")), command=[]
    )
    octavo = [
        row for row in rows if row["kind"] == "linear" and row["library"] == "octavo" and row["recipe"] != "block"
    ]
    assert octavo
    assert {row["status"] for row in octavo} == {"measured"}
    assert {row["method"] for row in octavo} >= {"CUDA graph replay"}
    assert all(0 < row["of_copy"] < 1.2 for row in rows if row["kind"] == "cast" and row["name"] == "delayed")
