"""Advice for a model: built from a config alone, itemised, and judged by the model of the card."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.bench.advice import AdviceError, ModelAdvice, Question, card_named, methods_named, model_advice
from octavo.bench.advice.memory import Memory
from octavo.conversion.card import GIB
from octavo.conversion.gain import METHODS, bf16_seconds, expected_gain, fp8_seconds

pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "vocab_size": 96,
}
# Wide enough that FP8 gains, and a head whose vocabulary is a multiple of 16.
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "vocab_size": 32000,
}
VIT = {
    "model_type": "vit",
    "architectures": ["ViTForImageClassification"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "model"


def written(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def advice(
    source: str, recipe: str | None = None, memory: float | None = None, saved_weight: str = "fp8", **asked: Any
) -> ModelAdvice:
    return model_advice(Question(source, **asked), card_named("h200", memory), methods_named(recipe, saved_weight))


def of(answer: ModelAdvice, recipe: str) -> Memory:
    [found] = [one for one in answer.memory if one.recipe == recipe]
    return found


def test_parameters_optimizer_and_gradients_are_counted_exactly(folder: Path) -> None:
    source = written(folder, GPT2)
    # Embeddings 96 and 128 x 64; a block has 4 + 8 times 64^2, biases of 9 x 64, norms of 4 x 64; a last norm.
    parameters = (96 + 128) * 64 + 3 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    answer = advice(source, "delayed", batch=2)
    assert (answer.parameters, answer.sequence, answer.batch) == (parameters, 128, 2)
    items = dict(of(answer, "bf16").items)
    assert items["weights, float32: the masters"] == 4 * parameters
    assert items["optimizer states (adamw)"] == 8 * parameters
    assert items["gradients"] == 4 * parameters
    assert items["bf16 copies of weights"] == 2 * (3 * (12 * 64 * 64 + 9 * 64) + 96 * 64) - 2 * 3 * 9 * 64
    small = dict(of(advice(source, "delayed", precision="bf16", optimizer="sgd"), "bf16").items)
    assert small["weights, bf16, without masters"] == 2 * parameters
    assert (small["optimizer states (sgd)"], small["gradients"]) == (0, 2 * parameters)
    assert small["bf16 copies of weights"] == 0


def test_a_model_that_is_too_small_is_left_alone(folder: Path) -> None:
    answer = advice(written(folder, GPT2), batch=2)
    assert not any(group.converted for group in answer.layers)
    assert {group.name: group.count for group in answer.layers} == {
        "transformer.h.*.attn.c_attn": 3,
        "transformer.h.*.attn.c_proj": 3,
        "transformer.h.*.mlp.c_fc": 3,
        "transformer.h.*.mlp.c_proj": 3,
        "lm_head": 1,
    }
    assert answer.fp8_ms == dict.fromkeys(METHODS, answer.bf16_ms)
    assert {one.total for one in answer.memory[:1]} == {of(answer, "current").total}
    said = " ".join(answer.sentences)
    assert "Do not use FP8 here for speed" in said
    assert "Too narrow ever to gain" in said
    assert "Do not expect a gain in eager mode" in said
    assert "Nothing is converted, so memory stays what it is" in said


def test_a_wide_model_gains_and_keeps_a_byte_an_element(folder: Path) -> None:
    answer = advice(written(folder, LLAMA), batch=2, sequence=2048)
    groups = {group.name: group for group in answer.layers}
    up = groups["model.layers.*.mlp.up_proj"]
    assert (up.count, up.in_features, up.out_features, up.tokens) == (2, 2048, 8192, 4096)
    assert up.converted == tuple(METHODS)
    assert up.gains["block"] == pytest.approx(
        expected_gain(2048, 8192, 4096, method=METHODS["block"], float32_weight=True)
    )
    tokens, items = 2 * 2048, dict(of(answer, "delayed").items)
    # x of q, k, v (one for the three), of o, of gate and up (one for both), of down; and of the head, once.
    scales = 4 * (2 * 4 + 1)
    assert items["FP8 codes of inputs"] == tokens * (2 * (2048 + 2048 + 2048 + 8192) + 2048) + scales
    linear = 2 * (4 * 2048 * 2048 + 3 * 2048 * 8192) + 2048 * 32000
    assert items["FP8 codes of weights"] == linear + 4 * 15
    assert items["amax histories and scales"] == 15 * 3 * 4 * 1025
    assert dict(of(answer, "bf16").items)["bf16 copies of weights"] == 2 * linear
    assert of(answer, "delayed").total < of(answer, "bf16").total
    assert answer.sentences[0].startswith("FP8 gains: the Linears take ")
    best = min(answer.fp8_ms, key=lambda name: answer.fp8_ms[name])
    bf16, own = (f"{of(answer, name).total / GIB:.2f} GiB" for name in ("bf16", best))
    (said,) = [sentence for sentence in answer.sentences if sentence.startswith("Memory: ")]
    assert said.startswith(f"Memory: with {best} scaling a step needs about {own} instead of {bf16}")
    batches = f"{answer.largest_batch['bf16']} in BF16 and {answer.largest_batch[best]} with {best} scaling"
    assert any(batches in sentence for sentence in answer.sentences)


def test_the_time_of_a_step_is_the_sum_of_its_linears(folder: Path) -> None:
    answer = advice(written(folder, LLAMA), "delayed", batch=2, sequence=2048)
    shapes = [(2048, 2048)] * 4 + [(2048, 8192)] * 2 + [(8192, 2048)]
    high = 2 * sum(bf16_seconds(4096, k, n, float32_weight=True) for k, n in shapes)
    low = 2 * sum(
        min(
            bf16_seconds(4096, k, n, float32_weight=True),
            fp8_seconds(METHODS["delayed"], 4096, k, n, float32_weight=True),
        )
        for k, n in shapes
    )
    head_high = bf16_seconds(4096, 2048, 32000, float32_weight=True)
    head_low = fp8_seconds(METHODS["delayed"], 4096, 2048, 32000, float32_weight=True)
    assert answer.bf16_ms == pytest.approx((high + head_high) * 1e3)
    assert answer.fp8_ms["delayed"] == pytest.approx((low + head_low) * 1e3)
    [sentence] = [one for one in answer.sentences if one.startswith("The head, lm_head, is ")]
    assert f"exclude=['lm_head'] the gain is {(high + head_high) / (low + head_high):.2f}x" in sentence


def test_what_is_excluded_stays_in_bf16_and_costs_so(folder: Path) -> None:
    source = written(folder, LLAMA)
    answer = advice(source, "delayed", exclude=("lm_head",), batch=2)
    [head] = [group for group in answer.layers if group.name == "lm_head"]
    assert (head.converted, head.reason) == ((), "excluded by 'lm_head'")
    assert answer.fp8_ms["delayed"] > advice(source, "delayed", batch=2).fp8_ms["delayed"]
    assert dict(of(answer, "delayed").items)["bf16 copies of weights"] == 2 * 2048 * 32000


def test_what_fits_follows_from_the_memory(folder: Path) -> None:
    source = written(folder, LLAMA)
    roomy = advice(source, "delayed", batch=4)
    bf16, fp8 = of(roomy, "bf16"), of(roomy, "delayed")
    assert "It fits into 140.4 GiB" in " ".join(roomy.sentences)
    for one in (bf16, fp8):
        most = roomy.largest_batch[one.recipe]
        fixed, each = one.total - one.grows, one.grows / 4
        assert fixed + most * each <= (140.4 - 1) * GIB < fixed + (most + 1) * each
    between = (bf16.total + fp8.total) / 2 / GIB + 1
    assert "this batch fits in FP8 only" in " ".join(advice(source, "delayed", between, batch=4).sentences)
    less = (fp8.total - fp8.grows / 4) / GIB + 1
    assert f"does not fit into {less:.4g} GiB" in " ".join(advice(source, "delayed", less, batch=4).sentences)
    assert "Not even one sample fits" in " ".join(advice(source, "delayed", 2.0, batch=4).sentences)


def test_memory_grows_with_the_batch_as_it_says(folder: Path) -> None:
    source = written(folder, LLAMA)
    two, four = (of(advice(source, "current", batch=batch), "current") for batch in (4, 8))
    # But for a scale a tensor, and rotary angles, which all samples share: 4 bytes for 128 of 2048 features.
    assert four.total - two.total == pytest.approx(two.grows, rel=1e-3)


def test_bf16_parameters_say_what_is_missing(folder: Path) -> None:
    answer = advice(written(folder, LLAMA), batch=1, sequence=128, precision="bf16")
    assert "no float32 masters" in answer.sentences[-1]
    # With 128 tokens codes of the weights outweigh what is saved.
    assert any("FP8 saves no memory here" in one or "Nothing is converted" in one for one in answer.sentences)


def test_images_have_the_tokens_of_their_size(folder: Path) -> None:
    source = written(folder, VIT)
    answer = advice(source, "delayed", batch=3)
    assert answer.sequence is None
    tokens = {group.name: group.tokens for group in answer.layers}
    assert tokens["classifier"] == 3
    assert tokens["vit.layers.*.mlp.fc*"] == 3 * (16 + 1)
    assert "No multiple of 16 features, so each call would pad; they stay in BF16: classifier." in answer.sentences
    with pytest.raises(AdviceError, match=r"--sequence 64: .* takes images"):
        advice(source, sequence=64)


def test_a_config_without_a_class_and_a_file_alone_work(folder: Path) -> None:
    config = {key: value for key, value in GPT2.items() if key != "architectures"}
    source = written(folder, config)
    answer = advice(f"{source}/config.json", "delayed", batch=1)
    assert answer.layers[-1].name == "lm_head"


def test_a_model_without_fused_attention_says_so_and_keeps_its_matrices(folder: Path) -> None:
    config = GPT2 | {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"], "n_layer": 1}
    source = written(folder, config | {"n_positions": 512})
    answer = advice(source, "delayed", batch=1, sequence=512)
    assert any("no fused attention for this model" in sentence for sentence in answer.sentences)
    # At the least the probabilities, 4 heads of 512 x 512 in float32.
    assert dict(of(answer, "bf16").items)["activations"] > 4 * 512 * 512 * 4
    assert not any("fused" in sentence for sentence in advice(written(folder, GPT2), batch=1).sentences)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 8}, "has no model_type: it is not the config.json of a transformers or timm model"),
        ({"model_type": "nonesuch"}, "cannot build a 'nonesuch'"),
        ({"model_type": "nonesuch", "auto_map": {"AutoModel": "x.Y"}}, "its own code .auto_map. is not run"),
        (GPT2 | {"n_head": 5}, "cannot build a 'gpt2'"),
        (
            {"model_type": "whisper", "architectures": ["WhisperModel"]},
            "its input is 'input_features'; advice knows tokens and images",
        ),
    ],
)
def test_a_config_that_cannot_be_built_is_explained(folder: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(AdviceError, match=message):
        advice(written(folder, config))


def test_what_is_no_model_is_explained(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(AdviceError, match=r"no config.json there"):
        advice(str(tmp_path))
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(AdviceError, match="is no JSON that can be read"):
        advice(str(broken))
    with pytest.raises(AdviceError, match=r"--sequence 129: the context of .* is 128 tokens"):
        advice(written(folder, GPT2), sequence=129)
    with pytest.raises(AdviceError, match="'head' matches no linear layer of"):
        advice(written(folder, VIT), exclude=("head",))
    with pytest.raises(AdviceError, match=r"--exclude: .* is no regular expression"):
        advice(written(folder, GPT2), exclude=("(",))


def test_a_forward_that_needs_numbers_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    def asks(self: object, *args: object, **kwargs: object) -> None:
        torch.zeros(1, device="meta").item()

    source = written(folder, GPT2)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", asks)
    with pytest.raises(AdviceError, match=r"its forward does not run on shapes alone .*ask layer by layer"):
        advice(source)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"batch": 0}, "--batch 0: a size is 1 or more"),
        ({"sequence": -1}, "--sequence -1: a size is 1 or more"),
        ({"precision": "fp16"}, "--precision 'fp16' is unknown: there are autocast, bf16"),
        ({"optimizer": "lion"}, "--optimizer 'lion' is unknown: there are adamw, sgd"),
    ],
)
def test_a_question_that_is_none_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(AdviceError, match=message):
        Question("anywhere", **asked)


class Timms(nn.Module):
    """What advice needs of a model of timm's."""

    default_cfg = types.MappingProxyType({"input_size": (3, 16, 16)})

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.fc = nn.Linear(64, 64)
        self.head = nn.Linear(64, classes)

    def get_classifier(self) -> nn.Module:
        """The head."""
        return self.head

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 16, 16] -> [B, classes]."""
        return self.head(self.fc(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


def test_names_and_configs_of_timm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timm = types.ModuleType("timm")
    timm.__spec__ = types.SimpleNamespace(name="timm")  # type: ignore[assignment]
    asked: list[dict[str, Any]] = []

    def create(name: str, pretrained: bool, **arguments: Any) -> nn.Module:
        asked.append({"name": name, "pretrained": pretrained} | arguments)
        return Timms(arguments.get("num_classes", 32))

    timm.__version__, timm.is_model, timm.create_model = "1", lambda name: name == "tiny", create  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    answer = advice("tiny", "delayed", batch=2)
    assert {group.name: group.tokens for group in answer.layers} == {"fc": 2 * 16, "head": 2}
    source = written(folder, {"architecture": "tiny", "model_args": {"num_classes": 48}})
    assert advice(source, "delayed", batch=2).layers[-1].out_features == 48
    assert asked[0] == {"name": "tiny", "pretrained": False}
    with pytest.raises(AdviceError, match="no model of timm 1 is called so; nothing is downloaded"):
        advice("huge")
    with pytest.raises(AdviceError, match="--sequence 8: tiny takes images"):
        advice("tiny", sequence=8)


def test_without_timm_a_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.advice.source.importlib.util.find_spec", lambda name: None)
    with pytest.raises(AdviceError, match="timm, whose model it may be, is not installed; nothing is downloaded"):
        advice("vit_base_patch16_224")


def test_weights_that_are_cast_again_keep_no_codes_and_take_longer(folder: Path) -> None:
    source = written(folder, LLAMA)
    kept, again = (
        advice(source, "delayed", saved_weight=how, batch=2, sequence=1024) for how in ("fp8", "high_precision")
    )
    items = dict(of(kept, "delayed").items)
    assert items["FP8 codes of weights"] > 0
    assert dict(of(again, "delayed").items) == items | {"FP8 codes of weights": 0}
    assert of(again, "bf16") == of(kept, "bf16")
    assert again.fp8_ms["delayed"] > kept.fp8_ms["delayed"]
    assert any("saved_weight='high_precision'" in sentence for sentence in again.sentences)
