"""What a forward keeps: counted by hand for small layers, and against measured peaks of ViT-Huge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octavo.bench.advice.memory import Memory, memory_of
from octavo.bench.advice.tracing import SCALES, Kept, Precision, kept_by
from octavo.conversion.card import GIB

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def run(model: nn.Module, shape: tuple[int, ...], precision: Precision = "bf16", recipe: str = "") -> Kept:
    """What `model` keeps of an input of `shape` that needs a gradient."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    x = torch.zeros(shape, dtype=dtype, device="meta", requires_grad=True)
    fp8 = {id(one.weight): SCALES[recipe] for one in model.modules() if recipe and isinstance(one, nn.Linear)}
    return kept_by(model, lambda: model(x), precision, fp8)


def mlp(precision: Precision) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    return model.to(torch.bfloat16) if precision == "bf16" else model


def test_linears_in_bf16_keep_their_inputs_and_gelu_keeps_its_own() -> None:
    # x [48, 32], GELU's input and the second Linear's [48, 64] each, 2 bytes. Parameters are not counted.
    kept = run(mlp("bf16"), (48, 32))
    assert kept.bytes == {
        "activations": 2 * 48 * (32 + 64 + 64),
        "input codes": 0,
        "weight codes": 0,
        "weight copies": 0,
    }
    assert kept.largest == 2 * 48 * 64
    assert list(kept.tokens.values()) == [[48], [48]]


def test_autocast_casts_the_input_and_keeps_copies_of_the_weights() -> None:
    kept = run(mlp("autocast"), (48, 32), "autocast")
    assert kept.bytes["activations"] == 2 * 48 * (32 + 64 + 64)
    assert kept.bytes["weight copies"] == 2 * (32 * 64 + 64 * 16)


@pytest.mark.parametrize(
    ("recipe", "of_inputs", "of_weights"),
    [
        ("delayed", 2 * 4, 2 * 4),
        ("rowwise", 4 * (32 + 64), 4 * (32 + 64)),
        # 48 rows are one block of 128; so are the 64 x 32 and the 16 x 64 of the weights.
        ("block", 4 * (32 + 64), 2 * 4),
    ],
)
@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_linears_in_fp8_keep_a_byte_an_element_and_scales(
    recipe: str, of_inputs: int, of_weights: int, precision: Precision
) -> None:
    kept = run(mlp(precision), (48, 32), precision, recipe)
    assert kept.bytes == {
        "activations": 2 * 48 * 64,  # GELU's input alone
        "input codes": 48 * (32 + 64) + of_inputs,
        "weight codes": 32 * 64 + 64 * 16 + of_weights,
        "weight copies": 0,
    }


def test_codes_are_padded_as_the_products_want_them() -> None:
    with torch.device("meta"):
        model = nn.Linear(20, 16).bfloat16()
    kept = run(model, (3, 20), recipe="delayed")
    assert kept.bytes["input codes"] == 16 * 32 + 4
    assert kept.bytes["weight codes"] == 16 * 32 + 4


class Siblings(nn.Module):
    """Three layers on one input, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, 16, dtype=torch.bfloat16, device="meta") for _ in range(3))
        self.v.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[M, 32] -> [M, 16]."""
        return self.q(x) + self.k(x) + self.v(x)


def test_siblings_keep_their_input_once_and_their_weights_each() -> None:
    assert run(Siblings(), (64, 32)).bytes["activations"] == 2 * 64 * 32
    fp8 = run(Siblings(), (64, 32), recipe="delayed").bytes
    assert (fp8["activations"], fp8["input codes"], fp8["weight codes"]) == (0, 64 * 32 + 4, 3 * (32 * 16 + 4))


def test_an_input_without_gradient_keeps_no_weight() -> None:
    model = nn.Linear(32, 16, dtype=torch.bfloat16, device="meta")
    x = torch.zeros(64, 32, dtype=torch.bfloat16, device="meta")
    kept = kept_by(model, lambda: model(x), "bf16", {id(model.weight): SCALES["delayed"]})
    assert (kept.bytes["input codes"], kept.bytes["weight codes"]) == (64 * 32 + 4, 0)


