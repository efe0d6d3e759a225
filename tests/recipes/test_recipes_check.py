"""benchmarks/check_recipes.py: what it compares, what it lets pass, and a few steps of it on a CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import check_recipes, recipe_runs, recipe_table, training_model
from benchmarks.recipe_runs import Extent
from tests.study.conftest import WORDS

from octavo.runtime import GemmCount
from octavo.study.documents import SPLITS, Corpus, Document

Row = dict[str, Any]


def run_of(recipe: str, seed: int, perplexity: float, **other: Any) -> Row:
    about: Row = {"hardware": "one", "steps": 10, "batch": 4, "validation_tokens": 128, "measured_alone": False}
    figures = {"perplexity": perplexity, "tokens_per_s": 1000.0, "peak_memory_bytes": None, "execution": "emulated"}
    return about | {"check": "run", "recipe": recipe, "seed": seed, "ok": True} | figures | other


def written(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


BASELINE = [run_of("bf16", 0, 100.0), run_of("bf16", 1, 104.0)]


@pytest.mark.parametrize(("off", "status"), [(1.009, 0), (1.011, 1), (0.991, 0), (0.989, 1), (float("nan"), 1)])
def test_a_mean_perplexity_off_by_more_than_one_per_cent_fails(off: float, status: int, tmp_path: Path) -> None:
    own = [run_of("block", 0, 100.0 * off), run_of("block", 1, 104.0 * off)]
    files = [written(tmp_path / "a.jsonl", BASELINE), written(tmp_path / "b.jsonl", own)]
    out = tmp_path / "joined.jsonl"
    assert check_recipes.main(["--out", str(out), "--join", *map(str, files)]) == status
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    (summary,) = [row for row in rows if row["check"] == "recipe" and row["recipe"] == "block"]
    assert summary["seeds"] == [0, 1]
    assert summary["bf16_spread"] == pytest.approx(4 / 102)
    if off == off:
        assert summary["ratio"] == pytest.approx(off)
        assert [row["against_bf16"] for row in rows if row["check"] == "run"] == pytest.approx([1.0, 1.0, off, off])


@pytest.mark.parametrize("arguments", [("--steps", "0"), ("--batch", "-1"), ("--steps", "many")], ids=" ".join)
def test_a_run_without_a_step_is_refused_at_the_command_line(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        check_recipes.parsed([*arguments])
    assert f"argument {arguments[0]}: '{arguments[1]}': expected an integer of 1 or more" in capsys.readouterr().err
    assert check_recipes.parsed(["--steps", "1", "--batch", "2"]).steps == 1


def test_a_run_that_failed_fails_the_whole(tmp_path: Path) -> None:
    failed = {key: value for key, value in run_of("block", 0, 0.0, ok=False).items() if key != "perplexity"}
    file = written(tmp_path / "a.jsonl", [*BASELINE, failed])
    assert check_recipes.main(["--out", str(tmp_path / "joined.jsonl"), "--join", str(file)]) == 1


def test_only_runs_of_one_machine_extent_and_seed_are_compared() -> None:
    strangers = [run_of("block", 0, 300.0, hardware="two"), run_of("block", 0, 300.0, steps=20)]
    rows = recipe_table.joined([*BASELINE, *strangers, run_of("block", 1, 104.0), run_of("block", 2, 300.0)])
    (summary,) = [row for row in rows if row["check"] == "recipe" and row["recipe"] == "block"]
    assert (summary["seeds"], summary["ratio"]) == ([1], 1.0)
    assert [row for row in rows if row.get("perplexity") == 300.0 and "against_bf16" in row] == []


def test_the_table_says_what_was_not_measured_alone() -> None:
    runs = [*BASELINE, run_of("block", 0, 101.0), run_of("block", 1, 103.98)]
    shown = recipe_table.table(runs)
    head = "| recipe | perplexity, mean of 2 seeds | against BF16 |"
    assert f"one, 10 steps of 4 sequences:\n\n{head} tokens/s, other work beside it | native or emulated |" in shown
    assert "| BF16 | 102.00 | — | 1,000 | emulated |" in shown
    assert "| `BlockScaling()` | 102.49 | +0.48 % | 1,000 | emulated |" in shown


def test_the_table_takes_speeds_of_runs_that_had_the_machine_alone() -> None:
    runs = [*BASELINE, run_of("block", 0, 101.0), run_of("block", 1, 103.98)]
    short = {"steps": 1, "measured_alone": True, "perplexity": 500.0}
    alone = [run_of(name, 0, 1.0) | short | {"tokens_per_s": speed} for name, speed in (("bf16", 7e3), ("block", 3e3))]
    shown = recipe_table.table([*runs, *alone])
    assert shown.count("steps of") == 1, "short runs have no table of their own"
    assert "| tokens/s, alone |" in shown
    assert "| BF16 | 102.00 | — | 7,000 | emulated |" in shown
    # Of one recipe alone there is no speed to compare with the others'.
    assert "| tokens/s, other work beside it |" in recipe_table.table([*runs, *alone[:1]])


def test_what_ran_is_what_the_library_counted() -> None:
    count = GemmCount()
    assert recipe_runs.execution(count) == "high precision"
    for gemm in ("fprop", "dgrad", "wgrad"):
        count.add("a", gemm, "fp8")
    assert recipe_runs.execution(count) == "native"
    count.add("b", "dgrad", "fp8 emulated")
    assert recipe_runs.execution(count) == "native, dgrad fp8 and fp8 emulated"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A text that takes no time to read, few tokens of it, and the number of threads as it was."""
    source = random.Random(0)
    words = {split: " ".join(source.choices(WORDS, k=800)) for split in SPLITS}
    corpus = Corpus("words", "test", tuple(Document(split, text, split) for split, text in words.items()))
    monkeypatch.setattr(training_model, "load_corpus", lambda name: corpus)
    monkeypatch.setitem(
        check_recipes.EXTENTS, "cpu", Extent(steps=4, batch=1, learning_rate=1e-3, validation_tokens=256)
    )
    threads = torch.get_num_threads()
    training_model.token_streams.cache_clear()
    yield
    training_model.token_streams.cache_clear()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("small")
def test_a_few_steps_of_each_way_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    names = ["static", "delayed", "custom", "bf16_perturbed", "bf16"]
    options = ["--device", "cpu", "--seeds", "0", "--recipes", *names]
    assert check_recipes.main([*options, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    runs = {row["recipe"]: row for row in rows if row["check"] == "run"}
    assert list(runs) == ["bf16", *names[:-1]]
    assert {name: row["execution"] for name, row in runs.items()} == {
        "bf16": "high precision",
        "bf16_perturbed": "high precision",
        "static": "emulated",
        "delayed": "emulated",
        "custom": "emulated, wgrad high precision",
    }
    assert "after 1 steps in BF16" in runs["static"]["note"]
    # FP8 changes each perplexity, and in four steps hardly.
    assert len({row["perplexity"] for row in runs.values()}) == 5
    assert all(abs(row["against_bf16"] - 1) < 0.01 for row in runs.values())
