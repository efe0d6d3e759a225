"""What a call of attention's layers may not say, and what stands in the padding: nothing of it goes by in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.attention_reference import chained
from torch import Tensor

from octavo import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer

H, G, D = 4, 2, 16
HIDDEN = H * D


def operands(*lead: int) -> list[Tensor]:
    """q, k, v with their heads in the last two dimensions."""
    return [torch.randn(*lead, heads, D) for heads in (H, G, G)]


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def run(attend: Any, qkv: list[Tensor], dy: Tensor, **call: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in qkv]
    out = attend(*leaves, **call)
    out.backward(dy)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def layers() -> list[Any]:
    attention, x = DotProductAttention(H, D, G), torch.randn(9, 2, HIDDEN)
    qkv = operands(9, 2)
    whole, layer = MultiheadAttention(HIDDEN, H), TransformerLayer(HIDDEN, HIDDEN, H)
    decoder = TransformerLayer(HIDDEN, HIDDEN, H, layer_type="decoder")
    return [
        lambda **call: attention(*qkv, **call),
        lambda **call: attention.way(*qkv, **call),
        lambda **call: whole(x, **call),
        lambda **call: layer(x, **call),
        lambda **call: decoder(x, encoder_output=x, enc_dec_call=call),
    ]


@pytest.mark.parametrize("which", range(5))
def test_a_misspelt_argument_is_named_with_those_there_are(which: int) -> None:
    attend = layers()[which]
    attend(attn_mask_type="no_mask")
    with pytest.raises(TypeError, match="no argument attn_mask_typ: expected some of attention_mask, attn_mask_type"):
        attend(attn_mask_typ="no_mask")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"attention_mask": torch.zeros(3, 1, 1, 9, dtype=torch.bool)}, r"\[2, tokens\]"),
    ({"cu_seqlens_q": ends(0, 3)}, "for 1 sequences, and the batch has 2"),
    ({"cu_seqlens_q": ends(0, 3, 99)}, "room for 0 to 9"),
    ({"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(3, 1, 9, 9, dtype=torch.bool)}, "must broadcast"),
    (
        {
            "attn_mask_type": "causal",
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.zeros(3, 1, 9, 9),
        },
        "core_attention_bias has shape .* must broadcast",
    ),
    (
        {"attn_mask_type": "causal", "core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3, H)},
        r"or \[2, 4\] of the batch",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_what_is_of_another_batch_is_refused(call: dict[str, Any], sentence: str) -> None:
    layer = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="padding")
    for attend in (layer, layer.way):
        with pytest.raises(ValueError, match=sentence):
            attend(*operands(2, 9), **call)


def test_one_mask_for_all_sequences() -> None:
    layer = DotProductAttention(H, D, G, qkv_format="bshd", attn_mask_type="padding")
    qkv, mask = operands(3, 9), torch.arange(9)[None] >= 5
    assert torch.equal(layer(*qkv, attention_mask=mask), layer(*qkv, attention_mask=mask.expand(3, 9)))


@pytest.mark.parametrize(
    ("cu_q", "cu_kv", "sentence"),
    [
        (ends(0, 3, 6), ends(0, 6), "must be of as many sequences"),
        (ends(0, 4, 3, 6), None, "3 follows 4"),
        (ends(0, 3, 9), None, "there are 6 tokens"),
    ],
)
def test_packed_sequences_lie_apart(cu_q: Tensor, cu_kv: Tensor | None, sentence: str) -> None:
    call = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    with pytest.raises(ValueError, match=sentence):
        DotProductAttention(H, D, G, qkv_format="thd")(*operands(6), **call)
    # Before heads are turned by their places.
    whole = MultiheadAttention(HIDDEN, H, qkv_format="thd")
    with pytest.raises(ValueError, match=sentence):
        whole(torch.randn(6, HIDDEN), rotary_pos_emb=RotaryPositionEmbedding(D)(6), **call)
    with pytest.raises(TypeError, match="a list: expected a tensor"):
        whole(torch.randn(6, HIDDEN), rotary_pos_emb=RotaryPositionEmbedding(D)(6), cu_seqlens_q=[0, 6])


@pytest.mark.parametrize(
    ("shapes", "layout", "sentence"),
    [
        (((9, 2), (9, 2), (8, 2)), "sbhd", "each key has a value"),
        (((2, 9), (2, 9), (1, 9)), "bshd", "each key has a value"),
        (((9,), (9,), (8,)), "thd", "each key has a value"),
        (((9, 2), (9, 1), (9, 1)), "sbhd", "batch in dimension 1"),
        (((2, 9), (1, 9), (1, 9)), "bshd", "batch in dimension 0"),
    ],
)
def test_keys_and_values_are_of_one_length_and_all_of_one_batch(shapes: Any, layout: str, sentence: str) -> None:
    q, k, v = (torch.randn(*lead, heads, D) for lead, heads in zip(shapes, (H, G, G), strict=True))
    layer = DotProductAttention(H, D, G, qkv_format=layout)
    for attend in (layer, layer.way):
        with pytest.raises(ValueError, match=sentence):
            attend(q, k, v, cu_seqlens_q=ends(0, 8))


def nan_in(x: Tensor, padding: Tensor) -> Tensor:
    return x.masked_fill(padding.reshape(*padding.shape, *[1] * (x.dim() - padding.dim())), torch.nan)


@pytest.mark.parametrize("mask_type", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_of_the_padding_gets_out(mask_type: str, biased: bool, layout: str, compiled: bool) -> None:
    """NaN in padded positions, of a bias too: everything is as with zeros there."""
    if layout == "thd" and biased:
        return
    layer = DotProductAttention(H, D, G, qkv_format=layout, attn_mask_type=mask_type)
    call: dict[str, Any] = {}
    if layout == "bshd":
        padding = torch.arange(9) >= torch.tensor([4, 9, 0])[:, None]
        qkv, dy = operands(3, 9), torch.randn(3, 9, HIDDEN)
        call["attention_mask"] = padding
    else:
        padding = torch.arange(9) >= 7
        qkv, dy = operands(9), torch.randn(9, HIDDEN)
        call["cu_seqlens_q"] = ends(0, 3, 7)
    if biased:
        bias = torch.randn(3, 1, 9, 9).masked_fill(padding[:, None, :, None] | padding[:, None, None], torch.nan)
        call |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    exact = run(layer, qkv, dy, **call | ({"core_attention_bias": bias.nan_to_num()} if biased else {}))
    attend: Any = layer
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(exact, run(attend, [nan_in(x, padding) for x in qkv], dy, **call), strict=True):
        assert relative_error(one, other) < chained(D, 4)
        assert not other[padding].any()


EMPTY: list[tuple[str, str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ("bshd", "padding", (2, 5), (2, 5), {"attention_mask": torch.ones(2, 5, dtype=torch.bool)}),
    ("bshd", "padding_causal", (2, 5), (2, 5), {"cu_seqlens_q": ends(0, 0, 0)}),
    ("bshd", "padding", (0, 5), (0, 5), {"cu_seqlens_q": ends(0)}),
    (
        "sbhd",
        "padding",
        (0, 2),
        (5, 2),
        {"attention_mask": (torch.ones(2, 0, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool))},
    ),
    ("thd", "padding_causal", (3,), (3,), {"cu_seqlens_q": ends(0, 0)}),
    ("thd", "padding", (0,), (0,), {"cu_seqlens_q": ends(0, 0)}),
    ("thd", "padding", (3,), (3,), {"cu_seqlens_q": ends(1)}),
]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", EMPTY)
def test_a_batch_without_tokens_gives_zero_gradients(case: Any, autocast: bool) -> None:
    layout, mask_type, of_q, of_kv, call = case
    layer = DotProductAttention(H, D, G, qkv_format=layout, attn_mask_type=mask_type)
    leaves = [torch.randn(*lead, n, D).requires_grad_() for lead, n in ((of_q, H), (of_kv, G), (of_kv, G))]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = layer(*leaves, **call)
    assert out.shape == (*of_q, HIDDEN)
    assert out.dtype is (torch.bfloat16 if autocast else torch.float32)
    assert out.requires_grad
    assert not out.any()
    out.sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert not leaf.grad.any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"qkv_format": "bshd"}, r"no option qkv_format \(given: 'bshd'\): use attn_input_format"),
        ({"attn_mask_type": "no_mask"}, "use self_attn_mask_type"),
        ({"attention_type": "cross"}, "use layer_type='decoder'"),
        ({"input_layernorm": False}, "use output_layernorm"),
        ({"return_layernorm_output": True}, "use apply_residual_connection_post_layernorm"),
        ({"softmax_scal": 1.0}, "no option softmax_scal .* it takes kv_channels, .*, softmax_scale"),
    ],
)
def test_a_layer_names_its_own_option_instead(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        TransformerLayer(HIDDEN, HIDDEN, H, **options)


@pytest.mark.parametrize(
    ("layout", "shape", "sentence"),
    [
        ("sbhd", (9, HIDDEN), r"hidden_states has shape \(9, 64\): .* takes \[tokens, batch, 64\]"),
        ("bshd", (1, 2, 9, HIDDEN), r"hidden_states has shape .* takes \[batch, tokens, 64\]"),
        ("thd", (2, 9, HIDDEN), r"hidden_states has shape .* takes \[tokens, 64\]"),
        ("sbhd", (9, 2, 32), r"hidden_states has shape \(9, 2, 32\)"),
    ],
)
def test_an_input_of_another_shape_is_named(layout: str, shape: tuple[int, ...], sentence: str) -> None:
    for layer in (
        MultiheadAttention(HIDDEN, H, qkv_format=layout),
        TransformerLayer(HIDDEN, HIDDEN, H, attn_input_format=layout),
    ):
        with pytest.raises(ValueError, match=sentence):
            layer(torch.randn(shape), cu_seqlens_q=ends(0, 9))


@pytest.mark.parametrize(("shape", "sentence"), [((9, HIDDEN), "takes"), ((9, 3, HIDDEN), "both must be of one batch")])
def test_an_encoders_output_of_another_shape_is_named(shape: tuple[int, ...], sentence: str) -> None:
    layer = MultiheadAttention(HIDDEN, H, attention_type="cross", attn_mask_type="no_mask")
    with pytest.raises(ValueError, match=f"encoder_output has shape .* {sentence}"):
        layer(torch.randn(9, 2, HIDDEN), encoder_output=torch.randn(shape))


@pytest.mark.parametrize("said", [False, True])
def test_a_decoder_compiles_in_one_graph(said: bool) -> None:
    layer, x = TransformerLayer(HIDDEN, HIDDEN, H, layer_type="decoder"), torch.randn(9, 2, HIDDEN)
    call: dict[str, Any] = {"enc_dec_call": {"attn_mask_type": "causal"}} if said else {}
    torch._dynamo.reset()
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, encoder_output=x, **call), layer(x, encoder_output=x, **call))
