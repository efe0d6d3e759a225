"""Inputs and options that a layer cannot take are refused by its own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import octavo
from octavo.modules.router import TopKRouter
from octavo.recipes import CurrentScaling

WIDTH = 32
LAYERS: dict[str, tuple[nn.Module, str]] = {
    "Linear": (octavo.Linear(WIDTH, 16), "input"),
    "LMHead": (octavo.LMHead(WIDTH, 16), "input"),
    "LayerNorm": (octavo.LayerNorm(WIDTH), "input"),
    "RMSNorm": (octavo.RMSNorm(WIDTH), "input"),
    "LayerNormLinear": (octavo.LayerNormLinear(WIDTH, 16), "x"),
    "LayerNormMLP": (octavo.LayerNormMLP(WIDTH, 64), "x"),
    "TopKRouter": (TopKRouter(WIDTH, 4, 2), "x"),
    "MultiheadAttention": (octavo.MultiheadAttention(WIDTH, 2), "hidden_states"),
    "TransformerLayer": (octavo.TransformerLayer(WIDTH, 64, 2), "hidden_states"),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_token_ids_are_no_input_and_the_message_names_layer_argument_dtype_and_shape(kind: str, fp8: bool) -> None:
    layer, argument = LAYERS[kind]
    ids = torch.ones(5, 2, WIDTH, dtype=torch.int64)
    expected = (
        rf"^{kind}: {argument} has dtype torch\.int64 and shape \(5, 2, 32\): .*convert it first, such as x\.float"
    )
    with octavo.autocast(enabled=fp8, recipe=CurrentScaling()), pytest.raises(ValueError, match=expected):
        layer(ids)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_list_is_no_tensor(kind: str) -> None:
    layer, argument = LAYERS[kind]
    with pytest.raises(TypeError, match=rf"^{kind}: {argument} is a list: expected a tensor.*\[..., 32\]"):
        layer([1, 2])


def test_a_converted_layer_is_named_as_in_the_model() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 16))
    octavo.convert(model)
    with pytest.raises(
        ValueError, match=r"^Linear '0': input has shape .* its last dimension must be in_features = 32"
    ):
        model(torch.ones(2, 31))


def test_a_linear_of_whole_numbers_goes_on_as_before_where_fp8_is_off() -> None:
    layer = octavo.Linear(2, 1, bias=False)
    layer.weight = nn.Parameter(torch.tensor([[2, 3]]), requires_grad=False)
    assert layer(torch.tensor([[5, 7]])).tolist() == [[31]]


def test_rotary_angles_are_made_by_calling_the_module() -> None:
    rope, x = octavo.RotaryPositionEmbedding(16), torch.randn(5, 2, WIDTH)
    for layer in (LAYERS["MultiheadAttention"][0], LAYERS["TransformerLayer"][0]):
        for given in (rope, (rope, rope)):
            with pytest.raises(TypeError, match=r"rotary_pos_emb is RotaryPositionEmbedding.*call it: rope\(S\)"):
                layer(x, rotary_pos_emb=given)
        with pytest.raises(TypeError, match="rotary_pos_emb is int: expected angles"):
            layer(x, rotary_pos_emb=5)
        assert torch.equal(layer(x, rotary_pos_emb=rope(5)), layer(x, rotary_pos_emb=(rope(5), rope(5))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_input_format": "bsh"}, "^attn_input_format is 'bsh': expected one of sbhd, bshd, thd"),
        ({"self_attn_mask_type": "casual"}, "^self_attn_mask_type is 'casual': expected one of no_mask, causal"),
        ({"enc_dec_attn_mask_type": "casual"}, "^enc_dec_attn_mask_type is 'casual': expected one of no_mask, causal"),
    ],
)
def test_a_transformer_layer_names_its_own_options(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        octavo.TransformerLayer(WIDTH, 64, 2, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [octavo.MultiheadAttention, octavo.LayerNormLinear, octavo.LayerNormMLP])
def test_an_option_that_a_layer_does_not_have_is_told_those_that_it_has(kind: Any) -> None:
    message = rf"a {kind.__name__} has no option dropout \(given: 0.1\): it takes .*normalization.*recipe"
    with pytest.raises(TypeError, match=message):
        kind(WIDTH, 2, dropout=0.1)


def test_a_head_whose_weight_has_other_classes_is_refused() -> None:
    head, x = octavo.LMHead(WIDTH, 16), torch.randn(3, WIDTH)
    head.weight = nn.Parameter(torch.randn(20, WIDTH))
    for targets in (None, torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(
            ValueError, match=r"weight has shape \(20, 32\), .* out_features = 16 .* out_features to 20"
        ):
            head(x, targets)
    head.out_features = 20
    assert head(x).shape == (3, 20)
