from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.cli.app import app
from octavo.conversion import expected_gain

run = CliRunner()
SHAPE = ["advise", "--device", "h200", "--tokens", "8192", "--in", "1280", "--out", "5120"]
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 96,
}


@pytest.fixture
def source(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    return str(tmp_path)


def test_a_shape_is_answered_with_a_table_and_a_verdict() -> None:
    result = run.invoke(app, [*SHAPE, "--no-bias"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Linear, 8192 tokens, 1280 -> 5120, without bias: forward and backward, GPU time")
    gain = expected_gain(1280, 5120, 8192)
    assert f"- FP8 gains: {gain:.2f}x BF16's speed with delayed scaling" in result.stdout
    assert "measured: NVIDIA H200 700 W" in result.stdout
    assert result.stderr == ""


def test_json_has_the_same_figures_and_nothing_else() -> None:
    result = run.invoke(app, [*SHAPE, "--json", "--recipe", "delayed,block"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["tokens"], data["in_features"], data["out_features"], data["bias"]) == (8192, 1280, 5120, True)
    assert [one["recipe"] for one in data["methods"]] == ["delayed", "block"]
    assert data["methods"][0]["gain"] == pytest.approx(data["bf16_us"] / data["methods"][0]["fp8_us"])
    assert data["sentences"][0].startswith("FP8 gains")


def test_weights_cast_again_are_an_option() -> None:
    plain, again = (
        json.loads(run.invoke(app, [*SHAPE, "--json", *more]).stdout)
        for more in ([], ["--saved-weight", "high_precision"])
    )
    assert all(a["gain"] < b["gain"] for a, b in zip(again["methods"], plain["methods"], strict=True))
    refused = run.invoke(app, [*SHAPE, "--saved-weight", "bf16"])
    assert refused.exit_code == 2
    assert "--saved-weight 'bf16' is unknown" in refused.stderr


def test_a_model_is_answered_with_layers_memory_and_sentences(source: str) -> None:
    result = run.invoke(app, ["advise", "--device", "h200", "--model", source, "--batch", "2"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for text in (
        "batch 2 of 64 tokens, autocast, adamw, on H200",
        "transformer.h.*.attn.c_attn",
        "weights, float32: the masters",
        "about, in all",
        "largest batch in 140.4 GiB",
        "- Do not use FP8 here for speed",
    ):
        assert text in result.stdout
    assert result.stderr == ""


def lines_of(source: str, width: str, *more: str) -> list[str]:
    command = ["advise", "--device", "h200", "--model", source, "--batch", "2", "--exclude", "c_attn", *more]
    result = run.invoke(app, command, env={"COLUMNS": width})
    assert result.exit_code == 0, result.output
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.mark.parametrize("width", ["", "80", "60"])
def test_reasons_stand_below_the_table_at_any_width(source: str, width: str) -> None:
    lines = lines_of(source, width)
    said = " ".join(lines)
    assert "transformer.h.*.attn.c_attn stays in BF16: excluded by 'c_attn'." in said
    assert "In brackets: what a Linear would gain that stays in BF16 with that recipe." in said
    head = next(line for line in lines if line.startswith("Linears"))
    assert head.split()[-4:] == ["delayed", "current", "rowwise", "block"]
    assert "…" not in said
    if width:
        assert max(len(line) for line in lines) <= int(width)


def test_a_narrow_terminal_loses_columns_of_sizes_and_says_which(source: str) -> None:
    assert "Linears count in out tokens delayed" in " ".join(" ".join(lines_of(source, "")).split())
    said = " ".join(lines_of(source, "60"))
    assert re.search(r"Without (\w+, )*(\w+ and )?tokens, for want of width", said)
    assert "for want of width" not in " ".join(lines_of(source, ""))


def test_gains_of_what_is_left_out_stand_in_brackets(source: str) -> None:
    row = next(line for line in lines_of(source, "") if "c_attn" in line and "x)" in line)
    assert len([cell for cell in row.split() if cell.startswith("(") and cell.endswith("x)")]) == 4
    total = next(line for line in lines_of(source, "") if line.startswith("all together"))
    assert "(" not in total


def test_the_page_s_example_is_what_the_command_prints() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "advise.md").read_text(encoding="utf-8")
    example = page.split("## One Linear", 1)[1].split("```")[1].strip("\n").splitlines()
    shown = run.invoke(app, [*SHAPE, "--no-bias"], env={"COLUMNS": ""}).stdout.splitlines()
    assert [line.rstrip() for line in shown[: len(example)]] == example
    assert len(example) == 6


def test_a_models_json_itemises_bytes(source: str) -> None:
    command = ["advise", "--device", "h100", "--memory", "40", "--model", source, "--batch", "2", "--sequence", "32"]
    options = ["--precision", "bf16", "--optimizer", "sgd", "--exclude", "c_attn", "--exclude", "lm_head", "--json"]
    result = run.invoke(app, [*command, *options])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["card"], data["memory_gib"], data["precision"], data["sequence"]) == ("H100", 40.0, "bf16", 32)
    assert set(data["memory"]) == {"bf16", "delayed", "current", "rowwise", "block"}
    memory = data["memory"]["bf16"]
    assert memory["weights, bf16, without masters"] == 2 * data["parameters"]
    assert memory["total"] == sum(size for name, size in memory.items() if name not in ("total", "fits"))
    assert memory["fits"] is True
    reasons = {group["name"]: group["reason"] for group in data["layers"]}
    assert reasons["lm_head"] == "excluded by 'lm_head'"
    assert reasons["transformer.h.*.attn.c_attn"] == "excluded by 'c_attn'"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--tokens, --in, --out missing: give --tokens, --in and --out of a Linear, or --model"),
        (["--tokens", "8"], "--in, --out missing"),
        (["--tokens", "8", "--in", "8", "--out", "0"], "--out 0: a size is 1 or more"),
        (["--tokens", "8", "--in", "8", "--out", "8", "--batch", "2"], "--batch goes with --model"),
        (["--tokens", "8", "--in", "8", "--out", "8", "--memory", "2"], "--memory goes with --model"),
        (["--model", "x", "--tokens", "8"], "--tokens describes one Linear: leave it out with --model"),
        (["--model", "x", "--no-bias"], "--no-bias describes one Linear: leave it out with --model"),
        (["--model", "no-such-model"], "--model no-such-model: no such folder or config.json"),
        (["--tokens", "8", "--in", "8", "--out", "8", "--recipe", "mx"], "--recipe names 'mx', which is unknown"),
        (["--tokens", "8", "--in", "8", "--out", "8", "--device", "tpu"], "--device 'tpu' is unknown"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_one_line(options: list[str], message: str) -> None:
    result = run.invoke(app, ["advise", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_help_shows_examples_and_exit_codes() -> None:
    text = " ".join(run.invoke(app, ["advise", "--help"]).stdout.split())
    assert "octavo advise --tokens 8192 --in 1280 --out 5120" in text
    assert "Exit codes: 0 done, 2 wrong usage." in text