class Attending(nn.Module):
    """Attention of one tensor with itself."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> the same."""
        return nn.functional.scaled_dot_product_attention(x * 2, x * 3, x * 4, is_causal=True)


def test_attention_keeps_no_matrix_of_tokens_by_tokens() -> None:
    # q, k, v and the output in 2 bytes; a float32 logarithm a row.
    kept = run(Attending(), (2, 4, 128, 16))
    assert kept.bytes["activations"] == 4 * (2 * 2 * 4 * 128 * 16) + 4 * 2 * 4 * 128


def test_dropout_keeps_a_byte_an_element_while_training() -> None:
    assert run(nn.Dropout(0.1), (64, 32)).bytes["activations"] == 64 * 32
    assert run(nn.Dropout(0.1).eval(), (64, 32)).bytes["activations"] == 0
    assert run(nn.Dropout(0.0), (64, 32)).bytes["activations"] == 0


def test_norms_and_losses_run_in_float32_under_autocast() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64))
    # The Linear's input in bf16; the norm's in float32, with a mean and a deviation a row.
    assert run(model, (48, 32), "autocast").bytes["activations"] == 2 * 48 * 32 + 4 * 48 * 64 + 2 * 4 * 48


def test_a_branch_on_data_is_taken_as_for_whole_sequences() -> None:
    asked: list[bool] = []

    def forward() -> None:
        mask = torch.ones(2, 8, device="meta")
        asked.append(bool((mask == 1).all()))

    kept_by(nn.Identity(), forward, "bf16")
    assert asked == [True]


# --- ViT-Huge, batch 32: 632 million parameters


class Block(nn.Module):
    """A block as timm has it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] -> the same."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*qkv.unbind(0))
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """256 patches, no class token, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1280, 16, 16)
        self.positions = nn.Parameter(torch.empty(1, 256, 1280))
        self.blocks = nn.Sequential(*(Block(1280, 16) for _ in range(32)))
        self.norm = nn.LayerNorm(1280)
        self.head = nn.Linear(1280, 1024)

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, 256, 256] -> [B, 1024]."""
        x = self.blocks(self.patches(images).flatten(2).transpose(1, 2) + self.positions)
        return self.head(self.norm(x.mean(1)))


def peak(recipe: str) -> Memory:
    with torch.device("meta"):
        model = ViT()
    fp8 = {id(one.weight): SCALES["delayed"] for one in model.modules() if recipe != "bf16" and type(one) is nn.Linear}

    def forward() -> Tensor:
        labels = torch.zeros(32, dtype=torch.long, device="meta")
        return nn.functional.cross_entropy(model(torch.zeros(32, 3, 256, 256, device="meta")), labels)

    return memory_of(model, recipe, kept_by(model, forward, "autocast", fp8), 32, "autocast", "adamw", len(fp8))


def without_gradients(memory: Memory) -> int:
    return memory.total - dict(memory.items)["gradients"]


def whole(memory: Memory) -> int:
    return memory.total


def measured(precision: str) -> float:
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (RESULTS / "2026-11-29-h200-vit-huge.jsonl").read_text().splitlines()
    ]
    [row] = [
        row
        for row in rows
        if (row["example"], row["precision"], row["compiled"], row["class_token"])
        == ("vit_float8_experimental", precision, "no", False)
    ]
    assert row["parameters"] == 632304384
    return float(row["peak_memory_gib"])


@pytest.mark.parametrize(
    ("recipe", "part", "gib"),
    [
        # Gradients of the step before still there during the forward, as the bench trains; and without.
        ("bf16", whole, 22.1),
        ("bf16", without_gradients, measured("bf16")),
        ("delayed", without_gradients, measured("fp8")),
    ],
)
def test_the_count_meets_the_measured_peak_of_vit_huge(recipe: str, part: Callable[[Memory], int], gib: float) -> None:
    """Within 3 %: what is missing are temporaries of the backward and what the allocator rounds up."""
    found = part(peak(recipe)) / GIB
    assert 0.97 * gib < found < gib
