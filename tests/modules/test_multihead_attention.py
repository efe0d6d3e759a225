"""octavo.MultiheadAttention against float64 steps and against its own parts; layouts of parameters; cross attention."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.measures import relative_error
from tests.modules.attention_reference import (
    allowed_pairs,
    attention_steps,
    chained,
    leaves,
    normed,
    self_attention_steps,
    turned_steps,
)
from torch import Tensor, nn

import octavo
from octavo import MultiheadAttention
from octavo.recipes import BlockScaling, CurrentScaling, DelayedScaling, Recipe, RowwiseScaling

HIDDEN, HEADS, GROUPS = 48, 6, 2
D = HIDDEN // HEADS
RECIPES: list[Recipe] = [DelayedScaling(), CurrentScaling(), RowwiseScaling(), BlockScaling()]


def data(tokens: int = 9, batch: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(tokens, batch, HIDDEN), torch.randn(tokens, batch, HIDDEN)


def below(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [6, 2, 1])
@pytest.mark.parametrize("mask_type", ["causal", "no_mask"])
def test_self_attention_is_the_steps(groups: int, bias: bool, mask_type: str) -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, None, groups, bias=bias, attn_mask_type=mask_type)
    x, dy = data()
    state, x64, mine = leaves(layer), x.double().requires_grad_(), x.clone().requires_grad_()
    own = {**below(state, "qkv."), **{k: v for k, v in state.items() if k.startswith("proj.")}}
    exact = self_attention_steps(x64, own, (HEADS, groups), allowed=allowed_pairs(mask_type, None, (3, 9, 9)))
    exact.backward(dy.double())
    y = layer(mine)
    y.backward(dy)
    assert relative_error(exact, y) < chained(HIDDEN, 5)
    assert relative_error(x64.grad, mine.grad) < chained(HIDDEN, 10)  # type: ignore[arg-type]
    for name, parameter in layer.named_parameters():
        if name != "qkv.key_bias":  # whose gradient is 0
            assert relative_error(state[name].grad, parameter.grad) < chained(HIDDEN, 10), name  # type: ignore[arg-type]


def test_cross_attention_is_the_steps() -> None:
    layer = MultiheadAttention(
        HIDDEN, HEADS, None, GROUPS, attention_type="cross", attn_mask_type="padding", input_layernorm=True
    )
    x, memory = torch.randn(5, 3, HIDDEN), torch.randn(9, 3, HIDDEN)
    lengths = ([5, 2, 1], [9, 4, 6])
    masks = tuple(torch.arange(n) >= torch.tensor(real)[:, None] for n, real in zip((5, 9), lengths, strict=True))
    y = layer(x, encoder_output=memory, attention_mask=masks)
    state = {name: value.double() for name, value in layer.state_dict().items()}
    query, key_value = below(state, "layernorm_query."), below(state, "key_value.")
    n = normed(x.double(), query["layer_norm_weight"], query["layer_norm_bias"])
    heads = []
    for source, made, name, count in (
        (n, query, "query", HEADS),
        (memory.double(), key_value, "key", GROUPS),
        (memory.double(), key_value, "value", GROUPS),
    ):
        projected = source @ made[f"{name}_weight"].t() + made[f"{name}_bias"]
        heads.append(projected.unflatten(-1, (count, D)).permute(1, 2, 0, 3))
    out, _ = attention_steps(*heads, allowed_pairs("padding", None, (3, 5, 9), lengths))
    exact = out.permute(2, 0, 1, 3).flatten(-2) @ state["proj.weight"].t() + state["proj.bias"]
    assert relative_error(exact, y) < chained(HIDDEN, 6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_heads_are_turned_and_normalised_in_order(kind: str, before: bool, interleaved: bool) -> None:
    rotary = octavo.RotaryPositionEmbedding(D, 0.5, interleaved=interleaved, rotary_base=100.0)
    layer = MultiheadAttention(
        HIDDEN, HEADS, None, GROUPS, qk_norm_type=kind, qk_norm_before_rope=before, rotary_pos_interleaved=interleaved
    )
    with torch.no_grad():
        for norm in (layer.q_norm, layer.k_norm):
            for parameter in norm.parameters():  # type: ignore[union-attr]
                parameter.normal_()
    x, _ = data()
    y = layer(x, rotary_pos_emb=rotary(12))
    state = {name: value.double() for name, value in layer.state_dict().items()}

    def norm_of(heads: Tensor, name: str) -> Tensor:
        if kind == "L2Normalization":
            return heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        return normed(heads, state[f"{name}.weight"], state.get(f"{name}.bias"), kind, 1e-6)

    parts = []
    for name, count in (("query", HEADS), ("key", GROUPS), ("value", GROUPS)):
        heads = x.double() @ state[f"qkv.{name}_weight"].t() + state[f"qkv.{name}_bias"]
        heads = heads.unflatten(-1, (count, D))
        if name != "value":
            heads = norm_of(heads, f"{name[0]}_norm") if before else heads
            heads = turned_steps(heads, range(9), 100.0, interleaved, D // 2)
            heads = heads if before else norm_of(heads, f"{name[0]}_norm")
        parts.append(heads.permute(1, 2, 0, 3))
    out, _ = attention_steps(*parts, allowed_pairs("causal", None, (3, 9, 9)))
    exact = out.permute(2, 0, 1, 3).flatten(-2) @ state["proj.weight"].t() + state["proj.bias"]
    assert relative_error(exact, y) < chained(HIDDEN, 8)


def fused_rows(layer: MultiheadAttention, kind: str, interleaved: bool) -> Tensor:
    """The rows of a fused parameter, of those of separate ones."""
    q, k, v = (getattr(layer.qkv, f"{name}_{kind}").detach() for name in ("query", "key", "value"))
    if not interleaved:
        return torch.cat((q, k, v))
    rows = []
    for group in range(GROUPS):
        first, last = group * D * (HEADS // GROUPS), (group + 1) * D * (HEADS // GROUPS)
        rows += [q[first:last], k[group * D : (group + 1) * D], v[group * D : (group + 1) * D]]
    return torch.cat(rows)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_fused_weight_is_the_separate_ones_in_another_order(interleaved: bool) -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, None, GROUPS)
    fused = MultiheadAttention(HIDDEN, HEADS, None, GROUPS, fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    assert list(fused.state_dict()) == ["qkv.weight", "qkv.bias", "proj.weight", "proj.bias"]
    fused.load_state_dict(
        {
            **{f"qkv.{kind}": fused_rows(layer, kind, interleaved) for kind in ("weight", "bias")},
            **{f"proj.{kind}": getattr(layer.proj, kind).detach() for kind in ("weight", "bias")},
        }
    )
    x, _ = data()
    # The same sums for each feature, by a product of other extents.
    assert relative_error(layer(x), fused(x)) < chained(HIDDEN, 1)


def test_a_fused_weight_of_cross_attention() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, None, GROUPS, attention_type="cross", attn_mask_type="no_mask")
    x, memory = torch.randn(5, 3, HIDDEN), torch.randn(9, 3, HIDDEN)
    for interleaved in (False, True):
        fused = MultiheadAttention(
            HIDDEN, HEADS, None, GROUPS, attention_type="cross", attn_mask_type="no_mask", fuse_qkv_params=True,
            qkv_weight_interleaved=interleaved,
        )  # fmt: skip
        state = {name: value for name, value in layer.state_dict().items() if name.startswith("proj")}
        for kind in ("weight", "bias"):
            state[f"query_layer.{kind}"] = getattr(layer.query_layer, f"query_{kind}").detach()
            k, v = (getattr(layer.key_value, f"{name}_{kind}").detach() for name in ("key", "value"))
            state[f"key_value.{kind}"] = torch.cat([k, v])
            if interleaved:
                state[f"key_value.{kind}"] = torch.cat([k[:D], v[:D], k[D:], v[D:]])
        fused.load_state_dict(state)
        assert relative_error(layer(x, encoder_output=memory), fused(x, encoder_output=memory)) < chained(HIDDEN, 1)


@pytest.mark.parametrize("layernorm", [False, True])
def test_parameters_have_transformer_engines_names(layernorm: bool) -> None:
    own = MultiheadAttention(HIDDEN, HEADS, input_layernorm=layernorm, qk_norm_type="RMSNorm")
    cross = MultiheadAttention(HIDDEN, HEADS, input_layernorm=layernorm, attention_type="cross")
    norm = ["layer_norm_weight", "layer_norm_bias"] if layernorm else []
    three = [f"{part}_{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")]
    first = "layernorm_qkv" if layernorm else "qkv"
    assert sorted(own.state_dict()) == sorted(
        [f"{first}.{name}" for name in norm + three] + ["q_norm.weight", "k_norm.weight", "proj.weight", "proj.bias"]
    )
    first = "layernorm_query" if layernorm else "query_layer"
    assert sorted(cross.state_dict()) == sorted(
        [f"{first}.{name}" for name in norm + three[:2]]
        + [f"key_value.{name}" for name in three[2:]]
        + ["proj.weight", "proj.bias"]
    )


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_it_is_its_parts(recipe: Recipe | None) -> None:
    """In FP8 too, bit for bit: LayerNorm, one Linear, attention, one Linear."""
    layer = MultiheadAttention(HIDDEN, HEADS, None, GROUPS, input_layernorm=True, return_layernorm_output=True)
    norm, qkv = octavo.LayerNorm(HIDDEN), octavo.Linear(HIDDEN, (HEADS + 2 * GROUPS) * D)
    core, proj = octavo.DotProductAttention(HEADS, D, GROUPS), copy.deepcopy(layer.proj)
    with torch.no_grad():
        qkv.weight.copy_(layer.layernorm_qkv.weight)
        qkv.bias.copy_(layer.layernorm_qkv.bias)
    x, dy = data()
    outcomes = []
    for composed in (False, True):
        leaf = x.clone().requires_grad_()
        with octavo.autocast(enabled=recipe is not None, recipe=recipe):
            if composed:
                n = norm(leaf)
                parts = qkv(n).split([HIDDEN, GROUPS * D, GROUPS * D], -1)
                y = proj(core(*(part.unflatten(-1, (-1, D)) for part in parts)))
            else:
                y, n = layer(leaf)
        (y * dy + n).sum().backward()
        outcomes.append((y, n, leaf.grad))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


def test_fp8_is_on_in_both_projections_and_nowhere_else() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, recipe=CurrentScaling())
    with octavo.count_gemms() as count:
        layer(data()[0].requires_grad_()).sum().backward()
    assert count.fp8 == 6
    assert count.high_precision == 0


def test_micro_batches_share_the_codes_of_the_weights() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, input_layernorm=True)
    batches = [data()[0] for _ in range(3)]
    with octavo.autocast(recipe=CurrentScaling()):
        plain = [layer(x) for x in batches]
        cached = [layer(x, cached_weight="reuse" if index else "refresh") for index, x in enumerate(batches)]
    for one, other in zip(plain, cached, strict=True):
        assert torch.equal(one, other)


def test_non_contiguous_inputs_give_the_same_bits() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, input_layernorm=True)
    x = torch.randn(3, 9, HIDDEN).transpose(0, 1)
    with octavo.autocast(recipe=CurrentScaling()):
        assert torch.equal(layer(x), layer(x.contiguous()))


def test_packed_sequences_are_turned_by_their_own_places() -> None:
    lengths = [4, 7, 1]
    rotary = octavo.RotaryPositionEmbedding(D)(8)
    packed = MultiheadAttention(HIDDEN, HEADS, qkv_format="thd", attn_mask_type="padding_causal")
    alone = MultiheadAttention(HIDDEN, HEADS, qkv_format="bshd")
    alone.load_state_dict(packed.state_dict())
    x = torch.randn(12, HIDDEN)
    y = packed(x, rotary_pos_emb=rotary, cu_seqlens_q=torch.tensor([0, 4, 11, 12], dtype=torch.int32))
    expected = torch.cat([alone(part[None], rotary_pos_emb=rotary)[0] for part in x.split(lengths)])
    assert relative_error(expected, y) < chained(HIDDEN, 2)


def test_under_autocast_parameters_stay_float32_and_products_do_not() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, input_layernorm=True, qk_norm_type="RMSNorm")
    x = torch.randn(9, 3, HIDDEN, requires_grad=True)
    for recipe in (None, CurrentScaling()):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16), octavo.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(x, rotary_pos_emb=octavo.RotaryPositionEmbedding(D)(9))
        assert y.dtype is torch.bfloat16
        y.float().sum().backward()
        assert x.grad is not None
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in layer.parameters())


def test_its_linear_layers_may_be_those_of_torch() -> None:
    layer = MultiheadAttention(HIDDEN, HEADS, fuse_qkv_params=True)
    x, _ = data()
    before = layer(x)
    octavo.unconvert(layer)
    assert type(layer.proj) is nn.Linear
    assert torch.equal(layer(x), before)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"attention_type": "crossed"}, {}, "attention_type is 'crossed': expected 'self' or 'cross'"),
    ({"return_layernorm_output": True}, {}, "needs input_layernorm=True"),
    ({"num_attention_heads": 5}, {}, "hidden_size is 48 and num_attention_heads 5"),
    ({"num_gqa_groups": 4}, {}, "num_attention_heads is 6 and num_gqa_groups 4"),
    ({"qk_norm_type": "BatchNorm"}, {}, "qk_norm_type is 'BatchNorm': expected None or one of L2Normalization"),
    ({"attention_type": "cross"}, {}, "encoder_output is None: it belongs to 'cross'"),
    ({}, {"encoder_output": torch.randn(9, 3, HIDDEN)}, "encoder_output is given: it belongs to 'cross'"),
]


@pytest.mark.parametrize(("options", "call", "sentence"), REFUSED)
def test_contradictions_are_refused(options: dict[str, Any], call: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        MultiheadAttention(**{"hidden_size": HIDDEN, "num_attention_heads": HEADS, **options})(data()[0], **call)


def test_frozen_projections_pass_the_gradient_and_get_none() -> None:
    layer: nn.Module = MultiheadAttention(HIDDEN, HEADS, recipe=CurrentScaling())
    layer.qkv.requires_grad_(False)  # type: ignore[union-attr]
    x = data()[0].requires_grad_()
    with octavo.count_gemms() as count:
        layer(x).square().sum().backward()
    assert x.grad.any()  # type: ignore[union-attr]
    # qkv: fprop and dgrad; proj: all three.
    assert count.fp8 == 5
