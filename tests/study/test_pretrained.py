from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from octavo.study import StudySettings, run_study
from octavo.study.pretrained import PretrainedError, check_checkpoint, load_pretrained
from octavo.study.serving import linear_layers
from octavo.study.tokenizer import END_OF_TEXT, train_encoder
from tests.study.conftest import WORDS

transformers = pytest.importorskip("transformers")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    encoder = train_encoder([" ".join(WORDS)] * 9, 300)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=encoder.tokenizer, eos_token=END_OF_TEXT)
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, n_positions=64, vocab_size=encoder.vocab_size)
    torch.manual_seed(0)
    folder = tmp_path / "checkpoint"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def test_the_wrapped_model_computes_what_transformers_computes(checkpoint: Path) -> None:
    tokens = torch.randint(250, (2, 16))
    original = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    wrapped = load_pretrained(checkpoint).eval()
    assert wrapped.head_name == "model.lm_head"
    assert len(linear_layers(wrapped)) == 8  # all of them were Conv1D
    with torch.no_grad():
        expected = original(tokens).logits
        torch.testing.assert_close(wrapped(tokens), expected)
        cache = wrapped.new_cache(2)
        parts = [wrapped(part, cache) for part in tokens.split([9, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_a_checkpoint_is_studied_as_it_is(checkpoint: Path, micro_settings: StudySettings) -> None:
    settings = dataclasses.replace(micro_settings, model_dir=checkpoint, methods=("rowwise", "int8"), finetune_steps=1)
    rows = run_study(settings)
    assert [row["method"] for row in rows if row["kind"] == "ptq"] == ["bf16", "rowwise", "int8"]
    assert not [row for row in rows if row["kind"] == "train_step" and row["phase"] == "baseline"]
    model = next(row for row in rows if row["kind"] == "model")
    assert (model["preset"], model["layers"], model["context"]) == ("checkpoint", 2, 32)
    note = next(row["note"] for row in rows if row["kind"] == "phase" and row["name"] == "baseline")
    assert "as it is" in note


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PretrainedError, match=r"no config\.json there"):
        check_checkpoint(tmp_path)
