from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from tests.bench import rows as made

from octavo.bench import with_targets
from octavo.bench.derived import restated
from octavo.report.bench_inference import inference_tables
from octavo.report.bench_page import render_bench
from octavo.report.bench_rivals import look
from octavo.report.bench_terminal import bench_summary
from octavo.report.record import Record


def record() -> list[dict[str, Any]]:
    peer = {"kind": "inference", "model": "llama", "rival": "te-current", "library": "te", "recipe": "current"}
    rows = [made.run(), peer | {"status": "skipped", "reason": "Transformer Engine is not installed"}]
    rows += [made.served("bf16", 15.0), made.served("octavo-tensor_static", 10.0), made.served("bf16-again", 15.3)]
    rows += [made.served("torchao-rowwise", None)]
    rows += [made.served("bf16", 2.0, "decode", batch=32, tokens=256)]
    rows += [made.served("bf16", 1000.0, "loading", batch=1, tokens=0, per_s=4e9, unit="B/s")]
    return restated(rows)


def test_a_model_has_a_table_for_each_phase() -> None:
    lacking, prefill, decoding, loading = inference_tables(Record(record()))
    assert prefill.caption == "Llama-3-8B's widths, 8 layers: prefill"
    assert (lacking.rows, lacking.notes) == ([], ["TE current: skipped: Transformer Engine is not installed"])
    names = [column.name.replace("\u00a0", " ") for column in prefill.columns]
    rows = {row[1].text: dict(zip(names, [cell.text.replace("\u00a0", " ") for cell in row], strict=True))
            for row in prefill.rows}  # fmt: skip
    static = rows["Octavo tensor, static"]
    assert (static["Form"], static["Time ms"], static["Speed BF16 = 1"]) == ("1 × 2048, replayed", "10.0", "1.50×")
    assert (static["Model"], static["Peak memory GiB"], static["FP8 layers"]) == ("1.86 GiB", "5.00", "56")
    assert "The same twice, 1 × 2048, replayed: BF16 differs by +2.0\u00a0%, which is noise." in prefill.notes
    assert any("torchao row-wise: failed: RuntimeError: no kernel image" in note for note in prefill.notes)
    assert decoding.rows[0][0].text == "32 after 256, replayed"
    assert "4.00\u00a0GB/s" in [cell.text for cell in loading.rows[0]]


def test_a_model_that_is_not_served_says_why() -> None:
    row = {"kind": "inference", "model": "gpt2", "status": "skipped", "reason": "transformers is not installed"}
    (table,) = inference_tables(Record([row]))
    assert (table.rows, table.notes) == ([], ["the model: skipped: transformers is not installed"])


def test_page_and_terminal_show_served_models_and_what_is_asked_of_them() -> None:
    rows = with_targets(record())
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(bench_summary(rows))
    for shown in (render_bench(rows), console.export_text()):
        assert "Llama-3-8B's widths, 8 layers: prefill".replace("'", "&#39;") in shown or (
            "Llama-3-8B's widths, 8 layers: prefill" in shown
        )
        assert "Llama layers, prefill" in shown
        assert "1 x 2048 1.500x (10 against 15 ms)" in shown


def test_fp16_has_its_name() -> None:
    assert look("fp16").label == "FP16"
    assert look("octavo-tensor_dynamic").label == "Octavo tensor, dynamic"
