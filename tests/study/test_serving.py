from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo.study.checkpoint import load_weights, save_weights
from octavo.study.layer_error import layer_error_rows, sample_layers, sqnr_db
from octavo.study.model import GPT, ModelShape, build_model
from octavo.study.serving import execution_of, linear_layers, model_bytes, serving_methods, weight_bytes

SHAPE = ModelShape(layers=2, width=128, heads=2, context=32, vocab_size=64)
METHODS = serving_methods("bf16")
QUANTIZED = [key for key in METHODS if key != "bf16"]


@pytest.fixture
def model() -> GPT:
    return build_model(SHAPE, 0).bfloat16().eval().requires_grad_(False)


@pytest.fixture
def batches() -> list[torch.Tensor]:
    return [torch.randint(64, (4, 32)) for _ in range(2)]


@pytest.mark.parametrize("key", QUANTIZED)
def test_a_served_model_comes_back_from_its_file(
    model: GPT, batches: list[torch.Tensor], key: str, tmp_path: Path
) -> None:
    served = copy.deepcopy(model)
    METHODS[key].apply(served, batches)
    save_weights(served, tmp_path / "m.safetensors")
    other = build_model(SHAPE, 1).bfloat16().eval().requires_grad_(False)
    METHODS[key].apply(other, batches)
    assert not other(batches[0]).equal(served(batches[0]))
    load_weights(other, tmp_path / "m.safetensors")
    assert other(batches[0]).equal(served(batches[0]))


@pytest.mark.parametrize("key", QUANTIZED)
def test_the_head_and_its_tie_stay_and_the_rest_is_replaced(model: GPT, batches: list[torch.Tensor], key: str) -> None:
    METHODS[key].apply(model, batches)
    assert list(linear_layers(model)) == []
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.token_embedding.weight


def test_sizes_are_those_of_the_formats(model: GPT, batches: list[torch.Tensor]) -> None:
    names = list(linear_layers(model))
    elements = 2 * 12 * 128**2
    assert weight_bytes(model, names) == 2 * elements
    whole = model_bytes(model)
    assert whole == 2 * sum(parameter.numel() for parameter in model.parameters())
    scales = {  # bytes of scales beside a byte an element, or half a byte in int4
        "tensor_dynamic": 8 * 4,
        "tensor_static": 8 * 8,  # and one of the input
        "rowwise": 2 * (3 + 1 + 4 + 1) * 128 * 4,
        "block128": elements // 128**2 * 4,
        "mxfp8": elements // 32,
        "int8": 2 * (3 + 1 + 4 + 1) * 128 * 4,
        "int4": elements // 128 * 4 - elements // 2,
    }
    for key, extra in scales.items():
        served = copy.deepcopy(model)
        METHODS[key].apply(served, batches)
        assert weight_bytes(served, names) == elements + extra, key
        assert model_bytes(served) == whole - 2 * elements + elements + extra, key


def test_errors_are_those_of_the_formats(model: GPT, batches: list[torch.Tensor]) -> None:
    samples = sample_layers(model, batches, nullcontext)
    assert list(samples) == list(linear_layers(model))
    assert all(sample.rows.shape == (128, sample.weight.shape[1]) for sample in samples.values())
    worst = {}
    for key in QUANTIZED:
        served = copy.deepcopy(model)
        METHODS[key].apply(served, batches)
        rows = layer_error_rows(key, samples, served, nullcontext)
        assert {row["layer"] for row in rows} == set(samples)
        assert all(row["saturation"] == 0 for row in rows)  # the samples are from the calibration batches
        worst[key] = min(row["weight_sqnr_db"] for row in rows)
    # Normal weights: E4M3 keeps about 31.5 dB whatever shares a scale. Uniform steps of amax over 127 for rows of 128
    # keep about 20 log10(127 sqrt(12) / 2.6) = 44 dB, and of the range over 15 for groups of 128 about 20 dB.
    for key in ("tensor_static", "tensor_dynamic", "rowwise", "block128", "mxfp8"):
        assert 30.5 < worst[key] < 32.5, key
    assert 42 < worst["int8"] < 47
    assert 18 < worst["int4"] < 23


def test_what_is_emulated_says_so(model: GPT, batches: list[torch.Tensor]) -> None:
    assert execution_of(model) == "high precision"
    for key in QUANTIZED:
        served = copy.deepcopy(model)
        METHODS[key].apply(served, batches)
        assert execution_of(served) == ("high precision" if key == "int4" else "emulated"), key


def test_the_ratio_is_in_decibels() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr_db(x, x + torch.tensor([0.3, 0.4])) == pytest.approx(20.0, abs=1e-5)
    assert sqnr_db(x, x) is None
